"""Batches: messages for one partition that travel in one write, as commands out and as verdicts back. No I/O here."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from rsmq.keys import Keys
from rsmq.message import entry_fields, pack_fields
from rsmq.producer.doubt import Doubt
from rsmq.producer.entry import encode_entry
from rsmq.script import DELAY_MESSAGE, PUBLISH_MESSAGES, PUBLISH_ONCE, Script, Value
from rsmq.topic import Topic
from rsmq.wire import extend, pack

MOST_MESSAGES: Final = 500
MOST_BYTES: Final = 4 << 20

Fields = list[bytes | str]
Encode = Callable[[bytes, str, str | None, str, Mapping[str, str] | None], Any]
"""data, message id, key, content type, headers."""


class Full(Exception):
    """Not an error yet: the rest of a batch found no room."""


class Batch(ABC):
    """Messages for one partition with whoever waits for them.

    `ids`, `entries` and (unless `whole` stands for all) `waiters` run in parallel; what is confirmed or failed leaves
    them from the front, so that what is left is always what has yet to be stored, in order.
    """

    script: ClassVar[Script]
    is_repeatable: ClassVar[bool]
    """Whether the script itself recognises a message that it has stored before."""

    __slots__ = (
        "deadline", "doubt", "entries", "has_made_room", "ids", "is_closed", "keys", "needs_source", "partition",
        "size", "stream", "topic", "waiters", "whole", "window_ms",
    )  # fmt: skip

    def __init__(
        self, keys: Keys, topic: Topic, partition: int, stream: str, *, deadline: float, window_ms: int
    ) -> None:
        self.keys, self.topic, self.partition, self.stream = keys, topic, partition, stream
        self.deadline, self.window_ms = deadline, window_ms
        self.ids: list[str] = []
        self.entries: list[Any] = []
        self.waiters: list[asyncio.Future[None]] = []
        self.whole: asyncio.Future[None] | None = None
        self.size = 0
        self.doubt: Doubt | None = None
        self.is_closed = False
        self.needs_source = False
        self.has_made_room = False

    @staticmethod
    @abstractmethod
    def encode(
        data: bytes, message_id: str, key: str | None, content_type: str, headers: Mapping[str, str] | None
    ) -> Any:
        """A message as an entry of this kind of batch."""

    @property
    def is_full(self) -> bool:
        """Whether the next message belongs into another batch."""
        return self.is_closed or len(self.ids) >= MOST_MESSAGES or self.size >= MOST_BYTES

    def add(self, message_id: str, entry: Any, size: int) -> None:
        """Append a message, as `encode` has made it."""
        self.ids.append(message_id)
        self.entries.append(entry)
        self.size += size

    def promise(self) -> asyncio.Future[None]:
        """One future for the whole batch: done when all is stored, failed with the first error."""
        self.whole = asyncio.get_running_loop().create_future()
        # whoever waits for an earlier batch may never look at this one's error
        self.whole.add_done_callback(lambda whole: whole.cancelled() or whole.exception())
        return self.whole

    def _command(self, keys: Sequence[str], args: Sequence[Value]) -> bytes:
        return pack((self.script.full_command if self.needs_source else self.script.command)(keys, args))

    @abstractmethod
    def commands(self) -> list[bytes]:
        """What to send for all messages that are left."""

    @abstractmethod
    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        """How many messages, from the front, are stored; the newest stream id known; and what kept the rest out."""

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

    def _forget(self, count: int) -> None:
        del self.ids[:count], self.entries[:count], self.waiters[:count]

    def __repr__(self) -> str:
        state = "in doubt" if self.doubt else "closed" if self.is_closed else "open"
        return f"<{type(self).__name__} {self.stream} messages={len(self.ids)} {state}>"


class Append(Batch):
    """Plain messages: one script call for all, stored whole or, where the partition is full, a prefix of them."""

    __slots__ = ()
    script = PUBLISH_MESSAGES
    encode = staticmethod(encode_entry)
    is_repeatable = False

    def commands(self) -> list[bytes]:
        head = self._command((self.stream,), (self.topic.max_length, self.topic.on_full))
        count = sum([count for count, _ in self.entries])
        return [extend(head, count, [arguments for _, arguments in self.entries])]

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        reply = replies[0]
        if isinstance(reply, Exception):
            return 0, b"", reply
        count, newest = reply
        return count, newest, Full() if count < len(self.ids) else None


class Once(Batch):
    """Messages whose id the caller gave: stored unless one with that id was stored within the dedup window."""

    __slots__ = ("since",)
    script = PUBLISH_ONCE
    encode = staticmethod(entry_fields)
    is_repeatable = True

    def __init__(
        self, keys: Keys, topic: Topic, partition: int, stream: str, *, deadline: float, window_ms: int
    ) -> None:
        super().__init__(keys, topic, partition, stream, deadline=deadline, window_ms=window_ms)
        self.since: dict[str, bytes] = {}  # where to look for a first attempt that left no dedup key

    def commands(self) -> list[bytes]:
        packed = []
        for message_id, fields in zip(self.ids, self.entries, strict=True):
            args = (
                self.topic.max_length, self.topic.on_full, self.window_ms, self.since.get(message_id, b""), message_id,
            )  # fmt: skip
            packed.append(self._command((self.stream, self._dedup(message_id)), (*args, *fields)))
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
        return len(replies), newest, None

    def _dedup(self, message_id: str) -> str:
        return self.keys.dedup(self.topic.name, self.partition, message_id)


class Delay(Once):
    """Messages to be kept until they are due, each with its own due time."""

    __slots__ = ("due",)
    script = DELAY_MESSAGE

    def __init__(
        self, keys: Keys, topic: Topic, partition: int, stream: str, *, deadline: float, window_ms: int
    ) -> None:
        super().__init__(keys, topic, partition, stream, deadline=deadline, window_ms=window_ms)
        self.due: dict[str, str] = {}  # message id -> ms since 1970, or "+ms" from the server's now

    def commands(self) -> list[bytes]:
        delayed = self.keys.delayed(self.topic.name, self.partition)
        return [
            self._command(
                (delayed, self._dedup(message_id)), (self.due[message_id], self.window_ms, pack_fields(fields))
            )
            for message_id, fields in zip(self.ids, self.entries, strict=True)
        ]

    def read(self, replies: Sequence[Any]) -> tuple[int, bytes, Exception | None]:
        stored, _, trouble = super().read(replies)
        return stored, b"", trouble  # nothing was added to the stream
