"""Messages into topics: grouped by partition, one script call for a batch, one sink for each kind of idempotence.

none: at least once. id: under the original stream ids, into a topic without other writers. marker: the last source
position is stored with the messages, exactly once into a live topic. dedupe: once per message id within a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from rsmq.errors import ConfigError, TooLarge, TopicFull
from rsmq.model.clock import to_ms
from rsmq.model.layout import Block
from rsmq.pipeline.format.options import WriteOptions
from rsmq.pipeline.format.row_encoding import RowEncoder, encoded_entry, payload_size
from rsmq.pipeline.format.rows import bytes_column, entries_from, group_by_column, required_column, source_positions
from rsmq.pipeline.format.task_bodies import TaskBodies
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.scripts import PUBLISH_MARKED, PUBLISH_MESSAGES, PUBLISH_UNSEEN, RESTORE_MESSAGES, Script, Value
from rsmq.redis.topics import Topic

MAX_CALL_BYTES: Final = 4 << 20
MAX_CALL_MESSAGES: Final = 500
MAX_ID_BYTES: Final = 256
DIGEST: Final = 8
CALLS_PER_SECOND: Final = 4
"""At a rate, each call is small: messages arrive evenly, not in bursts."""
MAX_CATCH_UP_SECONDS: Final = 1.0
"""A task that was idle may exceed its rate to catch up with this much time."""

MAX_HOMES: Final = 100_000
"""Keys that a sink remembers between two flushes."""

BytesColumn = list[bytes | None] | None
"""A column of bytes; None if the batch has no such column."""

MarkKey = tuple[str, int, str]
"""Target topic and partition, and the source of the messages: each has one mark."""


@dataclass
class TaskResult(WriterCommitMessage):
    """The result of one task: messages stored, messages that were there already, and the marks it moved (marker only).

    The marks of inboxes are those of `devices`: a digest of each.
    """

    stored: int = 0
    skipped: int = 0
    marks: set[MarkKey] = field(default_factory=set)
    devices: bytes = b""


class WriteRate:
    """Limits a task to `rate` messages a second; None: no limit. Call `wait` before a write and `spend` after it.

    Messages that were stored by an earlier run cost nothing, so a job that is run again soon reaches where it stopped.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = time.monotonic()
        self.max_messages = MAX_CALL_MESSAGES
        if rate is not None:
            self.max_messages = max(1, min(MAX_CALL_MESSAGES, round(rate / CALLS_PER_SECOND)))

    def wait(self) -> None:
        """Sleep until the next message is due."""
        if self._rate is not None:
            time.sleep(max(0.0, self._due - time.monotonic()))

    def spend(self, count: int) -> None:
        """Count stored messages."""
        if self._rate is not None:
            self._due = max(self._due, time.monotonic() - MAX_CATCH_UP_SECONDS) + count / self._rate


class PartitionBatch:
    """Messages of one source for one partition, as the arguments of one script call."""

    __slots__ = ("args", "count", "ids", "partition", "source", "topic")

    def __init__(self, topic: Topic, partition: int, source: str) -> None:
        self.topic = topic
        self.partition = partition
        self.source = source
        self.clear()

    def clear(self) -> None:
        """Empty it for the next messages."""
        self.args: list[Value] = []
        self.ids: list[str] = []
        self.count = 0


class TopicSink:
    """Writes the rows of one task into topics. `find_topic` returns a topic, and creates it if it does not exist."""

    script: ClassVar[Script]
    needs: ClassVar[tuple[str, ...]] = ()
    """Columns that the rows must have."""
    sends_ids: ClassVar[bool] = False
    """Whether the script call takes the message id of each row."""
    needs_open_band: ClassVar[bool] = False
    """Whether a row must come to the same partition when it is written again: not to `normal` first, then to a band."""

    def __init__(self, connection: TaskConnection, options: WriteOptions, find_topic: Callable[[str], Topic]) -> None:
        self._connection = connection
        self._options = options
        self._find_topic = cache(find_topic)
        self._payload_limit = int(connection.settings.payload_limit)
        self._bodies: TaskBodies | None = None
        self._encoder = RowEncoder(connection, options.encode)
        self._throttle = WriteRate(options.rate)
        self._batches: dict[MarkKey, PartitionBatch] = {}
        self._last_positions: dict[tuple[str, str], str] = {}
        self.result = TaskResult()

    def put(self, batch: pa.RecordBatch) -> None:
        """Add the rows of an Arrow batch, and send every partition's batch that is full."""
        if not batch.num_rows:
            return
        largest = pc.max(pc.binary_length(batch.column("value"))).as_py() or 0
        self._check_size(largest)
        if self._options.topic is not None:
            self._put_into(self._find_topic(self._options.topic), batch)
            return
        for name, rows in group_by_column(batch, "topic"):
            if name is None:
                raise ConfigError('a row names no topic: set the option "topic", or fill the column')
            self._put_into(self._find_topic(name), rows)

    def _check_size(self, largest: int) -> None:
        """Open the store of bodies for a payload that an entry may not have. Raises TooLarge without one."""
        if largest > self._payload_limit and self._bodies is None:
            self._bodies = TaskBodies.of(self._connection)
            if self._bodies is None:
                raise TooLarge(largest, self._payload_limit)

    def flush(self) -> None:
        """Send all batches."""
        for batch in self._batches.values():
            self._send(batch)

    def _put_into(self, topic: Topic, batch: pa.RecordBatch) -> None:
        """Add the rows for one topic."""
        self._append(topic, "", batch)

    def _append(self, topic: Topic, source: str, batch: pa.RecordBatch, prefixes: list[Any] | None = None) -> None:
        """Put each row into the batch of its partition, behind its prefix; send those that are full."""
        keys, ids = bytes_column(batch, "key"), bytes_column(batch, "id")
        entries = entries_from(batch, keys, ids)
        if (encoding := self._encoder.of_topic(topic)) is not None:
            entries = [encoded_entry(entry, encoding) for entry in entries]
            self._check_size(max(map(payload_size, entries)))
        targets = self._targets(topic, batch, keys, ids)
        full = min(self._throttle.max_messages, max(1, MAX_CALL_BYTES * batch.num_rows // max(1, batch.nbytes)))
        batches = {}
        for target in set(targets):
            empty = PartitionBatch(topic, target, source)
            batches[target] = self._batches.setdefault((topic.name, target, source), empty)
        for number, (target, entry) in enumerate(zip(targets, entries, strict=True)):
            filling = batches[target]
            if prefixes is not None:
                filling.args.append(prefixes[number])
            if self.sends_ids:
                filling.ids.append(dedupe_id(ids, number))
            filling.args += (
                entry if self._bodies is None else self._bodies.stored(topic.name, entry, self._payload_limit)
            )
            filling.count += 1
            if filling.count >= full:
                self._send(filling)

    def _targets(self, topic: Topic, batch: pa.RecordBatch, keys: BytesColumn, ids: BytesColumn) -> list[int]:
        """The partition of each row: by its key; without one its source partition, else by its id, else in turn."""
        count = batch.num_rows
        origins: list[int | None] = (
            batch.column("partition").to_pylist() if "partition" in batch.schema.names else [None] * count
        )
        turns = self._turns(batch)
        if topic.layout.is_resized:
            turns = list(turns)
            origins = [follow(topic, *row) for row in zip(origins, ids or [None] * count, turns, strict=True)]
        rows = zip(keys or [None] * count, ids or [None] * count, origins, turns, strict=True)
        bands = None if self._options.band is not None else bytes_column(batch, "band")
        if bands is not None:
            blocks = {each: self._block(topic, None if each is None else each.decode()) for each in {*bands}}
            return [choose_partition(*row, blocks[band]) for row, band in zip(rows, bands, strict=True)]
        block = self._block(topic, self._options.band)
        if keys is not None and None not in keys:
            return [block.partition_for(key) for key in keys if key is not None]
        if keys is None and all(origin in block.numbers for origin in {*origins}):
            return origins  # type: ignore[return-value]  # none of them is None
        return [choose_partition(*row, block) for row in rows]

    def _block(self, topic: Topic, band: str | None) -> Block:
        """The partitions of a band. Raises ConfigError while they may become others, or if there is none."""
        if band is not None and band not in topic.layout.bands:
            raise ConfigError(
                f"rows are for band {band!r}, and the bands of topic {topic.name!r} are "
                f"{', '.join(topic.layout.bands)}: add it with `rsmq topic set {topic.name} --bands ...`, or store all "
                f"rows in one band, with the option band (for `rsmq pipeline replay`: --band normal)"
            )
        block = topic.open_block(band)
        if self.needs_open_band and band is not None and block.band != band:
            raise ConfigError(
                f"band {band!r} is not open yet: with idempotence={self._options.idempotence} a row that is stored in "
                f"the band normal now would be stored again later. Write again when it is open: see "
                f"`rsmq topic show {topic.name}`"
            )
        return block

    def _turns(self, batch: pa.RecordBatch) -> Iterable[int]:
        """A number for each row, which decides its partition if nothing in the row does."""
        return range(batch.num_rows)

    def _send(self, batch: PartitionBatch) -> None:
        """Make one script call, repeated while the server is away."""
        if batch.count:
            stream = self._connection.keys.stream(batch.topic.name, batch.partition)
            keys, args = self._extra_arguments(batch)
            limits: list[Value] = [batch.topic.max_length, batch.topic.on_full]
            before = self.result.stored
            self._throttle.wait()
            reply = self._connection.run(self.script, [stream, *keys], [*limits, *args, *batch.args])
            self._count(batch, reply)
            self._throttle.spend(self.result.stored - before)
            batch.clear()

    def _extra_arguments(self, batch: PartitionBatch) -> tuple[list[str], list[Value]]:
        """The keys besides the stream, and the arguments between the limits and the messages."""
        return [], []

    def _count(self, batch: PartitionBatch, reply: Any) -> None:
        """Count what the script stored. Raises TopicFull if there was not enough room."""
        word, stored, skipped = reply[:3]
        self.result.stored += stored
        self.result.skipped += skipped
        if word != b"OK":
            self._refused(batch, reply)

    def _refused(self, batch: PartitionBatch, reply: Any) -> None:
        raise TopicFull(batch.topic.name, batch.partition, batch.topic.max_length)


class AppendSink(TopicSink):
    """At least once: a task that runs again appends again."""

    script = PUBLISH_MESSAGES

    def _count(self, batch: PartitionBatch, reply: Any) -> None:
        stored, _ = reply
        super()._count(batch, (b"OK" if stored == batch.count else b"FULL", stored, 0))


class RestoreSink(TopicSink):
    """Under the original stream ids and in the original partitions: the ids themselves make it idempotent."""

    script = RESTORE_MESSAGES
    needs = ("partition", "id_ms", "id_seq")

    def _put_into(self, topic: Topic, batch: pa.RecordBatch) -> None:
        for _, rows in group_by_column(batch, "partition"):
            ms, seq = (required_column(rows, name).to_pylist() for name in ("id_ms", "id_seq"))
            self._append(topic, "", rows, [f"{first}-{second}" for first, second in zip(ms, seq, strict=True)])

    def _targets(self, topic: Topic, batch: pa.RecordBatch, keys: BytesColumn, ids: BytesColumn) -> list[int]:
        partition = required_column(batch, "partition")[0].as_py()
        if partition not in topic.numbers:
            raise ConfigError(
                f"idempotence=id restores partition {partition}, but topic {topic.name!r} has {len(topic.numbers)} "
                f"partitions: create it with as many as the original, and with its bands"
            )
        return [partition] * batch.num_rows

    def _refused(self, batch: PartitionBatch, reply: Any) -> None:
        if reply[0] == b"FOREIGN":
            raise ConfigError(
                f"{batch.topic.name}.{batch.partition} has newer entries than {reply[3].decode()}, but not this one: "
                f"idempotence=id needs an empty topic and rows sorted by id_ms, id_seq within a partition in one task"
            )
        super()._refused(batch, reply)


class MarkerSink(TopicSink):
    """Exactly once: rows up to the mark that the job stored with its last message are not appended again.

    This needs all rows of one source (`topic`, `partition`) in one task, in rising order of (`id_ms`, `id_seq`). Rows
    out of order are refused here; a source that came through two tasks is refused at the commit.
    """

    script = PUBLISH_MARKED
    needs = ("id_ms", "id_seq")
    needs_open_band = True

    def __init__(self, connection: TaskConnection, options: WriteOptions, find_topic: Callable[[str], Topic]) -> None:
        super().__init__(connection, options, find_topic)
        self._homes: dict[tuple[str, bytes], tuple[str, int]] = {}

    def _put_into(self, topic: Topic, batch: pa.RecordBatch) -> None:
        has_source = {"topic", "partition"} <= set(batch.schema.names)
        for rows in self._in_order(topic.name, batch) if has_source else [batch]:
            self._put_sources(topic, rows, has_source)

    def _in_order(self, target: str, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows, cut where a key comes from another partition than before, as in a topic that was resized. All that
        waits is sent before such a row: the messages of each source wait apart."""
        keys = bytes_column(batch, "key")
        sources = zip(batch.column("topic").to_pylist(), batch.column("partition").to_pylist(), strict=True)
        start, homes = 0, self._homes
        for number, (key, source) in enumerate(zip(keys, sources, strict=True)) if keys is not None else ():
            if key is None or homes.setdefault((target, key), source) == source:
                continue
            yield batch.slice(start, number - start)
            self.flush()
            homes.clear()
            homes[target, key], start = source, number
        yield batch.slice(start)
        if len(homes) > MAX_HOMES:
            self.flush()
            homes.clear()

    def _put_sources(self, topic: Topic, batch: pa.RecordBatch, has_source: bool) -> None:
        """Add rows of one or more sources."""
        if not batch.num_rows:
            return
        for name, of_topic in group_by_column(batch, "topic") if has_source else ((None, batch),):
            for number, rows in group_by_column(of_topic, "partition") if has_source else ((None, of_topic),):
                source = "" if name is None or number is None else f"{name}.{number}"
                self._append(topic, source, rows, self._positions(topic.name, source, rows))

    def _positions(self, topic: str, source: str, rows: pa.RecordBatch) -> list[str]:
        """The source position of each row. Raises ConfigError unless they rise."""
        column = source_positions(rows)
        found: list[str] = column.to_pylist()
        before = self._last_positions.get((topic, source), "")
        if found[0] <= before or not pc.all(pc.less(column[:-1], column[1:]), min_count=0).as_py():
            raise ConfigError(
                f"idempotence=marker: the rows {f'of {source} ' if source else ''}are out of order. Bring each source "
                f"into one task, .repartition('topic', 'partition'), and sort it there, "
                f".sortWithinPartitions('topic', 'partition', 'id_ms', 'id_seq')"
            )
        self._last_positions[topic, source] = found[-1]
        return found

    def _turns(self, batch: pa.RecordBatch) -> Iterable[int]:
        """By source position: a repeated row goes to the partition that has its mark."""
        ms, seq = (required_column(batch, name).to_pylist() for name in ("id_ms", "id_seq"))
        return map(sum, zip(ms, seq, strict=True))

    def _extra_arguments(self, batch: PartitionBatch) -> tuple[list[str], list[Value]]:
        name, numbers = batch.topic.name, (batch.partition, *batch.topic.layout.ancestors_of(batch.partition))
        jobs = [self._connection.keys.jobs(name, number) for number in numbers]
        return jobs, [f"{self._options.job_id}|{batch.source}"]

    def _count(self, batch: PartitionBatch, reply: Any) -> None:
        self.result.marks.add((batch.topic.name, batch.partition, batch.source))
        super()._count(batch, reply)


class DedupeSink(TopicSink):
    """Once per message id within a window."""

    script = PUBLISH_UNSEEN
    needs = ("id",)
    sends_ids = True
    needs_open_band = True

    def _extra_arguments(self, batch: PartitionBatch) -> tuple[list[str], list[Value]]:
        keys, name, partition = self._connection.keys, batch.topic.name, batch.topic.layout.root_of(batch.partition)
        return [keys.dedup(name, partition, each) for each in batch.ids], [to_ms(self._options.dedupe_window)]


SINKS: Final[dict[str, type[TopicSink]]] = {
    "none": AppendSink, "id": RestoreSink, "marker": MarkerSink, "dedupe": DedupeSink,
}  # fmt: skip


def follow(topic: Topic, origin: int | None, message_id: bytes | None, turn: int) -> int | None:
    """The source partition of a row, or the one that follows it in a resize of the target: so a repeated row goes where
    the mark of its first one is found."""
    if origin is None or not topic.layout.is_sealed(origin):
        return origin
    return topic.layout.partition_after(origin, str(turn) if message_id is None else message_id)


def choose_partition(key: bytes | None, message_id: bytes | None, origin: int | None, turn: int, block: Block) -> int:
    """The partition of one row."""
    if key is not None:
        return block.partition_for(key)
    if origin is not None and origin in block.numbers:
        return origin
    return block.numbers[turn % block.count] if message_id is None else block.partition_for(message_id)


def dedupe_id(ids: BytesColumn, number: int) -> str:
    """The message id of a row, as part of a key."""
    found = None if ids is None else ids[number]
    if not found or len(found) > MAX_ID_BYTES:
        raise ConfigError(
            f"idempotence=dedupe needs a message id of 1 to {MAX_ID_BYTES} bytes in column 'id' of every row"
        )
    return found.decode()
