"""A letter: what a device receives, and the envelope in which the server stores it.

Envelope, version 1, big-endian: u8 version, u48 published_ms, u48 expires_ms (these three are written by the server),
u8 length + topic, u8 content type (0 JSON, 1 bytes, 2 text, 255: u8 length + text), u16 length + headers (JSON object),
and the raw payload to the end.

A letter for an MQTT client has content type 254 instead, after an empty topic: u8 flags, u16 length + topic name, u16
length + properties of MQTT 5 as its clients read them, with flag 16 u16 length + filter of a shared subscription, and
the raw payload.

What is encoded stays as it is stored in a topic. Content type 253, or flag 32 of a letter for an MQTT client, is
followed by what undoes it: for each of `enc`, content type, message id and ordering key u16 length + text, ffff for a
key that is not there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from rsmq.errors import ConfigError, Malformed, MessageError, TooLarge
from rsmq.model.clock import from_epoch_ms
from rsmq.model.encoding import NO_CODECS, Binding, Encoding, why_sealed
from rsmq.model.headers import require_text
from rsmq.model.message import (
    BYTES,
    JSON,
    LARGEST_HEADERS,
    TEXT,
    encode_payload,
    new_message_id,
    read_headers,
    write_headers,
)
from rsmq.model.packing import pack_array, pack_values

VERSION: Final = 1
STAMP: Final = 13
"""Bytes that the server writes first: version, published_ms, expires_ms."""
TYPES: Final = (JSON, BYTES, TEXT)
ENCODED_TYPE: Final = 253
MQTT_TYPE: Final = 254
OTHER_TYPE: Final = 255
PACKET_IDS: Final = 65_535
LONGEST_TEXT: Final = 255
ABSENT: Final = 0xFFFF
"""In the place of a length: there is no such text."""
HEAD_BYTES: Final = 1024
"""In so many first bytes of an envelope stands its `enc`, if it has one."""
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

    __slots__ = ("_encoding", "_envelope", "_parts", "device", "is_received", "is_redelivered", "seq")

    def __init__(
        self,
        seq: int,
        envelope: bytes,
        *,
        device: str = "",
        is_redelivered: bool = False,
        encoding: Encoding = NO_CODECS,
    ) -> None:
        """`encoding` undoes what is compressed or encrypted."""
        self.seq, self.device = seq, device
        self.is_redelivered = is_redelivered
        self.is_received = not envelope
        self._envelope = envelope or RECEIVED
        self._parts: LetterParts | None = None
        self._encoding = encoding

    @property
    def packet_id(self) -> int:
        """The MQTT packet id: unique among the stored letters of a device."""
        return packet_id_of(self.seq)

    @property
    def data(self) -> bytes:
        """The raw payload. Raises Malformed, and CannotDecode where this process has no key, or no codec, for it."""
        parts = self._read()
        if parts.binding is not None:
            parts = self._parts = parts._replace(data=self._encoding.undo(parts.data, parts.binding), binding=None)
        return parts.data

    @property
    def sealed(self) -> str:
        """Why `data` cannot be read, such as `encrypted (k7)`; empty where it can."""
        binding = self._read().binding
        try:
            self.data  # noqa: B018
        except MessageError as error:
            return why_sealed(error, "" if binding is None else binding.enc.decode(errors="backslashreplace"))
        return ""

    @property
    def payload(self) -> Any:
        """The payload by its content type: a JSON value, str or bytes. Raises Malformed if it cannot be decoded, and
        CannotDecode as `data` does."""
        kind, data = self.type, self.data
        try:
            if kind == JSON:
                return from_json(data, allow_inf_nan=False) if data or not self.is_received else None
            return data.decode() if kind == TEXT else data
        except ValueError as error:
            raise Malformed(f"letter {self.seq}: the payload is not {kind}: {error}") from None

    @property
    def topic(self) -> str:
        """The topic it came through, or the `topic` that its sender gave."""
        return self._read().topic

    @property
    def type(self) -> str:
        """The content type."""
        return self._read().type

    @property
    def headers(self) -> dict[str, str]:
        """The headers, as a new dict for each access."""
        raw = self._read().headers
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

    def _read(self) -> LetterParts:
        if self._parts is None:
            self._parts = read_envelope(self._envelope)
        return self._parts

    def __repr__(self) -> str:
        mark = " received" if self.is_received else " redelivered" if self.is_redelivered else ""
        return f"<Letter {self.seq}{mark}>"


class LetterParts(NamedTuple):
    """What an envelope holds. `headers`: as JSON, empty without any. `data`: the payload, or what is stored of one that
    is encoded: `binding` is then what undoes it."""

    topic: str
    type: str
    headers: bytes
    data: bytes
    binding: Binding | None = None

    def __repr__(self) -> str:
        return f"<LetterParts {self.topic} {self.type} bytes={len(self.data)}>"


def read_envelope(envelope: bytes) -> LetterParts:
    """Raises Malformed for anything else."""
    if envelope[:1] != bytes([VERSION]):
        raise Malformed(
            f"the envelope has version {envelope[:1].hex() or '(none)'}: written by a newer rsmq, or by hand"
        )
    try:
        topic, at = _text(envelope, STAMP)
        code = envelope[at]
        if code == MQTT_TYPE:
            mqtt = read_mqtt(envelope)
            return LetterParts(mqtt.topic, BYTES, b"", mqtt.data, mqtt.binding)
        binding = None
        if code == ENCODED_TYPE:
            binding, at = read_binding(envelope, at + 1)
            kind = binding.type.decode()
        else:
            kind, at = _text(envelope, at + 1) if code == OTHER_TYPE else (TYPES[code], at + 1)
        (length,) = struct.unpack_from(">H", envelope, at)
        headers, data = envelope[at + 2 : at + 2 + length], envelope[at + 2 + length :]
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise Malformed(f"the envelope is cut off or broken: {error}") from None
    if len(headers) != length:
        raise Malformed("the envelope is cut off in its headers")
    return LetterParts(topic, kind, headers, data, binding)


def enc_of(envelope: bytes) -> bytes:
    """How the payload of a letter is encoded, from the first HEAD_BYTES of its envelope; empty if it is not, or if that
    cannot be read."""
    try:
        _, at = _text(envelope, STAMP)
        code = envelope[at]
        if code == MQTT_TYPE and envelope[at + 1] & ENCODED:
            at += 1
        elif code != ENCODED_TYPE:
            return b""
    except (IndexError, UnicodeDecodeError):
        return b""
    start = at + 3
    return envelope[start : start + int.from_bytes(envelope[at + 1 : start], "big")]


def pack_binding(binding: Binding) -> bytes:
    """What undoes an encoded payload, for an envelope. Raises ConfigError for what is too long for one."""
    return b"".join(map(_long_text, (binding.enc, binding.type, binding.message_id, binding.key)))


def _long_text(raw: bytes | None) -> bytes:
    if raw is not None and len(raw) >= ABSENT:
        raise ConfigError(f"a letter cannot hold an id or a key of {len(raw)} bytes: use fewer than {ABSENT}")
    return ABSENT.to_bytes(2, "big") if raw is None else len(raw).to_bytes(2, "big") + raw


def read_binding(envelope: bytes, at: int) -> tuple[Binding, int]:
    """What `pack_binding` has packed, from an offset on, and the offset of its end. Raises Malformed."""
    texts = list[bytes | None]()
    for _ in range(4):
        length = int.from_bytes(envelope[at : at + 2], "big")
        end = at + 2 + (0 if length == ABSENT else length)
        if end > len(envelope):
            raise Malformed("the envelope is cut off before its payload")
        texts.append(None if length == ABSENT else envelope[at + 2 : end])
        at = end
    enc, kind, message_id, key = texts
    if not enc or kind is None or message_id is None:
        raise Malformed("the envelope does not say how its payload is encoded")
    return Binding(message_id, key, kind, enc), at


class MqttLetter(NamedTuple):
    """A letter as an MQTT client gets it. `flags`: QoS in the lowest two bits, RETAIN, EXPIRES, SHARED and ENCODED.

    `binding`: what undoes `data`, if it is encoded.
    """

    flags: int
    topic: str
    properties: bytes
    data: bytes
    share: str = ""
    """The shared subscription that it came through."""
    binding: Binding | None = None

    def __repr__(self) -> str:
        return f"<MqttLetter {self.topic!r} bytes={len(self.data)}>"


RETAIN: Final = 4
"""The message is sent with the retain flag."""
EXPIRES: Final = 8
"""Its publisher gave it an expiry: the client gets what is left of it."""
SHARED: Final = 16
"""It came through a shared subscription, whose filter stands behind the properties."""
ENCODED: Final = 32
"""Its payload is encoded: what undoes it stands behind the flags."""


def seal_mqtt(
    flags: int, topic: bytes, properties: bytes, data: bytes, share: str = "", binding: Binding | None = None
) -> bytes:
    """The envelope of a letter for an MQTT client, without its stamp."""
    if share:
        flags |= SHARED
        raw = share.encode()
        data = len(raw).to_bytes(2, "big") + raw + data
    about = b""
    if binding is not None:
        flags, about = flags | ENCODED, pack_binding(binding)
    return b"\0%c%c%b%b%b%b%b%b" % (
        MQTT_TYPE, flags, about, len(topic).to_bytes(2, "big"), topic, len(properties).to_bytes(2, "big"), properties,
        data,
    )  # fmt: skip


def read_mqtt(envelope: bytes) -> MqttLetter:
    """A letter for an MQTT client. Every other letter has QoS 1, and only topic and payload."""
    if envelope[STAMP : STAMP + 2] != bytes((0, MQTT_TYPE)):
        parts = read_envelope(envelope)
        return MqttLetter(1, parts.topic, b"", parts.data, binding=parts.binding)
    at, binding = STAMP + 3, None
    if len(envelope) >= at and envelope[STAMP + 2] & ENCODED:
        binding, at = read_binding(envelope, at)
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
        return MqttLetter(flags & ~ENCODED, name.decode(), properties, envelope[end:], share.decode(), binding)
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


def encoded_front(front: bytes, binding: bytes) -> bytes:
    """The front of an envelope of `seal_mqtt`, for a payload that is encoded. `binding`: from `pack_binding`."""
    return b"%b%c%b%b" % (front[:2], front[2] | ENCODED, binding, front[3:])


def seal(
    data: bytes,
    kind: str = JSON,
    topic: str | bytes = b"",
    headers: Mapping[str, str] | bytes | None = None,
    binding: Binding | None = None,
) -> bytes:
    """The envelope without its stamp, which the server adds. `headers` may be JSON already. `binding`: what undoes
    `data`, if it is encoded; then it names the content type, too."""
    if binding is None:
        front = _front(kind, topic)
    else:
        front = b"%b%c%b" % (_counted("topic", topic), ENCODED_TYPE, pack_binding(binding))
    if not headers:
        return front + b"\0\0" + data
    head = headers if isinstance(headers, bytes) else write_headers(headers, LARGEST_HEADERS)
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


def seal_payload(
    payload: Any, topic: str, headers: Mapping[str, str] | None, limit: int, encoding: Encoding = NO_CODECS
) -> bytes:
    """The envelope of a payload, without its stamp. Raises TooLarge, NotJson or ConfigError.

    With codecs it is encoded, with an id of its own. `limit` counts what is stored.
    """
    data, kind = encode_payload(payload)
    binding = None
    if encoding.names:
        data, binding = encoding.bound(data, new_message_id(), None, kind)
    if len(data) > limit:
        raise TooLarge(len(data), limit)
    if not isinstance(topic, str):
        raise ConfigError(f"topic={topic!r} is not text: pass a str")
    if headers:
        require_text(headers)
    return seal(data, kind, topic, headers, binding)


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
