"""The producer: messages in, ids out; encoding, partition and line are chosen here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final, TypeVar

import anyio
import anyio.abc

from rsmq.clock import epoch_ms, to_ms
from rsmq.connect import Client
from rsmq.errors import ConfigError, TooLarge
from rsmq.keys import Keys
from rsmq.message import encode_payload, new_message_id
from rsmq.partition import partition_for
from rsmq.producer.batch import MOST_BYTES, MOST_MESSAGES, Append, Batch, Delay, Encode, Once
from rsmq.producer.doubt import Doubts
from rsmq.producer.line import Line
from rsmq.retry import LONGEST_DELAY
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics

MOST_PER_ROUND: Final = 1000
"""More in one write only fills socket buffers: measured at 2.6 us a message, 4 000 at 4."""
LONGEST_ID: Final = 256

T = TypeVar("T")


class Producer:
    """Puts messages into topics. What it has returned the id of is stored; what else happened is said by the error.

    Calls made at the same time share one write. Messages with the same key are stored in the order of the calls, as
    long as they ask for the same number of replicas.
    """

    def __init__(self, client: Client, keys: Keys, settings: Settings, topics: Topics) -> None:
        self._client, self._keys, self._settings, self._topics = client, keys, settings, topics
        self._limit = int(settings.payload_limit)
        self._doubts = Doubts()
        self._lines: dict[int, Line] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._streams: dict[str, list[str]] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Carry messages until cancelled. Calls still waiting then end with BrokerUnavailable or PublishUnknown."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            self._lines.clear()

    async def publish(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
    ) -> str:
        """Store one message and return its id, when the server (with `wait_replicas`: and its replicas) confirmed it.

        With `message_id` it is stored once, however often this is called within the dedup window. With `delay` or `at`
        it is delivered when it is due. Raises TooLarge, TopicFull, BrokerUnavailable (nothing is stored) or
        PublishUnknown (publish it again with the id it carries). A cancelled call may have stored the message.
        """
        place = self._topics.cached(topic) or await self._topics.lookup(topic)
        is_delayed = delay is not None or at is not None
        kind: type[Batch] = Delay if is_delayed else Append if message_id is None else Once
        identity, entry, size = self._encode(kind.encode, payload, key, headers, message_id)
        due = due_time(delay, at) if is_delayed else ""
        partition = partition_for(identity if key is None else key, place.partitions)
        batch = self._line(wait_replicas).batch(kind, place, partition, self._stream(place, partition))
        if isinstance(batch, Delay):
            batch.due.setdefault(identity, due)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.add(identity, entry, size)
        batch.waiters.append(waiter)
        await waiter
        return identity

    async def publish_many(
        self,
        topic: str,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        headers: Mapping[str, str] | Callable[[T], Mapping[str, str] | None] | None = None,
        message_id: Callable[[T], str] | None = None,
        batch: int = MOST_MESSAGES,
    ) -> list[str]:
        """Store many messages, in order per key, and return their ids. `batch`: most of one partition in one write.

        The next round is encoded while one is on its way. On an error some of the messages may be stored: with
        `message_id` all of them can be published again, and each is stored once.
        """
        if not 1 <= batch <= MOST_MESSAGES:
            raise ConfigError(f"batch={batch} is not possible: use 1 to {MOST_MESSAGES} messages")
        place = self._topics.cached(topic) or await self._topics.lookup(topic)
        line, ids, on_the_way = self._line(0), list[str](), list[asyncio.Future[None]]()
        kind: type[Batch] = Append if message_id is None else Once
        encoded = self._encoded(items, key, headers, message_id, kind.encode)
        while True:
            filled = self._fill(encoded, place, line, kind, batch, ids)
            confirmed = [full.promise() for full in filled]
            for full in filled:
                line.open(full)
            await asyncio.gather(*on_the_way)
            if not filled:
                return ids
            on_the_way = confirmed

    def _encoded(
        self,
        items: Iterable[T],
        key: Callable[[T], str | None] | None,
        headers: Mapping[str, str] | Callable[[T], Mapping[str, str] | None] | None,
        message_id: Callable[[T], str] | None,
        encode: Encode,
    ) -> Iterator[tuple[str, str, Any, int]]:
        """What decides the partition, the id, the entry and the size of each item."""
        for item in items:
            route = None if key is None else key(item)
            extra = headers(item) if callable(headers) else headers
            given = None if message_id is None else message_id(item)
            identity, entry, size = self._encode(encode, item, route, extra, given)
            yield identity if route is None else route, identity, entry, size

    def _fill(
        self,
        encoded: Iterator[tuple[str, str, Any, int]],
        place: Topic,
        line: Line,
        kind: type[Batch],
        most: int,
        ids: list[str],
    ) -> list[Batch]:
        """The batches of one round, in order; none when everything is encoded. Bounded in messages and bytes."""
        filled, latest, size = list[Batch](), dict[int, Batch](), 0
        for route, identity, entry, length in islice(encoded, min(most * place.partitions, MOST_PER_ROUND)):
            partition = partition_for(route, place.partitions)
            batch = latest.get(partition)
            if batch is None or len(batch.ids) >= most:
                batch = latest[partition] = line.new(kind, place, partition, self._stream(place, partition))
                filled.append(batch)
            batch.add(identity, entry, length)
            ids.append(identity)
            size += length
            if size >= MOST_BYTES:
                break
        return filled

    def _encode(
        self, encode: Encode, payload: Any, key: str | None, headers: Mapping[str, str] | None, message_id: str | None
    ) -> tuple[str, Any, int]:
        """A message's id, its entry and how much it weighs. Refuses what no consumer could read."""
        data, content_type = encode_payload(payload)
        identity = new_message_id() if message_id is None else check_message_id(message_id)
        size = len(data)
        if key is not None:
            if type(key) is not str:
                raise ConfigError(f"key={key!r} is not text: pass a str, such as str({key!r})")
            size += len(key)
        if headers:
            if not all(type(part) is str for pair in headers.items() for part in pair):
                raise ConfigError(f"headers={dict(headers)!r}: names and values must be str")
            size += sum(len(name) + len(value) for name, value in headers.items())
        if size > self._limit:
            raise TooLarge(size, self._limit)
        return identity, encode(data, identity, key, content_type, headers), size

    def _stream(self, place: Topic, partition: int) -> str:
        streams = self._streams.get(place.name)
        if streams is None or len(streams) != place.partitions:
            streams = [self._keys.stream(place.name, number) for number in range(place.partitions)]
            self._streams[place.name] = streams
        return streams[partition]

    def _line(self, replicas: int) -> Line:
        """The line for messages that want so many replicas: one that waits for replicas must not hold up the others."""
        line = self._lines.get(replicas)
        if line is None:
            if self._tasks is None:
                raise ConfigError("the broker is not open: publish inside `async with broker:`")
            if replicas < 0:
                raise ConfigError(f"wait_replicas={replicas} is not possible: use 0 or more")
            line = self._lines[replicas] = Line(
                self._client, self._keys, self._settings, self._doubts, self._tasks, replicas
            )
        return line

    @property
    def stored(self) -> Counter[str]:
        """Messages that the server has confirmed, by topic."""
        return sum((line.stored for line in tuple(self._lines.values())), Counter())

    @property
    def failed(self) -> Counter[str]:
        """Messages whose publish ended with an error after they were written or had waited, by topic."""
        return sum((line.failed for line in tuple(self._lines.values())), Counter())

    def __repr__(self) -> str:
        return f"<Producer {'running' if self._tasks else 'not running'} lines={list(self._lines.values())}>"


def check_message_id(message_id: str) -> str:
    """A given message id, or ConfigError: it becomes part of a key."""
    if not isinstance(message_id, str) or not 1 <= len(message_id) <= LONGEST_ID or not message_id.isprintable():
        raise ConfigError(f"message_id={message_id!r} is not possible: use 1 to {LONGEST_ID} printable characters")
    return message_id


def due_time(delay: timedelta | None, at: datetime | None) -> str:
    """`+ms` for a delay, to be counted from the server's now; milliseconds since 1970 for a moment."""
    if at is None:
        assert delay is not None
        if not timedelta(0) <= delay <= LONGEST_DELAY:
            raise ConfigError(f"delay={delay} is not possible: use 0 to {LONGEST_DELAY}")
        return f"+{to_ms(delay)}"
    if delay is not None:
        raise ConfigError("give delay or at, not both")
    return str(max(0, epoch_ms(at)))
