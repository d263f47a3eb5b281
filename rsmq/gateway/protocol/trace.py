"""Packets of a connection in short, for an operator who watches it. Nothing is checked here: `decode` does that."""

from __future__ import annotations

import base64
from typing import Any, Final

from rsmq.gateway.protocol import packet
from rsmq.gateway.protocol.decode import read_frame
from rsmq.gateway.protocol.packet import V5, Connect, RefusedPacket
from rsmq.gateway.protocol.properties import read_binary, read_string, read_varint

NAMES: Final = (
    "", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE", "SUBACK", "UNSUBSCRIBE",
    "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH",
)  # fmt: skip
ACKS: Final = frozenset((packet.PUBACK, packet.PUBREC, packet.PUBREL, packet.PUBCOMP))
ANY_SIZE: Final = 1 << 28
SHOWN_BYTES: Final = 4096
"""Bytes of a payload in a trace."""

Described = dict[str, Any]
"""`packet`, its name, and `bytes`, its size; then what it has: `id`, `reason`, `qos`, `topic` and so on."""


class FrameReader:
    """The bytes of one direction as packets. `rest`: those of a packet that had begun before."""

    def __init__(self, rest: bytes = b"") -> None:
        self._rest = rest

    def feed(self, data: bytes) -> list[tuple[int, bytes, int]]:
        """The packets that bytes complete: first byte, body, size. After a wrong length there are no more."""
        data, at, found = self._rest + data, 0, list[tuple[int, bytes, int]]()
        try:
            while True:
                body, end = read_frame(data, at, len(data), ANY_SIZE)
                if end < 0:
                    break
                found.append((data[at], data[body:end], end - at))
                at = end
        except RefusedPacket:
            at = len(data)
        self._rest = data[at:]
        return found


def describe_connect(request: Connect) -> Described:
    """A CONNECT, without its password and the payload of its will."""
    will = None if request.will is None else request.will.topic
    return {
        "packet": "CONNECT", "level": request.level, "client": request.client_id, "user": request.username,
        "clean_start": request.clean_start, "keep_alive": request.keep_alive, "will": will,
    }  # fmt: skip


def describe(head: int, body: bytes, size: int, level: int, *, payloads: bool) -> Described:
    """A packet in short; a malformed one has `malformed` in place of what cannot be read. `payloads`: show them, too,
    in base64, at most 4 KiB of each."""
    found: Described = {"packet": NAMES[head >> 4] or "0", "bytes": size}
    try:
        return found | read(head, body, level, payloads=payloads)
    except (RefusedPacket, IndexError):
        return found | {"malformed": True}


def read(head: int, body: bytes, level: int, *, payloads: bool) -> Described:
    """What a packet has besides its name and size."""
    kind, end = head >> 4, len(body)
    if kind == packet.PUBLISH:
        return read_publish(head, body, level, payloads=payloads)
    if kind in ACKS:
        return {"id": number(body), "reason": body[2] if end > 2 else 0}
    if kind == packet.CONNACK:
        return {"session_present": bool(body[0] & 1), "reason": body[1]}
    if kind == packet.DISCONNECT:
        return {"reason": body[0] if body else 0}
    if kind in (packet.SUBSCRIBE, packet.UNSUBSCRIBE):
        at, filters = behind_properties(body, 2, level), list[str]()
        while at < end:
            text, at = read_string(body, at, end)
            filters.append(f"{text} QoS {body[at] & 3}" if kind == packet.SUBSCRIBE else text)
            at += kind == packet.SUBSCRIBE
        return {"id": number(body), "filters": filters}
    if kind in (packet.SUBACK, packet.UNSUBACK):
        return {"id": number(body), "reasons": list(body[behind_properties(body, 2, level) :])}
    return {}


def read_publish(head: int, body: bytes, level: int, *, payloads: bool) -> Described:
    """What a message has."""
    raw, at = read_binary(body, 0, len(body))
    qos = head >> 1 & 3
    found: Described = {"qos": qos, "topic": raw.decode(errors="backslashreplace"), "retain": bool(head & 1)}
    if qos:
        found |= {"id": number(body[at:]), "dup": bool(head & 8)}
        at += 2
    payload = body[behind_properties(body, at, level) :]
    found["payload_bytes"] = len(payload)
    return found | ({"payload": base64.b64encode(payload[:SHOWN_BYTES]).decode()} if payloads else {})


def number(body: bytes) -> int:
    """The packet id at the beginning of a body."""
    return body[0] << 8 | body[1]


def behind_properties(body: bytes, at: int, level: int) -> int:
    """Where the properties that begin here end; below version 5 there are none."""
    if level != V5:
        return at
    size, at = read_varint(body, at, len(body))
    return at + size
