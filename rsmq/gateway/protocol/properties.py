"""The properties of MQTT 5.0: where each is allowed, how often, and with which values. Strict in both directions."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple

from rsmq.gateway.protocol import packet
from rsmq.gateway.protocol.packet import MalformedPacket, Properties, ProtocolError, ReasonCode, RefusedPacket
from rsmq.gateway.protocol.topic_filter import check_topic_name

WILL: Final = 0
"""The properties of a will stand in a CONNECT, but have a list of their own."""


class Property(IntEnum):
    """The identifiers."""

    PAYLOAD_FORMAT = 1
    MESSAGE_EXPIRY = 2
    CONTENT_TYPE = 3
    RESPONSE_TOPIC = 8
    CORRELATION_DATA = 9
    SUBSCRIPTION_ID = 11
    SESSION_EXPIRY = 17
    ASSIGNED_CLIENT_ID = 18
    SERVER_KEEP_ALIVE = 19
    AUTH_METHOD = 21
    AUTH_DATA = 22
    REQUEST_PROBLEM_INFO = 23
    WILL_DELAY = 24
    REQUEST_RESPONSE_INFO = 25
    RESPONSE_INFO = 26
    SERVER_REFERENCE = 28
    REASON_STRING = 31
    RECEIVE_MAXIMUM = 33
    TOPIC_ALIAS_MAXIMUM = 34
    TOPIC_ALIAS = 35
    MAXIMUM_QOS = 36
    RETAIN_AVAILABLE = 37
    USER_PROPERTY = 38
    MAXIMUM_PACKET_SIZE = 39
    WILDCARD_AVAILABLE = 40
    SUBSCRIPTION_ID_AVAILABLE = 41
    SHARED_AVAILABLE = 42


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A variable byte integer and the offset behind it."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if byte == 0 and shift:
                raise MalformedPacket("a variable byte integer is longer than necessary")
            return value, at
        shift += 7
        if shift > 21:
            raise MalformedPacket("a variable byte integer has five bytes")
    raise MalformedPacket("a variable byte integer is cut off")


def write_varint(value: int) -> bytes:
    """A variable byte integer."""
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while True:
        value, low = value >> 7, value & 127
        parts.append(low | 128 if value else low)
        if not value:
            return bytes(parts)


def read_binary(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """Bytes after their length, and the offset behind them."""
    start = at + 2
    if start > end:
        raise MalformedPacket("a length is cut off")
    stop = start + (data[at] << 8 | data[at + 1])
    if stop > end:
        raise MalformedPacket("a field is longer than its packet")
    return data[start:stop], stop


def read_string(data: bytes, at: int, end: int) -> tuple[str, int]:
    """A UTF-8 string after its length. A byte order mark is a character like any other."""
    raw, at = read_binary(data, at, end)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise MalformedPacket("a string is not UTF-8") from None
    if "\0" in text:
        raise MalformedPacket("a string has the character U+0000")
    return text, at


def _read_byte(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at >= end:
        raise MalformedPacket("a property is cut off")
    return data[at], at + 1


def _read_two(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at + 2 > end:
        raise MalformedPacket("a property is cut off")
    return data[at] << 8 | data[at + 1], at + 2


def _read_four(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at + 4 > end:
        raise MalformedPacket("a property is cut off")
    return int.from_bytes(data[at : at + 4], "big"), at + 4


def _read_pair(data: bytes, at: int, end: int) -> tuple[tuple[str, str], int]:
    name, at = read_string(data, at, end)
    value, at = read_string(data, at, end)
    return (name, value), at


def write_binary(raw: bytes) -> bytes:
    """Bytes after their length."""
    return len(raw).to_bytes(2, "big") + raw


def write_string(text: str) -> bytes:
    """A string after its length."""
    return write_binary(text.encode())


Read = Callable[[bytes, int, int], tuple[Any, int]]
Write = Callable[[Any], bytes]

BYTE: Final[tuple[Read, Write]] = (_read_byte, lambda value: bytes((value,)))
TWO: Final[tuple[Read, Write]] = (_read_two, lambda value: value.to_bytes(2, "big"))
FOUR: Final[tuple[Read, Write]] = (_read_four, lambda value: value.to_bytes(4, "big"))
VARINT: Final[tuple[Read, Write]] = (read_varint, write_varint)
STRING: Final[tuple[Read, Write]] = (read_string, write_string)
BINARY: Final[tuple[Read, Write]] = (read_binary, write_binary)
PAIR: Final[tuple[Read, Write]] = (_read_pair, lambda pair: write_string(pair[0]) + write_string(pair[1]))


class PropertyRule(NamedTuple):
    """How a property is written and where it may stand. `check`: whether a value is possible."""

    kind: tuple[Read, Write]
    packets: frozenset[int]
    check: Callable[[Any], bool] | None = None


def _is_flag(value: Any) -> bool:
    return value in (0, 1)


def _is_positive(value: Any) -> bool:
    return bool(value > 0)


def _is_alias(value: Any) -> bool:
    if not value:
        raise ProtocolError("a topic alias is 0", ReasonCode.TOPIC_ALIAS_INVALID)
    return True


def _is_name(value: Any) -> bool:
    check_topic_name(value)
    return True


MESSAGE: Final = frozenset((packet.PUBLISH, WILL))
SETUP: Final = frozenset((packet.CONNECT, packet.CONNACK))
ANSWER: Final = frozenset((packet.CONNACK,))
AUTHENTICATION: Final = SETUP | {packet.AUTH}
ANY: Final = frozenset(range(packet.CONNECT, packet.AUTH + 1)) - {packet.PINGREQ, packet.PINGRESP} | {WILL}
REASONED: Final = ANY - {packet.CONNECT, packet.PUBLISH, packet.SUBSCRIBE, packet.UNSUBSCRIBE, WILL}

P = Property
RULES: Final[dict[int, PropertyRule]] = {
    P.PAYLOAD_FORMAT: PropertyRule(BYTE, MESSAGE, _is_flag),
    P.MESSAGE_EXPIRY: PropertyRule(FOUR, MESSAGE),
    P.CONTENT_TYPE: PropertyRule(STRING, MESSAGE),
    P.RESPONSE_TOPIC: PropertyRule(STRING, MESSAGE, _is_name),
    P.CORRELATION_DATA: PropertyRule(BINARY, MESSAGE),
    P.SUBSCRIPTION_ID: PropertyRule(VARINT, frozenset((packet.PUBLISH, packet.SUBSCRIBE)), _is_positive),
    P.SESSION_EXPIRY: PropertyRule(FOUR, SETUP | {packet.DISCONNECT}),
    P.ASSIGNED_CLIENT_ID: PropertyRule(STRING, ANSWER),
    P.SERVER_KEEP_ALIVE: PropertyRule(TWO, ANSWER),
    P.AUTH_METHOD: PropertyRule(STRING, AUTHENTICATION),
    P.AUTH_DATA: PropertyRule(BINARY, AUTHENTICATION),
    P.REQUEST_PROBLEM_INFO: PropertyRule(BYTE, frozenset((packet.CONNECT,)), _is_flag),
    P.WILL_DELAY: PropertyRule(FOUR, frozenset((WILL,))),
    P.REQUEST_RESPONSE_INFO: PropertyRule(BYTE, frozenset((packet.CONNECT,)), _is_flag),
    P.RESPONSE_INFO: PropertyRule(STRING, ANSWER),
    P.SERVER_REFERENCE: PropertyRule(STRING, frozenset((packet.CONNACK, packet.DISCONNECT))),
    P.REASON_STRING: PropertyRule(STRING, REASONED),
    P.RECEIVE_MAXIMUM: PropertyRule(TWO, SETUP, _is_positive),
    P.TOPIC_ALIAS_MAXIMUM: PropertyRule(TWO, SETUP),
    P.TOPIC_ALIAS: PropertyRule(TWO, frozenset((packet.PUBLISH,)), _is_alias),
    P.MAXIMUM_QOS: PropertyRule(BYTE, ANSWER, _is_flag),
    P.RETAIN_AVAILABLE: PropertyRule(BYTE, ANSWER, _is_flag),
    P.USER_PROPERTY: PropertyRule(PAIR, ANY),
    P.MAXIMUM_PACKET_SIZE: PropertyRule(FOUR, SETUP, _is_positive),
    P.WILDCARD_AVAILABLE: PropertyRule(BYTE, ANSWER, _is_flag),
    P.SUBSCRIPTION_ID_AVAILABLE: PropertyRule(BYTE, ANSWER, _is_flag),
    P.SHARED_AVAILABLE: PropertyRule(BYTE, ANSWER, _is_flag),
}  # fmt: skip
MOST_PAIRS: Final = 1_000
"""User properties of a packet."""
REPEATED: Final = {(P.USER_PROPERTY, number) for number in ANY} | {(P.SUBSCRIPTION_ID, packet.PUBLISH)}
FORWARDED: Final = {
    P.PAYLOAD_FORMAT, P.CONTENT_TYPE, P.RESPONSE_TOPIC, P.CORRELATION_DATA, P.USER_PROPERTY
}  # fmt: skip


def read_properties(data: bytes, at: int, end: int, where: int) -> tuple[Properties, bytes, int]:
    """The properties of a packet of kind `where`, those of them that receivers get, and the offset behind them."""
    length, at = read_varint(data, at, end)
    stop = at + length
    if stop > end:
        raise MalformedPacket("the properties are longer than their packet")
    found: Properties = {}
    forwarded = list[bytes]()
    while at < stop:
        start = at
        number, at = read_varint(data, at, stop)
        rule = RULES.get(number)
        if rule is None or where not in rule.packets:
            raise MalformedPacket(f"property {number} does not exist here")
        value, at = rule.kind[0](data, at, stop)
        if rule.check is not None and not rule.check(value):
            raise ProtocolError(f"property {number} cannot be {value!r}")
        if (number, where) in REPEATED:
            values = found.setdefault(number, [])
            values.append(value)
            if len(values) > MOST_PAIRS:
                raise RefusedPacket(
                    ReasonCode.QUOTA_EXCEEDED, f"a packet has more than {MOST_PAIRS} of them", "user_properties"
                )
        elif number in found:
            raise ProtocolError(f"property {number} occurs twice")
        else:
            found[number] = value
        if number in FORWARDED:
            forwarded.append(data[start:at])
    return found, b"".join(forwarded), stop


def write_properties(properties: Properties, encoded: bytes = b"") -> bytes:
    """Properties after their length; `encoded` are some that are written already."""
    parts = [encoded] if encoded else []
    for number, value in properties.items():
        write = RULES[number].kind[1]
        for each in value if isinstance(value, list) else (value,):
            parts.append(bytes((number,)) + write(each))
    body = b"".join(parts)
    return write_varint(len(body)) + body
