"""The control packets that a server sends, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from rsmq.gateway.protocol import packet
from rsmq.gateway.protocol.packet import LONGEST_NAME, V5, V31, PendingAck, Properties, ReasonCode
from rsmq.gateway.protocol.properties import write_properties, write_varint

PINGRESP: Final = b"\xd0\0"
LONGEST_ACK: Final = 5
"""Bytes of an acknowledgement with a reason."""


def frame(kind: int, flags: int, body: bytes) -> bytes:
    """A packet of this type."""
    return bytes((kind << 4 | flags,)) + write_varint(len(body)) + body


def connack(
    reason: ReasonCode, level: int, *, session_present: bool = False, properties: Properties | None = None
) -> bytes:
    """The answer to a CONNECT, or nothing where version 3 has no return code for the reason."""
    if level == V5:
        return frame(packet.CONNACK, 0, bytes((session_present, reason)) + write_properties(properties or {}))
    code = packet.RETURN_CODES.get(reason, 0)
    if reason and not code:
        return b""
    return bytes((0x20, 2, session_present and level != V31, code))  # version 3.1 has no such flag


@lru_cache(maxsize=4096)
def _topic_part(topic: str) -> bytes:
    raw = topic.encode()
    return len(raw).to_bytes(2, "big") + raw


def publish(
    topic: str, payload: bytes, qos: int, packet_id: int, level: int, *, retain: bool, dup: bool, properties: bytes
) -> bytes:
    """A message. `properties` are encoded already, without their length; version 3 has none."""
    front = _topic_part(topic) if len(topic) <= LONGEST_NAME else _topic_part.__wrapped__(topic)
    middle = packet_id.to_bytes(2, "big") if qos else b""
    if level == V5:
        middle += (write_varint(len(properties)) + properties) if properties else b"\0"
    size = len(front) + len(middle) + len(payload)
    head = 0x30 | dup << 3 | qos << 1 | retain
    if size < 128:
        return b"%c%c%b%b%b" % (head, size, front, middle, payload)
    return b"%c%b%b%b%b" % (head, write_varint(size), front, middle, payload)


def ack(kind: int, packet_id: int, reason: int, level: int) -> bytes:
    """A PUBACK, PUBREC, PUBREL or PUBCOMP. Version 3 has no reasons."""
    head = kind << 4 | (2 if kind == packet.PUBREL else 0)
    if reason and level == V5:
        return bytes((head, 3, packet_id >> 8, packet_id & 255, reason))
    return bytes((head, 2, packet_id >> 8, packet_id & 255))


def acks(pending: PendingAck, level: int) -> bytes:
    """The acknowledgements of all messages of a PUBLISH."""
    kind, packet_ids = pending.kind, pending.packet_ids
    if not any(pending.reasons) or level != V5:
        head = bytes((kind << 4, 2))
        return head + head.join(packet_ids)
    numbered = zip(packet_ids, pending.reasons, strict=True)
    return b"".join(ack(kind, int.from_bytes(each, "big"), reason, level) for each, reason in numbered)


def suback(packet_id: int, reasons: Sequence[int], level: int) -> bytes:
    """The answer to a SUBSCRIBE, with a code for each filter. Version 3 knows one failure only."""
    codes = bytes(reasons) if level == V5 else bytes(min(each, 0x80) for each in reasons)
    return frame(packet.SUBACK, 0, packet_id.to_bytes(2, "big") + (b"\0" if level == V5 else b"") + codes)


def unsuback(packet_id: int, reasons: Sequence[int], level: int) -> bytes:
    """The answer to an UNSUBSCRIBE."""
    rest = b"\0" + bytes(reasons) if level == V5 else b""
    return frame(packet.UNSUBACK, 0, packet_id.to_bytes(2, "big") + rest)


def disconnect(reason: int, properties: Properties | None = None) -> bytes:
    """The last packet of a server, in version 5."""
    return frame(packet.DISCONNECT, 0, bytes((reason,)) + (write_properties(properties) if properties else b""))
