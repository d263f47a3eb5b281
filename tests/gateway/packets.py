"""The other side of the codec, written apart from it: what clients send, and what servers answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def varint(n: int) -> bytes:
    out = b""
    while True:
        n, low = divmod(n, 128)
        out += bytes([low | (128 if n else 0)])
        if not n:
            return out


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return len(raw).to_bytes(2, "big") + raw


def packet(head: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes([head]) + varint(len(body)) + body


def props(level: int, raw: bytes = b"") -> bytes:
    return varint(len(raw)) + raw if level == 5 else b""


def connect(
    client_id: str = "c1", level: int = 4, *, clean: bool = True, keep_alive: int = 60, raw_props: bytes = b"",
    username: str | None = None, password: bytes | None = None, flags: int | None = None,
    will: tuple[str, bytes, int, bool] | None = None, will_props: bytes = b"", name: str | None = None,
) -> bytes:  # fmt: skip
    bits = (2 if clean else 0) | (128 if username is not None else 0) | (64 if password is not None else 0)
    if will is not None:
        bits |= 4 | will[2] << 3 | (32 if will[3] else 0)
    parts = [
        text(name or ("MQIsdp" if level == 3 else "MQTT")), bytes([level, bits if flags is None else flags]),
        keep_alive.to_bytes(2, "big"), props(level, raw_props), text(client_id),
    ]  # fmt: skip
    if will is not None:
        parts += [props(level, will_props), text(will[0]), text(will[1])]
    parts += [text(username)] if username is not None else []
    parts += [text(password)] if password is not None else []
    return packet(0x10, *parts)


def publish(
    topic: str | bytes, payload: bytes = b"x", qos: int = 0, packet_id: int = 1, level: int = 4, *,
    retain: bool = False, dup: bool = False, raw_props: bytes = b"",
) -> bytes:  # fmt: skip
    head = 0x30 | qos << 1 | retain | dup << 3
    return packet(head, text(topic), packet_id.to_bytes(2, "big") if qos else b"", props(level, raw_props), payload)


def ack(kind: int, packet_id: int, *rest: int) -> bytes:
    return packet(kind << 4 | (2 if kind == 6 else 0), packet_id.to_bytes(2, "big"), bytes(rest))


def subscribe(filters: list[tuple[str, int]], packet_id: int = 1, level: int = 4, raw_props: bytes = b"") -> bytes:
    body = b"".join(text(name) + bytes([options]) for name, options in filters)
    return packet(0x82, packet_id.to_bytes(2, "big"), props(level, raw_props), body)


def unsubscribe(filters: list[str], packet_id: int = 1, level: int = 4) -> bytes:
    return packet(0xA2, packet_id.to_bytes(2, "big"), props(level), b"".join(map(text, filters)))


PING = b"\xc0\0"
DISCONNECT = b"\xe0\0"


@dataclass
class Received:
    """A packet of a server, read without the code under test."""

    kind: int
    flags: int
    packet_id: int = 0
    reason: int = 0
    reasons: bytes = b""
    topic: str = ""
    payload: bytes = b""
    session_present: bool = False
    properties: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def qos(self) -> int:
        return self.flags >> 1 & 3

    @property
    def dup(self) -> bool:
        return bool(self.flags & 8)

    @property
    def retain(self) -> bool:
        return bool(self.flags & 1)


SIZES = {1: 1, 2: 4, 17: 4, 19: 2, 24: 4, 33: 2, 34: 2, 35: 2, 36: 1, 37: 1, 39: 4, 40: 1, 41: 1, 42: 1}


def read_props(body: bytes, at: int) -> tuple[dict[int, list[Any]], int]:
    n = shift = 0
    while True:
        byte = body[at]
        at += 1
        n |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    end, found = at + n, dict[int, list[Any]]()
    while at < end:
        number = body[at]
        at += 1
        if number in SIZES:
            value: Any = int.from_bytes(body[at : at + SIZES[number]], "big")
            at += SIZES[number]
        elif number == 11:
            value = shift = 0
            while True:
                byte = body[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
        else:
            strings = []
            for _ in range(2 if number == 38 else 1):
                size = int.from_bytes(body[at : at + 2], "big")
                strings.append(body[at + 2 : at + 2 + size])
                at += 2 + size
            value = tuple(strings) if number == 38 else strings[0]
        found.setdefault(number, []).append(value)
    return found, end


def read_server_packet(head: int, body: bytes, level: int) -> Received:
    kind, flags = head >> 4, head & 15
    got = Received(kind, flags)
    if kind == 2:
        got.session_present, got.reason = bool(body[0] & 1), body[1]
        if len(body) > 2:
            got.properties, _ = read_props(body, 2)
    elif kind == 3:
        size = int.from_bytes(body[:2], "big")
        got.topic, at = body[2 : 2 + size].decode(), 2 + size
        if got.qos:
            got.packet_id, at = int.from_bytes(body[at : at + 2], "big"), at + 2
        if level == 5:
            got.properties, at = read_props(body, at)
        got.payload = body[at:]
    elif kind in (4, 5, 6, 7):
        got.packet_id = int.from_bytes(body[:2], "big")
        got.reason = body[2] if len(body) > 2 else 0
    elif kind in (9, 11):
        got.packet_id, at = int.from_bytes(body[:2], "big"), 2
        if level == 5:
            got.properties, at = read_props(body, at)
        got.reasons = body[at:]
    elif kind == 14:
        got.reason = body[0] if body else 0
    return got


def split(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Whole packets (first byte and body), and the rest."""
    found, at = [], 0
    while len(data) - at >= 2:
        n = shift = 0
        body = at + 1
        while body < len(data):
            byte = data[body]
            body += 1
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        else:
            break
        if body + n > len(data):
            break
        found.append((data[at], data[body : body + n]))
        at = body + n
    return found, data[at:]
