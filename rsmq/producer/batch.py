"""Batches: the messages of one write for one partition; their commands, and what the replies mean. No I/O."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

from rsmq.model.encoding import Encoding
from rsmq.model.keys import Keys
from rsmq.model.message import JSON, entry_fields, new_message_ids
from rsmq.model.message_ref import location
from rsmq.model.packing import pack_fields
from rsmq.model.partition import route_of
from rsmq.producer.in_doubt import InDoubt
from rsmq.redis.client.client import as_reply
from rsmq.redis.client.raw_connection import pack
from rsmq.redis.scripts import DELAY_MESSAGE, PUBLISH_MESSAGES, PUBLISH_ONCE, Script
from rsmq.redis.topics import Topic

Fields = list[bytes | str]
Entry = tuple[int, bytes]
"""How many arguments of a command a message is, and these in the wire format."""

MULTI: Final = pack(("MULTI",))
EXEC: Final = pack(("EXEC",))


def encode_entry(
    data: bytes,
    message_id: str,
    key: str | None,
    content_type: str,
    headers: Mapping[str, str] | None,
    extra: Sequence[bytes | str] = (),
) -> Entry:
    """A message as the last arguments of XADD.

    Nearly all messages have one of two layouts. Formatting one at once costs two thirds of packing each field.
    """
    if content_type == JSON and not headers and not extra:
        identity = message_id.encode()
        if key is None:
            return 4, b"$4\r\ndata\r\n$%d\r\n%b\r\n$2\r\nid\r\n$%d\r\n%b\r\n" % (
                len(data), data, len(identity), identity
            )  # fmt: skip
        route = key.encode()
        return 6, b"$4\r\ndata\r\n$%d\r\n%b\r\n$2\r\nid\r\n$%d\r\n%b\r\n$3\r\nkey\r\n$%d\r\n%b\r\n" % (
            len(data), data, len(identity), identity, len(route), route
        )  # fmt: skip
    fields = entry_fields(data, message_id, key, content_type, headers, extra)
    return len(fields), pack_arguments(fields)


def encode_member(data: bytes, message_id: str, key: str | None, content_type: str, field: bytes) -> Entry:
    """A member of a batch: a message with the field `batch` at its end. With JSON and a key it is formatted at once."""
    if content_type == JSON and key is not None:
        identity = message_id.encode()
        route = key.encode()
        return 8, (
            b"$4\r\ndata\r\n$%d\r\n%b\r\n$2\r\nid\r\n$%d\r\n%b\r\n$3\r\nkey\r\n$%d\r\n%b\r\n"
            b"$5\r\nbatch\r\n$%d\r\n%b\r\n"
        ) % (len(data), data, len(identity), identity, len(route), route, len(field), field)
    count, packed = encode_entry(data, message_id, key, content_type, None)
    return count + 2, b"%b$5\r\nbatch\r\n$%d\r\n%b\r\n" % (packed, len(field), field)


def pack_arguments(values: Sequence[bytes | str | int]) -> bytes:
    """Arguments of a command in the wire format, without the number of them that a command begins with."""
    return pack(values).partition(b"\r\n")[2]


def unpack_arguments(count: int, packed: bytes) -> list[bytes | str]:
    """The inverse of `pack_arguments`, for so many arguments."""
    found, at = list[bytes | str](), 0
    for _ in range(count):
        head = packed.index(b"\r\n", at)
        size = int(packed[at + 1 : head])
        found.append(packed[head + 2 : head + 2 + size])
        at = head + size + 4
    return found


class EntryEncoder:
    """Encodes messages that differ in nothing but payload and id. What they share is packed once.

    `size`: what each of them has besides its payload.
    """

    __slots__ = ("_content_type", "_fields", "_packed", "key", "size")

    def __init__(self, key: str, content_type: str, headers: Mapping[str, str]) -> None:
        self.key = key
        self._content_type = content_type
        self._fields = entry_fields(b"", "", key, content_type, headers)[4:]
        self._packed = pack_arguments(self._fields)
        self.size = len(key) + sum(len(name) + len(value) for name, value in headers.items())

    def fields(self, data: bytes, message_id: str) -> Fields:
        """One message as a field list."""
        return ["data", data, "id", message_id, *self._fields]

    def encoded(self, data: bytes, message_id: str, encoding: Encoding) -> tuple[str, Fields, int]:
        """The id, the fields and the size of a message whose payload is compressed or encrypted. Raises TooLarge."""
        data, extra = encoding.extend(data, message_id, self.key, self._content_type)
        return message_id, [*self.fields(data, message_id), *extra], self.size + len(data)

    def entries(self, payloads: Sequence[bytes]) -> tuple[list[str], list[Entry]]:
        """New ids, and the messages as `encode_entry` encodes them."""
        count, packed = 4 + len(self._fields), self._packed
        ids = new_message_ids(len(payloads))
        return ids, [
            (count, b"$4\r\ndata\r\n$%d\r\n%b\r\n$2\r\nid\r\n$36\r\n%b\r\n%b" % (
                len(data), data, message_id.encode(), packed
            )) for data, message_id in zip(payloads, ids, strict=True)
        ]  # fmt: skip


Answer = tuple[bool | None, bool | None]
"""Whether the message is new, and whether the one that is stored has its payload and key. None: not known."""
NEW: Final[Answer] = (True, True)

MOST_MESSAGES: Final = 500
MOST_BYTES: Final = 4 << 20

Encode = Callable[..., Any]
"""Takes data, message id, key, content type, headers and, if there are any, further fields."""


class Waiter(Protocol):
    """Who waits for a message: a future, or an object that does the same without a task."""

    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...


class MovedWaiter:
    """The waiter of a message that has moved to another batch. The one that it was in hears of the answer, too: its
    caller asks that."""

    __slots__ = ("_first", "_index", "_moved", "_position", "_waiter")

    def __init__(self, waiter: Waiter, first: Batch, position: int, moved: Batch, index: int) -> None:
        self._waiter = waiter
        self._first, self._position = first, position
        self._moved, self._index = moved, index

    def done(self) -> bool:
        """Whether its caller has gone."""
        return self._waiter.done()

    def set_result(self, result: None, /) -> None:
        """The server has it."""
        self._first.note_moved(self._position, self._moved, self._index)
        self._waiter.set_result(result)

    def set_exception(self, exception: Exception, /) -> None:
        """It is not stored, or it is not known whether it is."""
        self._waiter.set_exception(exception)

    def replace(self, waiter: Waiter) -> None:
        """Its caller has gone: another one waits from now on."""
        if isinstance(self._waiter, MovedWaiter):
            self._waiter.replace(waiter)
        else:
            self._waiter = waiter


class JointWaiter:
    """Waits for several messages in the place of the one future that a batch had for all of them."""

    __slots__ = ("_left", "_whole")

    def __init__(self, whole: asyncio.Future[None], count: int) -> None:
        self._whole, self._left = whole, count

    def done(self) -> bool:
        """Whether the first error, or the last result, has come."""
        return self._whole.done()

    def set_result(self, _result: None, /) -> None:
        """The server has one more."""
        self._left -= 1
        if not self._left:
            self._whole.set_result(None)

    def set_exception(self, exception: Exception, /) -> None:
        """The first error is that of all."""
        self._whole.set_exception(exception)


class Full(Exception):
    """The topic has no room for the rest of a batch. Not an error yet: the sender may make room."""


class Batch(ABC):
    """Messages for one partition, and the futures of their callers.

    `ids`, `entries` and `waiters` (or `whole`, one future for all) run in parallel. Confirmed and failed messages leave
    from the front, so the rest is what has yet to be stored, in order. `newest`: the stream id of the last one that a
    reply has confirmed. `ancestry`: the partitions that its partition follows in a resize, the oldest first, and
    itself; `after` are the streams of those before, which go first. The ids of its messages are remembered in the first
    of them. `is_moved`: it was published to one before. `moved`: the batches to which its messages have moved.
    """

    script: ClassVar[Script]
    is_repeatable: ClassVar[bool]
    """Whether the script itself recognises a message that was stored before."""

    __slots__ = (
        "after", "ancestry", "deadline", "entries", "has_made_room", "home", "ids", "in_doubt", "is_closed",
        "is_cluster", "is_moved", "keys", "moved", "newest", "partition", "size", "stream", "topic", "waiters", "whole",
        "window_ms",
    )  # fmt: skip

    def __init__(
        self,
        keys: Keys,
        topic: Topic,
        partition: int,
        stream: str,
        *,
        deadline: float,
        window_ms: int,
        is_cluster: bool = False,
    ) -> None:
        self.is_cluster = is_cluster
        self.keys = keys
        self.topic = topic
        self.partition = partition
        self.stream = stream
        self.home = location(topic.name, partition)
        self.deadline, self.window_ms = deadline, window_ms
        self.ids: list[str] = []
        self.entries: list[Any] = []
        self.waiters: list[Waiter] = []
        self.newest = b""
        self.whole: asyncio.Future[None] | None = None
        self.size = 0
        self.in_doubt: InDoubt | None = None
        self.is_closed = False
        self.is_moved = False
        self.moved: list[Batch] | None = None
        self.has_made_room = False
        self.ancestry: tuple[int, ...] = (partition,)
        self.after: tuple[str, ...] = ()
        if topic.layout.is_resized:
            self.ancestry = (*reversed(topic.layout.ancestors_of(partition)), partition)
            self.after = tuple(keys.stream(topic.name, each) for each in self.ancestry[:-1])

    @staticmethod
    @abstractmethod
    def encode(
        data: bytes,
        message_id: str,
        key: str | None,
        content_type: str,
        headers: Mapping[str, str] | None,
        extra: Sequence[bytes | str] = (),
    ) -> Any:
        """A message as an entry of this kind of batch."""

    @staticmethod
    def pack(fields: Fields) -> Any:
        """The fields of a message as an entry of this kind of batch."""
        return fields

    @property
    def is_full(self) -> bool:
        """Whether the next message starts another batch."""
        return self.is_closed or len(self.ids) >= MOST_MESSAGES or self.size >= MOST_BYTES

    def add(self, message_id: str, entry: Any, size: int) -> None:
        """Append a message, as `encode` has made it."""
        self.ids.append(message_id)
        self.entries.append(entry)
        self.size += size

    def extend(self, payloads: Sequence[bytes], encoder: EntryEncoder, waiter: Waiter) -> None:
        """Append messages that have one waiter."""
        ids, entries = encoder.entries(payloads)
        self.ids += ids
        self.entries += entries
        self.waiters += [waiter] * len(ids)
        self.size += sum([len(values) for _, values in entries])

    def replace_waiter(self, message_id: str, waiter: Waiter) -> None:
        """The caller of a message that is on its way has gone: another one waits for it from now on."""
        for batch in self.moved or ():
            batch.replace_waiter(message_id, waiter)
        if message_id in self.ids:
            at = self.ids.index(message_id)
            known = self.waiters[at]
            if isinstance(known, MovedWaiter):
                known.replace(waiter)
            else:
                self.waiters[at] = waiter

    def promise(self) -> asyncio.Future[None]:
        """One future for the whole batch: done when all is stored, failed with the first error."""
        self.whole = asyncio.get_running_loop().create_future()
        # a caller that fails with an earlier batch never awaits this one
        self.whole.add_done_callback(lambda whole: whole.cancelled() or whole.exception())
        return self.whole

    def dedup(self, message_id: str) -> str:
        """The key that remembers the id of one of its messages."""
        return self.keys.dedup(self.topic.name, self.ancestry[0], message_id)

    @abstractmethod
    def commands(self) -> list[bytes]:
        """The commands for all messages that are left."""

    @abstractmethod
    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        """How many messages from the front are stored, the newest stream id, and the error that stopped the rest."""

    def confirm(self, count: int) -> None:
        """The first `count` messages are stored."""
        for waiter in self.waiters[:count]:
            if not waiter.done():
                waiter.set_result(None)
        self._forget(count)
        if self.whole is not None and not self.ids and not self.whole.done():
            self.whole.set_result(None)

    def fail(self, error_for: Callable[[str], Exception], count: int | None = None) -> None:
        """The first `count` messages (default: all that are left) end with the error made for their message id."""
        count = len(self.ids) if count is None else count
        for message_id, waiter in zip(self.ids[:count], self.waiters[:count], strict=False):
            if not waiter.done():
                waiter.set_exception(error_for(message_id))
        if self.whole is not None and count and not self.whole.done():
            self.whole.set_exception(error_for(self.ids[0]))
        self._forget(count)

    # -- to another partition -------------------------------------------------------------------------------------

    @staticmethod
    def fields_of(entry: Any) -> Sequence[bytes | str]:
        """The fields of a message, of its entry in this kind of batch."""
        fields: Sequence[bytes | str] = entry
        return fields

    def move(self, batch_for: Callable[[bytes | str], Batch]) -> list[Batch]:
        """Hand over what is left, in order, to the batches that `batch_for` gives for each key, or id of a message
        without one. Returns these."""
        joint = None if self.whole is None else JointWaiter(self.whole, len(self.ids))
        moved, size = dict[Batch, None](), self.size // max(1, len(self.ids))
        answered = self._reserve()
        for at, (message_id, entry) in enumerate(zip(self.ids, self.entries, strict=True)):
            batch = batch_for(route_of(self.fields_of(entry), message_id))
            waiter = self.waiters[at] if joint is None else joint
            batch.waiters.append(MovedWaiter(waiter, self, answered + at, batch, len(batch.ids)))
            batch.add(message_id, entry, size)
            batch.learn(self, message_id, entry)
            moved[batch] = None
        for batch in moved:
            batch.deadline = self.deadline
            batch.is_moved = True
            batch.is_closed = True
        self._forget(len(self.ids))
        self.moved = list(moved)
        return self.moved

    def _reserve(self) -> int:
        """Make room for the answers of what moves. Returns the position of the first one."""
        return 0

    def learn(self, before: Batch, message_id: str, entry: Any) -> None:  # noqa: B027 (most know nothing else)
        """Take over what the batch before knows of a message that has moved."""

    def note_moved(self, position: int, moved: Batch, index: int) -> None:
        """A message that has moved is stored."""
        self.newest = moved.newest

    def _forget(self, count: int) -> None:
        del self.ids[:count], self.entries[:count], self.waiters[:count]

    def __repr__(self) -> str:
        state = "in doubt" if self.in_doubt else "closed" if self.is_closed else "open"
        return f"<{type(self).__name__} {self.stream} messages={len(self.ids)} {state}>"


class Append(Batch):
    """Plain messages: all of them are stored, or none; where the topic rejects what has no room, a prefix of them.

    An XADD for each, in one transaction, costs the server two thirds of a script that calls XADD. Only a limit that
    rejects needs the script.
    """

    __slots__ = ()
    script = PUBLISH_MESSAGES
    encode = staticmethod(encode_entry)
    is_repeatable = False

    @staticmethod
    def pack(fields: Fields) -> Entry:
        return len(fields), pack_arguments(fields)

    @staticmethod
    def fields_of(entry: Entry) -> Sequence[bytes | str]:
        count, packed = entry
        return unpack_arguments(count, packed)

    def commands(self) -> list[bytes]:
        if self._is_limited:
            values = [b"$%d\r\n%d\r\n%b" % (len(str(size)), size, fields) for size, fields in self.entries]
            call = self.script.command((self.stream,), (self.topic.max_length, self.topic.on_full))
            count = len(call) + len(values) + sum([size for size, _ in self.entries])
            return [b"".join((b"*%d\r\n" % count, pack_arguments(call), *values))]
        limit = ("MAXLEN", "~", self.topic.max_length) if self.topic.max_length else ()
        command = ("XADD", self.stream, *limit, "*")
        first, count = pack_arguments(command), len(command)
        heads = {size: b"*%d\r\n%b" % (count + size, first) for size in {size for size, _ in self.entries}}
        packed = [heads[size] + fields for size, fields in self.entries]
        return packed if len(packed) == 1 else [MULTI, *packed, EXEC]

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        if self._is_limited and not isinstance(replies[0], Exception):
            count, newest = replies[0]
            return count, newest, Full() if count < len(self.ids) else None
        stream_ids = replies if len(replies) == 1 else read_transaction(replies)
        for stored, reply in enumerate(stream_ids):
            if isinstance(reply, Exception):
                return stored, stream_ids[stored - 1] if stored else b"", as_reply(reply)
        return len(stream_ids), stream_ids[-1], None

    @property
    def _is_limited(self) -> bool:
        return self.topic.max_length > 0 and self.topic.on_full == "reject"


def read_transaction(replies: Sequence[Any]) -> Sequence[Any]:
    """The results of the commands of a transaction, or why it was not executed."""
    begun, *queued, ended = replies
    if isinstance(begun, Exception):  # by a user who may not use MULTI: each command was executed by itself
        return queued
    if isinstance(ended, Exception):
        return [next((each for each in queued if isinstance(each, Exception)), ended)]
    results: Sequence[Any] = ended
    return results


class Once(Batch):
    """Messages whose id the caller gave: stored unless one with that id was stored within the dedup window."""

    __slots__ = ("_again", "_sent", "answers", "since")
    script = PUBLISH_ONCE
    encode = staticmethod(entry_fields)
    is_repeatable = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.since: dict[str, bytes] = {}  # search from here for an attempt that left no dedup key
        self.answers: list[Answer] = []  # of each message that has left from the front
        self._sent = frozenset[str]()
        self._again = frozenset[str]()

    def lifetime_of(self, message_id: str) -> int:
        """For how long an id is remembered, in ms."""
        return self.window_ms

    def _note_sent(self) -> None:
        """A write whose reply was lost may have stored what the next one finds."""
        self._sent, self._again = frozenset(self.ids), self._sent

    def commands(self) -> list[bytes]:
        self._note_sent()
        packed = []
        for message_id, fields in zip(self.ids, self.entries, strict=True):
            since = self.since.get(message_id, b"")
            lifetime = self.lifetime_of(message_id)
            args = (self.topic.max_length, self.topic.on_full, lifetime, since, message_id, *fields)
            packed.append(pack(self.script.command((self.stream, *self._dedups(message_id)), args)))
        return packed

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        newest = b""
        for stored, reply in enumerate(replies):
            if isinstance(reply, Exception):
                return stored, newest, reply
            if reply[0] == b"FULL":
                return stored, newest, Full()
            if reply[0] == b"OK":
                newest = reply[1]
                self.answers.append(self._new(self.ids[stored], self.entries[stored]))
            else:
                is_new = None if self.ids[stored] in self._again else False
                self.answers.append((is_new, {1: True, 0: False}.get(reply[2])))
        return len(replies), newest, None

    def _dedups(self, message_id: str) -> list[str]:
        """Where the id is remembered: in the partition of the message, and in that of the id, which every key has.

        On a cluster a script cannot reach the second one: there an id is one message only with one key.
        """
        partitions = {self.ancestry[0]: None}
        if not self.is_cluster:
            partitions[self.topic.layout.normal.partition_for(message_id)] = None
        return [self.keys.dedup(self.topic.name, each, message_id) for each in partitions]

    def _reserve(self) -> int:
        first = len(self.answers)
        self.answers += [(None, None)] * len(self.ids)
        return first

    def learn(self, before: Batch, message_id: str, entry: Any) -> None:
        assert isinstance(before, Once)
        self._sent |= {message_id} & before._sent

    def note_moved(self, position: int, moved: Batch, index: int) -> None:
        assert isinstance(moved, Once)
        super().note_moved(position, moved, index)
        self.answers[position] = moved.answers[index]

    def _new(self, message_id: str, fields: Fields) -> Answer:
        """What is known of a message that was stored: on a cluster not whether another key has the id, too."""
        return (None, True) if self.is_cluster and len(self.topic.numbers) > 1 and "key" in fields[::2] else NEW


class Delay(Once):
    """Messages to be kept until they are due, each with its own due time."""

    __slots__ = ("due",)
    script = DELAY_MESSAGE

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.due: dict[str, str] = {}  # message id -> ms since 1970, or "+ms" from the server's now

    def learn(self, before: Batch, message_id: str, entry: Any) -> None:
        assert isinstance(before, Delay)
        super().learn(before, message_id, entry)
        self.due[message_id] = before.due[message_id]

    def commands(self) -> list[bytes]:
        self._note_sent()
        delayed = self.keys.delayed(self.topic.name, self.partition)
        packed = []
        for message_id, fields in zip(self.ids, self.entries, strict=True):
            args = (self.due[message_id], self.lifetime_of(message_id), pack_fields(fields))
            packed.append(pack(self.script.command((delayed, self.stream, *self._dedups(message_id)), args)))
        return packed

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        stored, _, trouble = super().read(replies)
        return stored, b"", trouble  # nothing was added to the stream


class Members(Once):
    """Members of batches whose id the caller gave: remembered until their batch expires. `known`: where a message of
    the same id is, if it was there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lifetimes: dict[str, int] = {}
        self.known: dict[str, bytes] = {}

    def learn(self, before: Batch, message_id: str, entry: Any) -> None:
        assert isinstance(before, Members)
        super().learn(before, message_id, entry)
        self.lifetimes[message_id] = before.lifetimes.get(message_id, 0)
        self.known = before.known

    def lifetime_of(self, message_id: str) -> int:
        return max(self.window_ms, self.lifetimes.get(message_id, 0))

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        for message_id, reply in zip(self.ids, replies, strict=False):
            if isinstance(reply, list) and reply[0] == b"DUPLICATE":
                self.known[message_id] = reply[1]
        return super().read(replies)


class MembersDelay(Members, Delay):
    """Those that are delayed."""
