"""A message: what a handler receives, and the wire format between it and a stream entry.

A stream entry is a flat list of fields, all optional but `data` (`docs/wire-format.md`). Whatever cannot be read that
way is `Malformed`: one bad entry never harms its neighbours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol
from uuid import UUID

import uuid_utils
from pydantic_core import from_json, to_json

from rsmq.clock import from_epoch_ms
from rsmq.errors import ConfigError, Malformed, Oversized

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain"
BYTES_LIKE: Final = (bytes, bytearray, memoryview)

KNOWN_FIELDS: Final = frozenset({b"data", b"key", b"id", b"type", b"h", b"group"})
MAX_FIELDS: Final = 256
"""More fields than this are no message of ours: reading them as headers would only burn time."""
LARGEST_PAYLOAD: Final = 1 << 20
"""Bytes of a payload that any publisher may be allowed. What is larger is another client's, and is not handled."""
LARGEST_HEADERS: Final = 32 << 10
"""Bytes of the headers as JSON. W3C baggage alone may have 8 KiB."""
LONGEST_SHOWN: Final = 80
"""Characters of an id or a key in a log line: another client's may have a megabyte."""


class Origin(Protocol):
    """Where a message came from, shared by all messages of one partition and group."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def group(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Place:
    """An origin by itself: what is left of it when a message leaves its process."""

    topic: str
    partition: int
    group: str


class Message:
    """One delivery of one message.

    `data` is the raw payload, `payload` the decoded one; `attempt` starts at 1; `is_redelivered` says that somebody may
    have started it before. Text fields are decoded on first use: most handlers look at the payload only.
    """

    __slots__ = (
        "_entry", "addressee", "attempt", "data", "entry_id", "is_redelivered", "is_suspect", "origin", "payload",
        "routing_key",
    )  # fmt: skip

    def __init__(self, origin: Origin, entry_id: bytes, entry: list[bytes], attempt: int = 1) -> None:
        self.origin = origin
        self.entry_id = entry_id
        self._entry = entry
        self.attempt = attempt
        self.is_redelivered = False
        self.is_suspect = False
        self.payload: Any = None
        self.addressee: bytes | None = None  # the one group it is meant for (a replayed dead letter), None for all
        self.routing_key: bytes | None
        # our own publisher's layout, by far the most frequent, needs no dict: data, id and perhaps key, in this order
        if len(entry) == 6 and entry[0] == b"data" and entry[2] == b"id" and entry[4] == b"key":
            self.data = entry[1]
            self.routing_key = entry[5]
        elif len(entry) == 4 and entry[0] == b"data" and entry[2] == b"id":
            self.data = entry[1]
            self.routing_key = None
        else:
            self._read_any_layout(self._fields)

    def _read_any_layout(self, fields: dict[bytes, bytes]) -> None:
        """Fields in any order, some of them rare."""
        if b"data" not in fields:
            raise Malformed("the entry has no field `data`")
        if len(fields) * 2 != len(self._entry):
            raise Malformed("a field occurs twice")
        self.data = fields[b"data"]
        self.routing_key = fields.get(b"key")
        self.addressee = fields.get(b"group")
        self._check_rare_fields(fields)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but data, id and perhaps a key, in our own publisher's order: so no headers."""
        entry = self._entry
        return entry[0] == b"data" and (
            (len(entry) == 4 and entry[2] == b"id") or (len(entry) == 6 and entry[2] == b"id" and entry[4] == b"key")
        )

    @property
    def _fields(self) -> dict[bytes, bytes]:
        pairs = iter(self._entry)
        return dict(zip(pairs, pairs, strict=False))

    def _check_rare_fields(self, fields: dict[bytes, bytes]) -> None:
        """Headers are checked when they are there, before the handler sees the message."""
        size = sum(map(len, self._entry))
        if size > LARGEST_PAYLOAD + LARGEST_HEADERS:
            raise Oversized(size, LARGEST_PAYLOAD + LARGEST_HEADERS)
        if len(fields) > MAX_FIELDS:
            raise Malformed(f"the entry has {len(fields)} fields, more than {MAX_FIELDS}")
        if b"h" in fields:
            read_headers(fields[b"h"])

    def check_size(self) -> None:
        """Raise Oversized for a payload beyond any publisher's limit. For the reader, who knows when to ask."""
        if len(self.data) > LARGEST_PAYLOAD:
            raise Oversized(len(self.data), LARGEST_PAYLOAD)

    @property
    def key(self) -> str | None:
        """The ordering key."""
        raw = self._entry[5] if self._entry[4:5] == [b"key"] else self._fields.get(b"key")
        return None if raw is None else raw.decode(errors="backslashreplace")

    @property
    def id(self) -> str:
        """The message id: given by the publisher, else the stream id."""
        return (self._entry[3] if self._entry[2:3] == [b"id"] else self._fields.get(b"id", self.entry_id)).decode(
            errors="backslashreplace"
        )

    @property
    def type(self) -> str:
        """The content type."""
        raw = None if self.is_plain else self._fields.get(b"type")
        return JSON if raw is None else raw.decode(errors="backslashreplace")

    @property
    def headers(self) -> dict[str, str]:
        """The headers; unknown fields of the entry are among them. A new dict at each call."""
        if self.is_plain:
            return {}
        fields = self._fields
        headers = read_headers(fields[b"h"]) if b"h" in fields else {}
        for name in fields.keys() - KNOWN_FIELDS:
            headers.setdefault(name.decode(errors="backslashreplace"), fields[name].decode(errors="backslashreplace"))
        return headers

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.origin.topic

    @property
    def partition(self) -> int:
        """The partition's number, from 0."""
        return self.origin.partition

    @property
    def group(self) -> str:
        """The group that handles this delivery."""
        return self.origin.group

    @property
    def stream_id(self) -> str:
        """The id of the stream entry, `ms-seq`: unique within the partition."""
        return self.entry_id.decode()

    @property
    def timestamp(self) -> datetime:
        """When it was published: by the id's own clock if that is a UUIDv7, else when the server stored it."""
        with suppress(ValueError):  # no UUID, or one of the year 10 000
            given = UUID(self.id)
            if given.version == 7:
                return from_epoch_ms(given.int >> 80)
        return from_epoch_ms(int(self.entry_id.partition(b"-")[0]))

    def __reduce__(self) -> tuple[Any, ...]:
        """For a handler in another process: the message without what this process does with it."""
        entry = [part for pair in self._fields.items() for part in pair]
        place = Place(self.topic, self.partition, self.group)
        return Message, (place, self.entry_id, entry, self.attempt), (None, {"payload": self.payload})

    def __repr__(self) -> str:
        key = None if self.key is None else self.key[:LONGEST_SHOWN]
        return f"<Message {shown(self.id)} {self.topic}.{self.partition} key={key!r} attempt={self.attempt}>"


def shown(text: str) -> str:
    """An id for a log line: another client's may be endless, or have a line end in it that forges a second line."""
    text = text[:LONGEST_SHOWN]
    return text if text.isprintable() else repr(text)


def read_headers(raw: bytes) -> dict[str, str]:
    """Headers from their JSON object. Raises Malformed for anything but an object of strings."""
    if len(raw) > LARGEST_HEADERS:
        raise Malformed(f"the headers have {len(raw)} bytes, more than {LARGEST_HEADERS}")
    try:
        headers = from_json(raw)
    except ValueError as error:
        raise Malformed(f"the headers are not JSON: {error}") from None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise Malformed("the headers are not a JSON object of strings")
    return headers


def write_headers(headers: Mapping[str, str]) -> bytes:
    """Headers as their JSON object. Raises ConfigError for more than any reader takes."""
    raw = to_json(headers)
    if len(raw) > LARGEST_HEADERS:
        raise ConfigError(
            f"the headers have {len(raw)} bytes as JSON: use at most {LARGEST_HEADERS}, and put what is large into the "
            f"payload"
        )
    return raw


def new_message_id() -> str:
    """A UUIDv7: unique, and sorted by time."""
    return str(uuid_utils.uuid7())


def encode_payload(payload: Any) -> tuple[bytes, str]:
    """A payload as bytes and content type: bytes as they are, str as UTF-8, everything else (models too) as JSON."""
    if isinstance(payload, BYTES_LIKE):
        return bytes(payload), BYTES
    if isinstance(payload, str):
        return payload.encode(), TEXT
    return to_json(payload, inf_nan_mode="null"), JSON  # NaN is no JSON: null, as in JavaScript


def entry_fields(
    data: bytes,
    message_id: str,
    key: str | None = None,
    content_type: str = JSON,
    headers: Mapping[str, str] | None = None,
) -> list[bytes | str]:
    """The flat field list of a stream entry, defaults left out."""
    fields: list[bytes | str] = ["data", data, "id", message_id]
    if key is not None:
        fields += ("key", key)
    if content_type != JSON:
        fields += ("type", content_type)
    if headers:
        fields += ("h", write_headers(headers))
    return fields


def pack_fields(fields: Iterable[bytes | str]) -> bytes:
    """Fields as one binary string (u32 big-endian length, bytes, repeated): for delayed and for oversized entries."""
    raw = (field.encode() if isinstance(field, str) else field for field in fields)
    return b"".join(struct.pack(">I", len(part)) + part for part in raw)


def unpack_fields(packed: bytes) -> list[bytes]:
    """The inverse of `pack_fields`. Raises Malformed for what is cut off."""
    fields, position = [], 0
    while position < len(packed):
        end = position + 4
        end += int.from_bytes(packed[position:end], "big")
        if end > len(packed) or len(packed) - position < 4:
            raise Malformed(f"packed fields are cut off at byte {position}")
        fields.append(packed[position + 4 : end])
        position = end
    return fields
