"""Messages into topics: grouped by stream, one script call for a batch, idempotent in the way that was chosen.

none: at least once. id: under the original stream ids, into a topic that nobody else writes to. marker: the last source
position is kept with the messages, exactly once into a live topic. dedupe: once per message id within a window.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from rsmq.errors import ConfigError, TooLarge, TopicFull
from rsmq.partition import partition_for
from rsmq.pipeline.link import Link
from rsmq.pipeline.option import WriteOptions
from rsmq.pipeline.pace import Pace
from rsmq.pipeline.row import entries_of, parts, texts
from rsmq.script import PUBLISH_MESSAGES, Script, Value
from rsmq.topic import Topic

MOST_BYTES: Final = 4 << 20
LONGEST_ID: Final = 256

Texts = list[bytes | None] | None
"""A column, None if there is none."""

Pair = tuple[str, int, str]
"""Target topic and partition, and the source of the messages."""


@dataclass
class Written(WriterCommitMessage):
    """What a task has done: messages stored, messages that were there before, and the pairs it wrote (marker only)."""

    stored: int = 0
    skipped: int = 0
    pairs: set[Pair] = field(default_factory=set)


class Batch:
    """Messages of one source for one partition, as the arguments of one script call."""

    __slots__ = ("args", "count", "ids", "partition", "source", "topic")

    def __init__(self, topic: Topic, partition: int, source: str) -> None:
        self.topic, self.partition, self.source = topic, partition, source
        self.clear()

    def clear(self) -> None:
        """Ready for the next messages."""
        self.args: list[Value] = []
        self.ids: list[str] = []
        self.count = 0


class Sink(ABC):
    """One task's way into topics. `topic_named` tells what is known of a topic, and makes it if need be."""

    script: ClassVar[Script]
    needs: ClassVar[tuple[str, ...]] = ()
    """Columns without which it cannot work."""
    is_by_id: ClassVar[bool] = False
    """Whether the message id of each row takes part in the call."""

    def __init__(self, link: Link, options: WriteOptions, topic_named: Callable[[str], Topic]) -> None:
        self._link, self._options, self._topic_named = link, options, topic_named
        self._limit = int(link.settings.payload_limit)
        self._pace = Pace(options.rate)
        self._topics: dict[str, Topic] = {}
        self._batches: dict[Pair, Batch] = {}
        self.written = Written()

    def put(self, batch: pa.RecordBatch) -> None:
        """Take the rows of an Arrow batch; whatever fills a batch of ours is sent."""
        if not batch.num_rows:
            return
        self._check_size(batch)
        if self._options.topic is not None:
            self._put_into(self._topic(self._options.topic), batch)
            return
        for name, rows in parts(batch, "topic"):
            if name is None:
                raise ConfigError('a row names no topic: set the option "topic", or fill the column')
            self._put_into(self._topic(name), rows)

    def flush(self) -> None:
        """Send what is left."""
        for batch in self._batches.values():
            self._send(batch)

    def _put_into(self, topic: Topic, batch: pa.RecordBatch) -> None:
        """Rows for one topic."""
        self._append(topic, "", batch)

    def _append(self, topic: Topic, source: str, batch: pa.RecordBatch, prefixes: list[Any] | None = None) -> None:
        """Put each row into the batch of its partition, behind its prefix; send those that are full."""
        keys, ids = texts(batch, "key"), texts(batch, "id")
        entries = entries_of(batch, keys, ids)
        targets = self._targets(topic, batch, keys, ids)
        most = min(self._pace.most, max(1, MOST_BYTES * batch.num_rows // max(1, batch.nbytes)))
        filling = {target: self._batch(topic, target, source) for target in set(targets)}
        for number, (target, entry) in enumerate(zip(targets, entries, strict=True)):
            mine = filling[target]
            if prefixes is not None:
                mine.args.append(prefixes[number])
            if self.is_by_id:
                mine.ids.append(identity(ids, number))
            mine.args += entry
            mine.count += 1
            if mine.count >= most:
                self._send(mine)

    def _targets(self, topic: Topic, batch: pa.RecordBatch, keys: Texts, ids: Texts) -> list[int]:
        """The partition of each row: by its key; without one by its source partition, or its id, or in turn."""
        count, partitions = batch.num_rows, topic.partitions
        if keys is not None and None not in keys:
            return [partition_for(key, partitions) for key in keys if key is not None]
        origins: list[int | None] = (
            batch.column("partition").to_pylist() if "partition" in batch.schema.names else [None] * count
        )
        if keys is None and all(origin is not None and 0 <= origin < partitions for origin in {*origins}):
            return origins  # type: ignore[return-value]  # none of them is None
        rows = zip(keys or [None] * count, ids or [None] * count, origins, self._turns(batch), strict=True)
        return [choose(key, message_id, origin, turn, partitions) for key, message_id, origin, turn in rows]

    def _turns(self, batch: pa.RecordBatch) -> Iterable[int]:
        """A number of each row: what decides its partition if the row itself says nothing."""
        return range(batch.num_rows)

    def _send(self, batch: Batch) -> None:
        """One script call, repeated while the server is away."""
        if batch.count:
            stream = self._link.keys.stream(batch.topic.name, batch.partition)
            keys, head = self._head(batch)
            limits: list[Value] = [batch.topic.max_length, batch.topic.on_full]
            before = self.written.stored
            self._pace.wait()
            reply = self._link.run(self.script, [stream, *keys], [*limits, *head, *batch.args])
            self._read(batch, reply)
            self._pace.spend(self.written.stored - before)
            batch.clear()

    def _head(self, batch: Batch) -> tuple[list[str], list[Value]]:
        """The keys besides the stream, and the arguments between the limits and the messages."""
        return [], []

    def _read(self, batch: Batch, reply: Any) -> None:
        """What the script did. Raises TopicFull when there was no room for all."""
        word, stored, skipped = reply[:3]
        self.written.stored += stored
        self.written.skipped += skipped
        if word != b"OK":
            self._refused(batch, reply)

    def _refused(self, batch: Batch, reply: Any) -> None:
        raise TopicFull(batch.topic.name, batch.partition, batch.topic.max_length)

    def _topic(self, name: str) -> Topic:
        if name not in self._topics:
            self._topics[name] = self._topic_named(name)
        return self._topics[name]

    def _batch(self, topic: Topic, partition: int, source: str) -> Batch:
        pair = (topic.name, partition, source)
        if pair not in self._batches:
            self._batches[pair] = Batch(topic, partition, source)
        return self._batches[pair]

    def _check_size(self, batch: pa.RecordBatch) -> None:
        largest = pc.max(pc.binary_length(batch.column("value"))).as_py()
        if largest is not None and largest > self._limit:
            raise TooLarge(largest, self._limit)


class Append(Sink):
    """At least once: a task that runs again appends again."""

    script = PUBLISH_MESSAGES

    def _read(self, batch: Batch, reply: Any) -> None:
        stored, _ = reply
        super()._read(batch, (b"OK" if stored == batch.count else b"FULL", stored, 0))


def choose(key: bytes | None, message_id: bytes | None, origin: int | None, turn: int, partitions: int) -> int:
    """The partition of one row."""
    if key is not None:
        return partition_for(key, partitions)
    if origin is not None and 0 <= origin < partitions:
        return origin
    return turn % partitions if message_id is None else partition_for(message_id, partitions)


def identity(ids: Texts, number: int) -> str:
    """The message id of a row, as part of a key."""
    found = None if ids is None else ids[number]
    if not found or len(found) > LONGEST_ID:
        raise ConfigError(
            f"idempotence=dedupe needs a message id of 1 to {LONGEST_ID} bytes in column 'id' of every row"
        )
    return found.decode()
