"""A letter: what a device receives, and the envelope in which the server stores it.

Envelope, version 1, big-endian: u8 version, u48 published_ms, u48 expires_ms (these three are written by the server),
u8 length + topic, u8 content type (0 JSON, 1 bytes, 2 text, 255: u8 length + text), u16 length + headers (JSON object),
and the raw payload to the end.

A letter for an MQTT client has content type 254 instead, after an empty topic: u8 flags, u16 length + topic name, u16
length + properties of MQTT 5 as its clients read them, with flag 16 u16 length + filter of a shared subscription, and
the raw payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from rsmq.errors import ConfigError, Malformed, TooLarge
from rsmq.model.clock import from_epoch_ms
from rsmq.model.headers import require_text
from rsmq.model.message import BYTES, JSON, LARGEST_HEADERS, TEXT, encode_payload, read_headers, write_headers
from rsmq.model.packing import pack_array, pack_values

VERSION: Final = 1
STAMP: Final = 13
"""Bytes that the server writes first: version, published_ms, expires_ms."""
TYPES: Final = (JSON, BYTES, TEXT)
MQTT_TYPE: Final = 254
OTHER_TYPE: Final = 255
PACKET_IDS: Final = 65_535
LONGEST_TEXT: Final = 255
LATEST: Final = (1 << 48) - 1
"""The last moment that a stamp can say, in ms since 1970."""


def packet_id_of(seq: int) -> int:
    """The MQTT packet id of a seq: 1 to 65 535, then from 1 again."""
    return (seq - 1) % PACKET_IDS + 1


class Letter:
    """One letter, as a session of its device receives it.

    `seq` grows in the order of storing. `is_redelivered`: an earlier session may have received it. `is_received`: the
    first half of its handshake (QoS 2) is done, and it has no content any more.
    """

    __slots__ = ("_envelope", "_parts", "device", "is_received", "is_redelivered", "seq")

    def __init__(self, seq: int, envelope: bytes, *, device: str = "", is_redelivered: bool = False) -> None:
        self.seq, self.device = seq, device
        self.is_redelivered = is_redelivered
        self.is_received = not envelope
        self._envelope = envelope or RECEIVED
        self._parts: tuple[str, str, bytes, bytes] | None = None

    @property
    def packet_id(self) -> int:
        """The MQTT packet id: unique among the stored letters of a device."""
        return packet_id_of(self.seq)

    @property
    def data(self) -> bytes:
        """The raw payload."""
        return self._read()[3]

    @property
    def payload(self) -> Any:
        """The payload by its content type: a JSON value, str or bytes. Raises Malformed if it cannot be decoded."""
        _, kind, _, data = self._read()
        try:
            if kind == JSON:
                return from_json(data, allow_inf_nan=False) if data or not self.is_received else None
            return data.decode() if kind == TEXT else data
        except ValueError as error:
            raise Malformed(f"letter {self.seq}: the payload is not {kind}: {error}") from None

    @property
    def topic(self) -> str:
        """The topic it came through, or the `topic` that its sender gave."""
        return self._read()[0]

    @property
    def type(self) -> str:
        """The content type."""
        return self._read()[1]

    @property
    def headers(self) -> dict[str, str]:
        """The headers, as a new dict for each access."""
        raw = self._read()[2]
        return read_headers(raw) if raw else {}

    @property
    def timestamp(self) -> datetime:
        """When it was published."""
        return self._moment(1)

    @property
    def expires(self) -> datetime:
        """When the server removes it if the device has not acknowledged it."""
        return self._moment(7)

    def _moment(self, at: int) -> datetime:
        raw = self._envelope[at : at + 6]
        try:
            if len(raw) < 6:
                raise ValueError("it is cut off")
            return from_epoch_ms(int.from_bytes(raw, "big"))
        except (ValueError, OverflowError) as error:
            raise Malformed(f"letter {self.seq}: its envelope has no valid time: {error}") from None

    def _read(self) -> tuple[str, str, bytes, bytes]:
        if self._parts is None:
            self._parts = read_envelope(self._envelope)
        return self._parts

    def __repr__(self) -> str:
        mark = " received" if self.is_received else " redelivered" if self.is_redelivered else ""
        return f"<Letter {self.seq}{mark}>"


def read_envelope(envelope: bytes) -> tuple[str, str, bytes, bytes]:
    """Topic, content type, raw headers and payload. Raises Malformed for anything else."""
    if envelope[:1] != bytes([VERSION]):
        raise Malformed(
            f"the envelope has version {envelope[:1].hex() or '(none)'}: written by a newer rsmq, or by hand"
        )
    try:
        topic, at = _text(envelope, STAMP)
        code = envelope[at]
        if code == MQTT_TYPE:
            mqtt = read_mqtt(envelope)
            return mqtt.topic, BYTES, b"", mqtt.data
        kind, at = _text(envelope, at + 1) if code == OTHER_TYPE else (TYPES[code], at + 1)
        (length,) = struct.unpack_from(">H", envelope, at)
        headers, data = envelope[at + 2 : at + 2 + length], envelope[at + 2 + length :]
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise Malformed(f"the envelope is cut off or broken: {error}") from None
    if len(headers) != length:
        raise Malformed("the envelope is cut off in its headers")
    return topic, kind, headers, data


class MqttLetter(NamedTuple):
    """A letter as an MQTT client gets it. `flags`: QoS in the lowest two bits, RETAIN, EXPIRES and SHARED."""

    flags: int
    topic: str
    properties: bytes
    data: bytes
    share: str = ""
    """The shared subscription that it came through."""


RETAIN: Final = 4
"""The message is sent with the retain flag."""
EXPIRES: Final = 8
"""Its publisher gave it an expiry: the client gets what is left of it."""
SHARED: Final = 16
"""It came through a shared subscription, whose filter stands behind the properties."""


def seal_mqtt(flags: int, topic: bytes, properties: bytes, data: bytes, share: str = "") -> bytes:
    """The envelope of a letter for an MQTT client, without its stamp."""
    if share:
        flags |= SHARED
        raw = share.encode()
        data = len(raw).to_bytes(2, "big") + raw + data
    return b"\0%c%c%b%b%b%b%b" % (
        MQTT_TYPE, flags, len(topic).to_bytes(2, "big"), topic, len(properties).to_bytes(2, "big"), properties, data
    )  # fmt: skip


def read_mqtt(envelope: bytes) -> MqttLetter:
    """A letter for an MQTT client. Every other letter has QoS 1, and only topic and payload."""
    if envelope[STAMP : STAMP + 2] != bytes((0, MQTT_TYPE)):
        topic, _, _, data = read_envelope(envelope)
        return MqttLetter(1, topic, b"", data)
    at = STAMP + 3
    middle = at + 2 + int.from_bytes(envelope[at : at + 2], "big")
    end = middle + 2 + int.from_bytes(envelope[middle : middle + 2], "big")
    if end > len(envelope) or len(envelope) < at:
        raise Malformed("the envelope of an MQTT letter is cut off")
    flags, share, properties = envelope[STAMP + 2], b"", envelope[middle + 2 : end]
    name = envelope[at + 2 : middle]
    if flags & SHARED:
        start, end = end + 2, end + 2 + int.from_bytes(envelope[end : end + 2], "big")
        share = envelope[start:end]
    try:
        return MqttLetter(flags, name.decode(), properties, envelope[end:], share.decode())
    except UnicodeDecodeError as error:
        raise Malformed(f"the envelope of an MQTT letter is broken: {error}") from None


def ms_left(envelope: bytes, now_ms: int) -> int:
    """The rest of the time that a letter is kept, by a clock that may be behind the server's: never more than it
    had."""
    expires = int.from_bytes(envelope[7:STAMP], "big")
    return expires - max(now_ms, int.from_bytes(envelope[1:7], "big"))


def _text(envelope: bytes, at: int) -> tuple[str, int]:
    """A text after its length byte, and the offset of its end."""
    end = at + 1 + envelope[at]
    if end > len(envelope):
        raise IndexError("a text is longer than the envelope")
    return envelope[at + 1 : end].decode(), end


def seal(
    data: bytes, kind: str = JSON, topic: str | bytes = b"", headers: Mapping[str, str] | bytes | None = None
) -> bytes:
    """The envelope without its stamp, which the server adds. `headers` may be JSON already."""
    front = _front(kind, topic)
    if not headers:
        return front + b"\0\0" + data
    head = headers if isinstance(headers, bytes) else write_headers(headers)
    if len(head) > LARGEST_HEADERS:
        raise ConfigError(f"the headers have {len(head)} bytes: use at most {LARGEST_HEADERS}")
    return b"".join((front, len(head).to_bytes(2, "big"), head, data))


@lru_cache(maxsize=1024)
def _front(kind: str, topic: str | bytes) -> bytes:
    """Topic and content type, cached because many letters share them."""
    code = bytes([TYPES.index(kind)]) if kind in TYPES else bytes([OTHER_TYPE]) + _counted("content type", kind)
    return _counted("topic", topic) + code


def _counted(field: str, text: str | bytes) -> bytes:
    """A text after its length byte."""
    try:
        raw = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise ConfigError(f"{field}={text!r} is not valid Unicode: it has a lone surrogate") from None
    if len(raw) > LONGEST_TEXT:
        raise ConfigError(f"{field} {text[:40]!r}... has {len(raw)} bytes: use at most {LONGEST_TEXT}")
    return bytes([len(raw)]) + raw


def seal_payload(payload: Any, topic: str, headers: Mapping[str, str] | None, limit: int) -> bytes:
    """The envelope of a payload, without its stamp. Raises TooLarge, NotJson or ConfigError."""
    data, kind = encode_payload(payload)
    if len(data) > limit:
        raise TooLarge(len(data), limit)
    if not isinstance(topic, str):
        raise ConfigError(f"topic={topic!r} is not text: pass a str")
    if headers:
        require_text(headers)
    return seal(data, kind, topic, headers)


def pack_letter(position: str | bytes, published: str | bytes | int, ttl: str | bytes | int, envelope: bytes) -> bytes:
    """One letter for `pack_letters`. `published` and `ttl` are milliseconds, or empty."""
    where = position if type(position) is bytes else str(position).encode()
    left = ttl if type(ttl) is bytes else str(ttl).encode()
    return b"\xd9%c%b%b\xd9%c%b\xdb%b%b" % (
        len(where), where, _packed_head(published), len(left), left, len(envelope).to_bytes(4), envelope
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _packed_head(published: str | bytes | int) -> bytes:
    """The first bytes of a stamp, or nothing. Cached, because messages of one millisecond follow each other."""
    if published in ("", b""):
        return b"\xd9\0"
    return b"\xd9\7%c%b" % (VERSION, min(max(0, int(published)), LATEST).to_bytes(6))


def pack_letters(batches: Iterable[tuple[str, Sequence[bytes]]]) -> bytes:
    """The letters of one call of `add_letters`: for each device the source, and its letters."""
    count, parts = 0, list[bytes]()
    for source, letters in batches:
        count += 2 + 4 * len(letters)
        parts.append(_packed_source(source) + len(letters).to_bytes(2))
        parts += letters
    return pack_array(count, parts)


@lru_cache(maxsize=1024)
def _packed_source(source: str) -> bytes:
    """A source, and the first byte of the number of its letters. Cached, because few sources send most letters."""
    return pack_values((source,)) + b"\xcd"


RECEIVED: Final = bytes([VERSION]) + bytes(STAMP - 1) + seal(b"")
"""The envelope of a received letter (`is_received`), whose content is gone."""
