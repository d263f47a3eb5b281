"""Bytes of a client as control packets of MQTT 3.1, 3.1.1 and 5.0. Strict: what the standard forbids is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rsmq.gateway.protocol import packet
from rsmq.gateway.protocol.packet import (
    BRIDGE,
    LONGEST_NAME,
    MOST_PACKET_IDS,
    NO_ID,
    V5,
    V31,
    V311,
    AckPacket,
    Auth,
    Connect,
    Disconnect,
    MalformedPacket,
    Packet,
    Ping,
    Properties,
    ProtocolError,
    Publish,
    ReasonCode,
    RefusedPacket,
    Subscribe,
    Subscription,
    Unsubscribe,
    UnsupportedVersion,
    Will,
)
from rsmq.gateway.protocol.properties import WILL, Property, read_binary, read_properties, read_string
from rsmq.gateway.protocol.topic_filter import check_filter, check_topic_name, split_share

NAMES: Final = {"MQTT": (V311, V5), "MQIsdp": (V31,)}
MOST_FILTERS: Final = 10_000
"""Topic filters of a packet. A client is granted fewer subscriptions."""
MOST_NAMES: Final = 50_000
KNOWN_NAMES: Final[dict[bytes, str]] = {}
"""Topic names that were checked before: nearly all messages have one of these."""


class PacketTooLarge(ProtocolError):
    """A packet above the limit, known from its header alone."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a packet of {size} bytes is above the limit", ReasonCode.PACKET_TOO_LARGE)


def read_frame(data: bytes, at: int, size: int, limit: int) -> tuple[int, int]:
    """Where the body of the packet at `at` begins and ends; the end is -1 while its bytes have not all arrived.

    A wrong or too large length is refused as soon as it is known.
    """
    if size - at < 2:
        return at, -1
    n = data[at + 1]
    body = at + 2
    if n >= 128:
        n &= 127
        shift = 7
        while True:
            if body >= size:
                return body, -1
            byte = data[body]
            body += 1
            n |= (byte & 127) << shift
            if byte < 128:
                if byte == 0:
                    raise MalformedPacket("the length of a packet is longer than necessary")
                break
            shift += 7
            if shift > 21:
                raise MalformedPacket("the length of a packet has five bytes")
    if body - at + n > limit:
        raise PacketTooLarge(body - at + n)
    end = body + n
    return body, end if end <= size else -1


def decode(head: int, data: bytes, at: int, end: int, level: int) -> Packet:
    """The packet with the first byte `head` and this body, of a client with this protocol level (0: not known yet)."""
    kind = head >> 4
    if kind == packet.PUBLISH:
        return read_publish(head, data, at, end, level)
    if kind in ACKS:
        return _read_ack(head, data, at, end, level)
    read = READERS.get(kind)
    if read is None or (kind == packet.AUTH and level != V5):
        raise (ProtocolError if kind else MalformedPacket)(f"a client does not send packets of type {kind}")
    flags = head & 15
    if flags != (2 if kind in (packet.SUBSCRIBE, packet.UNSUBSCRIBE) else 0) and not (
        level == V31 and flags == 10 and kind in (packet.SUBSCRIBE, packet.UNSUBSCRIBE)  # DUP existed there
    ):
        raise MalformedPacket(f"the flags of a packet of type {kind} are {flags:#x}")
    return read(data, at, end, level)


def read_topic_name(raw: bytes) -> str:
    """A topic name. An empty one is possible in version 5, with an alias."""
    name = KNOWN_NAMES.get(raw)
    if name is None:
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise MalformedPacket("the topic name is not UTF-8") from None
        if "\0" in name:
            raise MalformedPacket("the topic name has the character U+0000")
        if name:
            check_topic_name(name)
        if len(raw) <= LONGEST_NAME:
            if len(KNOWN_NAMES) >= MOST_NAMES:
                KNOWN_NAMES.clear()
            KNOWN_NAMES[raw] = name
    return name


def read_publish(head: int, data: bytes, at: int, end: int, level: int) -> Publish:
    """The packet that nearly all bytes are in: everything is done here, in one step."""
    qos = head >> 1 & 3
    if qos == 3 or (qos == 0 and head & 8):
        raise MalformedPacket("a PUBLISH has QoS 3, or DUP with QoS 0")
    start = at + 2
    if start > end:
        raise MalformedPacket("a PUBLISH is cut off")
    at = start + (data[at] << 8 | data[at + 1])
    if at > end:
        raise MalformedPacket("a topic name is longer than its packet")
    raw = data[start:at]
    topic = KNOWN_NAMES.get(raw)
    if topic is None:
        topic = read_topic_name(raw)
    packet_id = b""
    if qos:
        if at + 2 > end:
            raise MalformedPacket("a PUBLISH has no packet id")
        packet_id = data[at : at + 2]
        at += 2
        if packet_id == NO_ID:
            raise MalformedPacket("the packet id is 0")
    properties: Properties | None = None
    forwarded = b""
    if level == V5:
        if at >= end:
            raise MalformedPacket("a PUBLISH has no properties")
        if data[at]:
            properties, forwarded, at = read_properties(data, at, end, packet.PUBLISH)
            if Property.SUBSCRIPTION_ID in properties:
                raise ProtocolError("a client sends no subscription identifiers")
        else:
            at += 1
    if not topic and (properties is None or Property.TOPIC_ALIAS not in properties):
        raise ProtocolError("the topic name is empty")
    return Publish(
        topic, data[at:end], qos, packet_id, retain=bool(head & 1), dup=bool(head & 8),
        properties=properties, forwarded=forwarded,
    )  # fmt: skip


# -- the acknowledgements of both directions ------------------------------------------------------------------------


ACKS: Final = {packet.PUBACK: 0, packet.PUBREC: 0, packet.PUBREL: 2, packet.PUBCOMP: 0}
"""The flags of each."""
REASONS: Final = {
    packet.PUBACK: frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)),
    packet.PUBREC: frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)),
    packet.PUBREL: frozenset((0x00, 0x92)),
    packet.PUBCOMP: frozenset((0x00, 0x92)),
    packet.DISCONNECT: frozenset((0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99)),
    packet.AUTH: frozenset((0x00, 0x18, 0x19)),
}
"""What a client may say in each packet."""


def _read_ack(head: int, data: bytes, at: int, end: int, level: int) -> AckPacket:
    kind, flags = head >> 4, head & 15
    if flags != ACKS[kind] and not (level == V31 and kind == packet.PUBREL and flags == 10):
        raise MalformedPacket(f"the flags of a packet of type {kind} are {flags:#x}")
    packet_id, at = _packet_id(data, at, end)
    if at == end:
        return AckPacket(kind, packet_id)
    if level != V5:
        raise MalformedPacket("an acknowledgement is too long")
    return AckPacket(kind, packet_id, _reason(kind, data, at, end)[0])


def _packet_id(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at + 2 > end:
        raise MalformedPacket("a packet id is cut off")
    packet_id = data[at] << 8 | data[at + 1]
    if not 0 < packet_id <= MOST_PACKET_IDS:
        raise MalformedPacket("the packet id is 0")
    return packet_id, at + 2


def _reason(kind: int, data: bytes, at: int, end: int) -> tuple[int, Properties]:
    """The reason code and properties, both of which may be left out, at the end of a packet of version 5."""
    reason, properties = data[at], Properties()
    if reason not in REASONS[kind]:
        raise MalformedPacket(f"a packet of type {kind} has no reason code {reason:#x}")
    at += 1
    if at < end:
        properties, _, at = read_properties(data, at, end, kind)
    _expect_end(at, end)
    return reason, properties


def _expect_end(at: int, end: int) -> None:
    if at != end:
        raise MalformedPacket("a packet has bytes behind its last field")


# -- the rest --------------------------------------------------------------------------------------------------------


def _read_connect(data: bytes, at: int, end: int, _level: int) -> Connect:
    name, at = read_string(data, at, end)
    if at >= end:
        raise MalformedPacket("a CONNECT is cut off")
    level, at = data[at], at + 1
    if name not in NAMES:
        raise MalformedPacket("the protocol is not MQTT")
    is_bridge = level & BRIDGE != 0 and level & ~BRIDGE in (V31, V311)
    if is_bridge:
        level &= ~BRIDGE
    if level not in NAMES[name]:
        raise UnsupportedVersion(level)
    if at + 3 > end:
        raise MalformedPacket("a CONNECT is cut off")
    flags, keep_alive, at = data[at], data[at + 1] << 8 | data[at + 2], at + 3
    _check_connect_flags(flags, level)
    properties = Properties()
    if level == V5:
        properties, _, at = read_properties(data, at, end, packet.CONNECT)
    client_id, at = read_string(data, at, end)
    will: Will | None = None
    if flags & 4:
        will, at = _read_will(flags, data, at, end, level)
    username: str | None = None
    password: bytes | None = None
    if flags & 128:
        username, at = read_string(data, at, end)
    if flags & 64:
        password, at = read_binary(data, at, end)
    _expect_end(at, end)
    return Connect(level, client_id, bool(flags & 2), keep_alive, will, username, password, properties, is_bridge)


def _check_connect_flags(flags: int, level: int) -> None:
    if flags & 1 and level != V31:
        raise MalformedPacket("the reserved flag of a CONNECT is set")
    if flags & 0x18 == 0x18 and (flags & 4 or level != V31):
        raise MalformedPacket("the will has QoS 3")
    if not flags & 4 and flags & 0x38 and level != V31:  # in version 3.1 they say nothing then
        raise MalformedPacket("there is no will, but its QoS or retain flag is set")
    if level != V5 and flags & 0xC0 == 0x40:
        raise MalformedPacket("there is a password without a user name")


def _read_will(flags: int, data: bytes, at: int, end: int, level: int) -> tuple[Will, int]:
    properties, forwarded = Properties(), b""
    if level == V5:
        properties, forwarded, at = read_properties(data, at, end, WILL)
    topic, at = read_string(data, at, end)
    check_topic_name(topic)
    payload, at = read_binary(data, at, end)
    return Will(topic, payload, flags >> 3 & 3, bool(flags & 32), properties, forwarded), at


def _read_subscribe(data: bytes, at: int, end: int, level: int) -> Subscribe:
    packet_id, at = _packet_id(data, at, end)
    identifier = 0
    if level == V5:
        properties, _, at = read_properties(data, at, end, packet.SUBSCRIBE)
        identifier = properties.get(Property.SUBSCRIPTION_ID, 0)
    found = list[Subscription]()
    while at < end:
        text, at = read_string(data, at, end)
        check_filter(text)
        if at >= end:
            raise MalformedPacket("a SUBSCRIBE has a filter without options")
        options, at = data[at], at + 1
        if options & 3 == 3 or options & (0xC0 if level == V5 else 0xFC):
            raise MalformedPacket("the options of a subscription have QoS 3 or reserved bits")
        if options & 0x30 == 0x30:
            raise ProtocolError("the retain handling of a subscription is 3")
        if options & 4 and split_share(text)[0]:
            raise ProtocolError("a shared subscription cannot have No Local")
        found.append(
            Subscription(text, options & 3, bool(options & 4), bool(options & 8), options >> 4 & 3, identifier)
        )
        _check_number(found)
    if not found:
        raise ProtocolError("a SUBSCRIBE has no filter")
    return Subscribe(packet_id, tuple(found))


def _check_number(filters: Sequence[object]) -> None:
    if len(filters) > MOST_FILTERS:
        raise RefusedPacket(
            ReasonCode.QUOTA_EXCEEDED, f"a packet has more than {MOST_FILTERS} topic filters", "filters"
        )


def _read_unsubscribe(data: bytes, at: int, end: int, level: int) -> Unsubscribe:
    packet_id, at = _packet_id(data, at, end)
    if level == V5:
        _, _, at = read_properties(data, at, end, packet.UNSUBSCRIBE)
    found = list[str]()
    while at < end:
        text, at = read_string(data, at, end)
        check_filter(text)
        found.append(text)
        _check_number(found)
    if not found:
        raise ProtocolError("an UNSUBSCRIBE has no filter")
    return Unsubscribe(packet_id, tuple(found))


def _read_disconnect(data: bytes, at: int, end: int, level: int) -> Disconnect:
    if at == end:
        return Disconnect(0, Properties())
    if level != V5:
        raise MalformedPacket("a DISCONNECT is too long")
    return Disconnect(*_reason(packet.DISCONNECT, data, at, end))


def _read_auth(data: bytes, at: int, end: int, _level: int) -> Auth:
    return Auth(0, Properties()) if at == end else Auth(*_reason(packet.AUTH, data, at, end))


def _read_ping(_data: bytes, at: int, end: int, _level: int) -> Ping:
    _expect_end(at, end)
    return Ping()


READERS: Final[dict[int, Callable[[bytes, int, int, int], Packet]]] = {
    packet.CONNECT: _read_connect,
    packet.SUBSCRIBE: _read_subscribe,
    packet.UNSUBSCRIBE: _read_unsubscribe,
    packet.PINGREQ: _read_ping,
    packet.DISCONNECT: _read_disconnect,
    packet.AUTH: _read_auth,
}
