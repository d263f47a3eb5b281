"""A message: what a handler receives, and the wire format between it and a stream entry.

A stream entry is a flat list of fields; only `data` is required (`docs/wire-format.md`). An entry that cannot be read
is `Malformed`; it does not affect its neighbours.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import Any, Final, Protocol, Unpack
from uuid import UUID

import uuid_utils
from anyio import from_thread
from pydantic_core import to_json

from rsmq.errors import ConfigError, Malformed, MessageError, NotJson, Oversized
from rsmq.model.batch_member import FIELD, BatchMember
from rsmq.model.body import check_ref, is_outside
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.encoding import ENC, Binding, Encoding, binding_of, why_sealed
from rsmq.model.error_text import serializer_problem
from rsmq.model.expiry import EXPIRES, ON_EXPIRY, expiry_of
from rsmq.model.expiry import FIELDS as EXPIRY_FIELDS
from rsmq.model.formats import ENCODERS, format_of, written_with_structs
from rsmq.model.formats import JSON as JSON  # what most messages have
from rsmq.model.headers import LARGEST_HEADERS as LARGEST_HEADERS
from rsmq.model.headers import MOST_PUBLISHED, MOST_REMEMBERED, check_headers
from rsmq.model.headers import read_headers as read_headers  # a message has some
from rsmq.model.headers import write_headers as write_headers
from rsmq.model.json import MOST_DIGITS, MOST_LEVELS, SHORTEST_DEEP, has_endless_number, is_too_deep
from rsmq.model.kept_result import KEEP_RESULT, kept_ms
from rsmq.model.layout import NORMAL
from rsmq.model.log_names import name_in_log
from rsmq.model.message_ref import MessageRef
from rsmq.model.nonfinite import nonfinite_decimal_in, nonfinite_in
from rsmq.model.publish_options import AddedOptions, OutputOptions, refuse_thread
from rsmq.model.words import shown

BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain"
BYTES_LIKE: Final = (bytes, bytearray, memoryview)
ASTERISK: Final = ord("*")
"""As a number: looking for one costs an eighth of looking for bytes."""

KNOWN_FIELDS: Final = frozenset({b"data", b"key", b"id", b"type", b"h", b"group", ENC})
MAX_FIELDS: Final = 256
"""An entry with more fields is refused: reading them as headers would waste CPU."""
WITH_HEADERS: Final = [b"data", b"id", b"key", b"type", b"h"]
"""The fields of a message that came through an MQTT gateway."""
HEADED: Final = (WITH_HEADERS, [b"data", b"id", b"key", b"h"], [b"data", b"id", b"h"])
"""The usual fields of a message with headers, which come last."""
PLAIN_WITH_ID: Final = ([b"data", b"id", b"key"], [b"data", b"id"])
"""The fields before `batch` of nearly all members of batches."""
LARGEST_PAYLOAD: Final = 1 << 20
"""Largest payload that a setting allows. A larger one was stored by another client, and is not handled."""

RawEntry = tuple[bytes, list[bytes]]
"""A stream id and the fields of its entry."""


class Origin(Protocol):
    """Where a message came from, shared by all messages of one partition and group."""

    @property
    def deployment(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def band(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def fence(self) -> int: ...
    @property
    def run(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...

    def has_outputs(self, entry_id: bytes) -> bool: ...

    def publish(
        self, message: Message, topic: str, payload: Any, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, MessageRef]: ...
    def publish_member(
        self, message: Message, topic: str, payload: Any, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, MessageRef]: ...
    def join(self, message: Message, member: BatchMember) -> None: ...
    def want_result(self) -> None: ...
    def progress(self, message: Message, done: float, text: str) -> Coroutine[Any, Any, None]: ...
    def step(self, message: Message, name: str) -> AnyStep: ...
    def permit(self, message: Message, name: str) -> AnyPermit: ...
    def spent(self, message: Message, number: int) -> None: ...


class AnyPermit(Protocol):
    """What `async with message.permit(name)` enters; in a plain function `with message.permit(name)`."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(self, kind: Any, error: Any, at: Any, /) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> None: ...


class AnyStep(Protocol):
    """What `async with message.step(name) as step` enters; in a plain function `with message.step(name) as step`.

    `is_done`: an attempt before, or the message before its replay, has done it. `result`: what it has kept, or None.
    What is assigned to `result` is kept at the end of the block.
    """

    result: Any

    @property
    def is_done(self) -> bool: ...

    async def __aenter__(self) -> AnyStep: ...
    async def __aexit__(self, kind: Any, error: Any, at: Any, /) -> None: ...
    def __enter__(self) -> AnyStep: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class MessageOrigin:
    """An origin as a value, for a message that leaves its process."""

    topic: str
    partition: int
    group: str
    fence: int = 0
    run: int = 0
    max_attempts: int = 0
    deployment: str = "rsmq"
    band: str = NORMAL

    def has_outputs(self, _entry_id: bytes) -> bool:
        """Nothing is published by it here."""
        return False

    def publish(
        self, message: Message, topic: str, payload: Any, options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, MessageRef]:
        """Refuse: no worker of this process handles the message."""
        raise ConfigError(
            "message.publish works in the process of the worker: with execution='process' return the payload, and "
            "write @broker.handler(..., output='invoices')"
        )

    publish_member = publish

    def join(self, message: Message, member: BatchMember) -> None:
        """No settlement follows here."""

    def want_result(self) -> None:
        """Nor is a result kept here."""

    def progress(self, message: Message, done: float, text: str) -> Coroutine[Any, Any, None]:
        """Refuse, in the same way."""
        raise ConfigError("message.progress works in the process of the worker, not with execution='process'")

    def step(self, message: Message, name: str) -> AnyStep:
        """Refuse, in the same way."""
        raise ConfigError(f"message.step({name!r}) works in the process of the worker, not with execution='process'")

    def permit(self, message: Message, name: str) -> AnyPermit:
        """Refuse, in the same way."""
        raise ConfigError(f"message.permit({name!r}) works in the process of the worker, not with execution='process'")

    def spent(self, message: Message, number: int) -> None:
        """Refuse, in the same way."""
        raise ConfigError(f"message.spent({number!r}) works in the process of the worker, not with execution='process'")


class Message:
    """One delivery of one message.

    `data` is the raw payload, `payload` the decoded one; `attempt` starts at 1; `is_redelivered`: another
    handler call may have started it before. `is_plain`: there are only data, perhaps id and perhaps key, in this order,
    so no headers. Text fields are decoded on first use: most handlers need only the payload. These exist only if it is
    not plain: `expires_ms`, when it expires, in ms since 1970, or None; `encoding`, its field `enc`, or None;
    `is_encoded`: `data` is still as it is stored; `member`: which member of a batch it is, or None; `result_ms`: for
    how long its result is kept, in ms, or None.
    """

    __slots__ = (
        "_body", "_entry", "_id", "_key", "addressee", "attempt", "data", "encoding", "entry_id", "expires_ms",
        "is_encoded", "is_plain", "is_redelivered", "is_suspect", "member", "origin", "payload", "result_ms",
        "routing_key",
    )  # fmt: skip

    def __init__(self, origin: Origin, entry_id: bytes, entry: list[bytes], attempt: int = 1) -> None:
        self.origin = origin
        self.entry_id = entry_id
        self.attempt = attempt
        self.is_redelivered = False
        self.is_suspect = False
        self.payload: Any = None
        self.addressee: bytes | None = None  # the only group that may handle it (a replayed dead letter), None for all
        self.routing_key: bytes | None
        self.is_plain = True
        # nearly all entries are plain: they need no dict, and no list that the garbage collector would have to visit
        self._entry: list[bytes] | None = None
        self._id: bytes | None = None
        self._key: bytes | None
        size = len(entry)
        if size == 6 and entry[0] == b"data" and entry[2] == b"id" and entry[4] == b"key":
            self.data = entry[1]
            self._id = entry[3]
            self.routing_key = self._key = entry[5]
        elif size == 4 and entry[0] == b"data" and entry[2] == b"id":
            self.data = entry[1]
            self._id = entry[3]
            self.routing_key = None
            self._key = None
        elif size == 4 and entry[0] == b"data" and entry[2] == b"key":
            self.data = entry[1]
            self.routing_key = self._key = entry[3]
        elif size == 2 and entry[0] == b"data":
            self.data = entry[1]
            self.routing_key = None
            self._key = None
        elif size in (6, 8, 10) and entry[::2] in HEADED and len(entry[-1]) <= MOST_REMEMBERED:
            self.is_plain = False
            self._entry = entry
            self.expires_ms: int | None = None
            self.encoding: str | None = None
            self.is_encoded = False
            self.member: BatchMember | None = None
            self.result_ms: int | None = None
            self.data = entry[1]
            self._id = entry[3]
            self.routing_key = self._key = entry[5] if entry[4] == b"key" else None
            if len(self.data) > LARGEST_PAYLOAD:
                refuse_oversized(self)
            if size == 10:  # only the headers of a device repeat
                check_headers(entry[9])
            else:
                read_headers(entry[-1])
        elif size in (6, 8) and entry[-2] == FIELD and entry[:-2:2] in PLAIN_WITH_ID:  # nearly all members of batches
            self.is_plain = False
            self._entry = entry
            self.expires_ms = None
            self.encoding = None
            self.is_encoded = False
            self.result_ms = None
            self.data = entry[1]
            self._id = entry[3]
            self.routing_key = self._key = entry[5] if size == 8 else None
            self.member = BatchMember.read(entry[-1])
            if len(self.data) > LARGEST_PAYLOAD:
                refuse_oversized(self)
            if self.member is not None:
                origin.join(self, self.member)
        else:
            self._read_any_layout(entry)

    def _read_any_layout(self, entry: list[bytes]) -> None:
        """Read fields in any order, rare ones included, and check sizes and headers."""
        self.is_plain = False
        self._entry = entry
        fields = self._fields
        if b"data" not in fields:
            raise Malformed("the entry has no field `data`")
        if len(fields) * 2 != len(entry):
            raise Malformed("a field occurs twice")
        self.data = fields[b"data"]
        self._id = fields.get(b"id")
        self._key = fields.get(b"key")
        self.routing_key = self._key
        self.addressee = fields.get(b"group")
        self.is_encoded = ENC in fields
        self._body: bytes | None = None
        self.encoding = fields[ENC].decode(errors="backslashreplace") if self.is_encoded else None
        self.expires_ms = expiry_of(fields, stored_ms(self)) if EXPIRES in fields else None
        self.member = BatchMember.read(fields[FIELD]) if FIELD in fields else None
        if self.member is not None:
            self.origin.join(self, self.member)
        self.result_ms = kept_ms(fields) if KEEP_RESULT in fields and self._id is not None else None
        if self.result_ms is not None:
            self.origin.want_result()
        size = sum(map(len, entry))
        if size > LARGEST_PAYLOAD + LARGEST_HEADERS:
            raise Oversized(size, LARGEST_PAYLOAD + LARGEST_HEADERS)
        if len(fields) > MAX_FIELDS:
            raise Malformed(f"the entry has {len(fields)} fields, more than {MAX_FIELDS}")
        if b"h" in fields:
            read_headers(fields[b"h"])

    @property
    def _fields(self) -> dict[bytes, bytes]:
        pairs = iter(stored_entry(self))
        return dict(zip(pairs, pairs, strict=False))

    def undo(self, encoding: Encoding) -> None:
        """Make `data` what was published. Raises Malformed, and CannotDecode where a key or a codec is missing."""
        if not self.is_plain and self.is_encoded:
            if self._body is None and encoding.may_block and self.is_outside:
                self.bring(encoding.read(self.body_name))
            self.data = encoding.undo(self.data, binding_of(self._fields, self._body))
            self._body = None
            self.is_encoded = False

    @property
    def is_outside(self) -> bool:
        """Whether `data` is the digest of a body that lies in a store, and has yet to be brought."""
        return not self.is_plain and self.is_encoded and self._body is None and is_outside(self._fields[ENC])

    @property
    def body_name(self) -> str:
        """The name of its body in the store, where `is_outside`. Raises Malformed for what is none of its topic."""
        return check_ref(self._fields.get(b"ref"), self.topic)

    def bring(self, body: bytes) -> None:
        """Its body, from the store. `undo` checks it."""
        self._body = body

    def open(self, encoding: Encoding) -> str:
        """`undo`, if that is possible. Returns why not, such as `encrypted (k7)`; empty where `data` is readable."""
        try:
            self.undo(encoding)
        except MessageError as error:
            return why_sealed(error, self.encoding or "")
        return ""

    async def open_with_body(self, encoding: Encoding) -> str:
        """`open`, also with a body that lies in the store of the encoding. It does not block the event loop."""
        try:
            if self.is_outside:
                self.bring(await encoding.fetch(self.body_name))
        except MessageError as error:
            return why_sealed(error, self.encoding or "")
        return self.open(encoding)

    @property
    def key(self) -> str | None:
        """The ordering key."""
        return None if self._key is None else self._key.decode(errors="backslashreplace")

    @property
    def id(self) -> str:
        """The message id: given by the publisher, else the stream id."""
        return (self.entry_id if self._id is None else self._id).decode(errors="backslashreplace")

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
        own = KNOWN_FIELDS if self.expires_ms is None else KNOWN_FIELDS | EXPIRY_FIELDS
        if self.encoding is not None and is_outside(fields[ENC]):
            own = own | {b"ref"}
        if self.member is not None:
            own = own | {FIELD}
        if self.result_ms is not None:
            own = own | {KEEP_RESULT}
        for name in fields.keys() - own:
            headers.setdefault(name.decode(errors="backslashreplace"), fields[name].decode(errors="backslashreplace"))
        return headers

    @property
    def raw_headers(self) -> bytes | None:
        """The headers as JSON, if they are few, and all that `headers` would show."""
        entry = self._entry
        found = entry[9] if entry is not None and entry[::2] == WITH_HEADERS else None
        return None if found is None or len(found) > MOST_REMEMBERED else found

    @property
    def expires(self) -> datetime | None:
        """When it expires: no attempt starts after that. None: never."""
        return None if self.is_plain or self.expires_ms is None else from_epoch_ms(min(self.expires_ms, LATEST_MS))

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.origin.topic

    @property
    def partition(self) -> int:
        """The partition's number, from 0."""
        return self.origin.partition

    @property
    def band(self) -> str:
        """The band of its topic in which it came; `normal` in a topic without bands."""
        return self.origin.band

    @property
    def group(self) -> str:
        """The group that handles this delivery."""
        return self.origin.group

    @property
    def fence(self) -> int:
        """The number of the owner's lease. Each later owner of the partition in this group has a greater one.

        Store it beside what the handler writes, and refuse smaller ones: then a worker that wakes up late cannot
        overwrite what its successor has written. 0 in shared distribution, which has no owners.
        """
        return self.origin.fence

    @property
    def run(self) -> int:
        """The group's run through this partition: 0, and greater after each `rsmq group reset`.

        Within one run a `stream_id` is one message. A replayed dead letter has a new `stream_id`. Always 0 in shared
        distribution.
        """
        return self.origin.run

    @property
    def is_last_attempt(self) -> bool:
        """Whether it becomes a dead letter if this attempt fails: the place for a fallback, or for an alarm."""
        return 0 < self.origin.max_attempts <= self.attempt

    @property
    def stream_id(self) -> str:
        """The id of the stream entry, `ms-seq`: unique within the partition."""
        return self.entry_id.decode()

    @property
    def timestamp(self) -> datetime:
        """When it was published: the time in the id if that is a UUIDv7, else the time when the server stored it."""
        with suppress(ValueError):  # not a UUID, or one after the year 9999
            given = UUID(self.id)
            if given.version == 7:
                return from_epoch_ms(given.int >> 80)
        return from_epoch_ms(stored_ms(self))

    def publish(self, topic: str, payload: Any, **options: Unpack[OutputOptions]) -> Coroutine[Any, Any, MessageRef]:
        """Publish an output: it is stored when this message is settled, in the same step, or not at all.

        If the handler fails or loses its lease, or its process dies, nothing is published. Takes the options of
        `broker.publish`, except for `wait_replicas`, `unique`, `until` and `on_conflict`, and returns the id. Raises
        what is wrong with the output at once: TooLarge, NotJson, ConfigError. A full topic delays the settlement.
        """
        refuse_thread(is_async=True)
        return self.origin.publish(self, topic, payload, options)

    def publish_sync(self, topic: str, payload: Any, **options: Unpack[OutputOptions]) -> MessageRef:
        """`publish` for handlers that are plain functions."""
        refuse_thread(is_async=False)
        return from_thread.run(self.origin.publish, self, topic, payload, options)

    @property
    def batch(self) -> OwnBatch | None:
        """The batch of which it is a member; None: of none. `await message.batch.publish(...)` adds a member."""
        return None if self.is_plain or self.member is None else OwnBatch(self, self.member)

    def progress(self, done: float, text: str = "") -> Coroutine[Any, Any, None]:
        """Say how far the handler has come: `await message.progress(0.4, "page 3")`. `rsmq trace` shows it.

        `done` is a part of 1, and `text` has at most 200 characters, which are not encrypted. It is written at most
        once a second, so call it as often as you like; while the server is away it is dropped. It goes with the
        settlement, and stays while the message waits for a retry. Raises ConfigError, also with `execution="process"`.
        """
        refuse_thread(is_async=True, name="message.progress")
        return self.origin.progress(self, done, text)

    def progress_sync(self, done: float, text: str = "") -> None:
        """`progress` for handlers that are plain functions."""
        refuse_thread(is_async=False, name="message.progress")
        from_thread.run(self.origin.progress, self, done, text)

    def step(self, name: str) -> AnyStep:
        """A part of the handler that is not done again: `async with message.step("charge") as step:`.

        `step.is_done` says that an attempt before has done it, also one before the message became a dead letter that
        was replayed; `step.result` is what that has kept. At the end of the block the step is kept, with what was
        assigned to `step.result` (None): anything that can be a payload, encoded by the codecs of the broker. If the
        block raises, nothing is kept. What is assigned later, in another block, replaces it: so a step can be a cursor.

        It is kept when the block has ended, under the lease: raises StaleEpoch if the lease is lost, TooLarge for more
        than 64 KiB, and ConfigError for more than 100 steps of a message, or 256 KiB in all of them. The settlement
        removes it. A crash between the end of what the step does and the end of the block does it again: use an id that
        the other side knows, too. In a handler that is a plain function: `with message.step("charge") as step:`. Not
        with `execution="process"`.
        """
        return self.origin.step(self, name)

    def permit(self, name: str) -> AnyPermit:
        """Permission for one call, under the limits of the handler's `permits`: `async with message.permit("twilio"):`.

        Waits until the rate of that name has a start and its limit on calls at once has room, over the whole group;
        the call counts until the end of the block. Time that it waits counts for the handler's timeout. In a handler
        that is a plain function: `with message.permit("twilio"):`. Raises `Hold` while the name is held, ConfigError
        for a name that is not declared, and with `execution="process"`.
        """
        return self.origin.permit(self, name)

    def spent(self, number: int) -> None:
        """What this message really costs under the rate's `cost`, such as tokens: it counts so many from its start.

        Less is free again for others; more makes the next ones wait. The last call counts. Raises ConfigError where no
        rate has a cost, and with `execution="process"`.
        """
        self.origin.spent(self, number)

    def again(self) -> Message:
        """A copy of this delivery for another call of the handler. Outputs of the last call cannot reach this one."""
        other = Message(self.origin, self.entry_id, stored_entry(self), self.attempt)
        other.is_redelivered = self.is_redelivered
        other.is_suspect = self.is_suspect
        other.routing_key = self.routing_key
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a handler in another process, without the state of this process."""
        fields, state = self._fields, {"payload": self.payload}
        if not self.is_plain and self.encoding is not None and not self.is_encoded:
            if is_outside(fields[ENC]):  # it may be larger than an entry
                state |= {"data": self.data, "is_encoded": False}
            else:
                fields[b"data"] = self.data
                del fields[ENC]
        entry = [part for pair in fields.items() for part in pair]
        about = (self.fence, self.run, self.origin.max_attempts, self.origin.deployment, self.band)
        origin = MessageOrigin(self.topic, self.partition, self.group, *about)
        return Message, (origin, self.entry_id, entry, self.attempt), (None, state)

    def __repr__(self) -> str:
        key = None if self.key is None else name_in_log(self.key)
        return f"<Message {shown(self.id)} {self.topic}.{self.partition} key={key} attempt={self.attempt}>"


class OwnBatch:
    """The batch of a message that a handler has. `id`: random, and the same in all its members and its callback."""

    __slots__ = ("_message", "id")

    def __init__(self, message: Message, member: BatchMember) -> None:
        self._message = message
        self.id = member.home

    def publish(self, topic: str, payload: Any, **options: Unpack[AddedOptions]) -> Coroutine[Any, Any, MessageRef]:
        """Publish an output, as `message.publish` does, that is a member of the batch: its callback waits for it.

        The group of the batch must be one of the topic. What a failed attempt has added does not count.
        Raises ConfigError.
        """
        refuse_thread(is_async=True)
        return self._message.origin.publish_member(self._message, topic, payload, options)

    def publish_sync(self, topic: str, payload: Any, **options: Unpack[AddedOptions]) -> MessageRef:
        """`publish` for handlers that are plain functions."""
        refuse_thread(is_async=False)
        return from_thread.run(self._message.origin.publish_member, self._message, topic, payload, options)

    def __repr__(self) -> str:
        return f"<OwnBatch {self.id}>"


def plain_size(entries: Iterable[RawEntry]) -> tuple[int, list[int]]:
    """Bytes of payload in all plain entries (see `Message.is_plain`), and the places of those that are not plain."""
    size, others = 0, list[int]()
    for position, (_, fields) in enumerate(entries):
        count = len(fields)
        if count == 6:
            is_plain = fields[2] == b"id" and fields[4] == b"key"
        else:
            is_plain = count == 2 or (count == 4 and (fields[2] == b"id" or fields[2] == b"key"))
        if is_plain and fields[0] == b"data":
            size += len(fields[1])
        else:
            others.append(position)
    return size, others


def new_message_id() -> str:
    """A UUIDv7: unique, and sorted by time, which is that of this machine."""
    return str(uuid_utils.uuid7())


def message_id_at(ms: int) -> str:
    """The same with another time, in milliseconds since 1970."""
    return str(uuid_utils.uuid7(nanoseconds=1_000_000 * ms))


def new_message_ids(count: int) -> list[str]:
    """Several of one moment: they differ in their last 32 bits."""
    first = new_message_id()
    if count == 1:
        return [first]
    front, last = first[:28], int(first[28:], 16) >> 1
    return [f"{front}{number:08x}" for number in range(last, last + count)]


UNTYPED: Final = frozenset({dict, list, type(None), bool, int, float})
"""Their numbers are what JSON writes: a Decimal among them is text for every reader."""


def encode_payload(payload: Any) -> tuple[bytes, str]:
    """A payload as bytes and content type: bytes as they are, str as UTF-8, everything else (models too) as JSON.

    Raises NotJson, also for NaN and infinity. The encoder makes them null, and a search for that costs little.
    """
    if isinstance(payload, BYTES_LIKE):
        return bytes(payload), BYTES
    try:
        if isinstance(payload, str):
            return payload.encode(), TEXT
        if type(payload) not in UNTYPED and type(payload) in ENCODERS:
            return ENCODERS[type(payload)](payload)
        data = to_json(payload, inf_nan_mode="null")
    except ValueError as error:  # of the encoder, or of a serializer of the user's model
        if (own := format_of(type(payload))) is not None:  # its type is met for the first time
            return own.encode(payload)
        if (found := written_with_structs(payload)) is not None:
            return found
        problem = serializer_problem(error)
        cause = error if problem == str(error) and not isinstance(error, UnicodeError) else None
        raise NotJson("", f"a payload of type {type(payload).__name__} cannot be written ({problem})") from cause
    if data.find(b"null") >= 0:  # half the cost of `in`
        where = nonfinite_in(payload)
        if where is not None:
            raise NotJson(where)
    if type(payload) not in UNTYPED and (b'nity"' in data or b'NaN"' in data):
        where = nonfinite_decimal_in(payload)
        if where is not None:
            raise NotJson(where)
    if len(data) >= SHORTEST_DEEP:
        if len(data) > MOST_DIGITS and has_endless_number(data):
            raise NotJson("", f"the payload has a number of more than {MOST_DIGITS} digits, which no reader takes")
        if is_too_deep(data):
            problem = f"the payload has more than {MOST_LEVELS} levels, which no reader takes"
            raise NotJson("", problem, "publish it flatter, or its deep part as text")
    if ASTERISK in data and b"*****" in data:
        where = import_module("rsmq.model.secret").secret_in(payload, data)
        if where is not None:
            raise NotJson(where, f"the secret at {where} would arrive as asterisks (give its model a field_serializer)")
    return data, JSON


def entry_fields(
    data: bytes,
    message_id: str,
    key: str | None = None,
    content_type: str = JSON,
    headers: Mapping[str, str] | None = None,
    extra: Sequence[bytes | str] = (),
    most_headers: int = MOST_PUBLISHED,
) -> list[bytes | str]:
    """The flat field list of a stream entry, defaults left out, with `extra` at its end."""
    fields: list[bytes | str] = ["data", data, "id", message_id]
    if key is not None:
        fields += ("key", key)
    if content_type != JSON:
        fields += ("type", content_type)
    if headers:
        fields += ("h", write_headers(headers, most_headers))
    fields += extra
    return fields


def without_body(message: Message) -> Message:
    """A copy that only holds its place: with id and key, but without payload and headers."""
    own_id = () if message._id is None else (b"id", message._id)
    own_key = () if message._key is None else (b"key", message._key)
    other = Message(message.origin, message.entry_id, [b"data", b"", *own_id, *own_key], message.attempt)
    other.is_redelivered = message.is_redelivered
    other.is_suspect = message.is_suspect
    other.routing_key = message.routing_key
    return other


def stored_entry(message: Message) -> list[bytes]:
    """The fields of a message's entry, as they are stored: name, value, name, value."""
    if message._entry is not None:
        return message._entry
    own_id = () if message._id is None else (b"id", message._id)
    own_key = () if message._key is None else (b"key", message._key)
    return [b"data", message.data, *own_id, *own_key]


def stored_payload(message: Message, encoding: Encoding) -> tuple[bytes, Binding | None]:
    """The payload of a message that was read, as its entry has it, and what undoes it; None: it is not encoded.

    One whose body lies in a store is encoded anew, by the codecs of `encoding`: an entry lives as long as its body only
    in its topic.
    """
    if message.is_plain or message.encoding is None:
        return message.data, None
    named = message._fields
    if not is_outside(named[ENC]):
        return named[b"data"], binding_of(named)
    return encoding.bound(message.data, message.id, message.key, message.type)


def has_own_id(message: Message) -> bool:
    """Whether its publisher has given it an id: otherwise it is that of its entry, which a replay changes."""
    return message._id is not None


def stored_ms(message: Message) -> int:
    """When the server stored a message, in ms since 1970; a delayed message when it was due."""
    return int(message.entry_id.partition(b"-")[0])


def refuse_oversized(message: Message) -> None:
    """Raise Oversized for a payload that is larger than any setting allows. The fetcher calls this when needed."""
    if len(message.data) > LARGEST_PAYLOAD:
        raise Oversized(len(message.data), LARGEST_PAYLOAD)


def becomes_dead(message: Message) -> bool:
    """Whether a message becomes a dead letter when it expires; otherwise it is dropped."""
    return message._fields.get(ON_EXPIRY) == b"dead"


def same_expiry(message: Message) -> tuple[str, ...]:
    """The fields of another entry that expires at the same moment, and in the same way."""
    if message.is_plain or message.expires_ms is None:
        return ()
    return ("expires", str(message.expires_ms), *(("on_expiry", "dead") if becomes_dead(message) else ()))


def remaining_ms(message: Message, now_ms: int) -> int | None:
    """Milliseconds until a message expires, at most 0 if it has. None: it never does."""
    return None if message.is_plain or message.expires_ms is None else message.expires_ms - now_ms


def has_outputs(message: Message) -> bool:
    """Whether the handler of a message has published by it, in this attempt."""
    return message.origin.has_outputs(message.entry_id)
