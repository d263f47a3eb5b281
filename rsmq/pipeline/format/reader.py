"""Batch and streaming reads: the driver cuts the streams into ranges, and each task reads one range.

A batch read takes the streams as they are when Spark plans. A streaming read has exact offsets, micro-batches that
`maxOffsetsPerTrigger` limits, and `Trigger.AvailableNow`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from rsmq.errors import ConfigError
from rsmq.pipeline.format.columns import ColumnBuilder, StreamEntry
from rsmq.pipeline.format.offsets import (
    BEHIND,
    NO_ID,
    Offsets,
    Position,
    Range,
    Stream,
    behind,
    ranges_between,
    split_limit,
)
from rsmq.pipeline.format.option_reader import Bounds
from rsmq.pipeline.format.options import ReadOptions
from rsmq.pipeline.format.payloads import PayloadOpener
from rsmq.pipeline.format.plain_errors import plain_errors, plain_rows
from rsmq.pipeline.format.push_down import ReadWindow, read_window
from rsmq.pipeline.format.query_group import QueryGroup
from rsmq.pipeline.format.selected_streams import SelectedStreams, StreamInfo, is_before
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.streams import EARLIEST, LATEST

FIRST_FETCH: Final = 50
"""Entries in the first reply: the size of the messages is not known yet."""
REPLY_BYTES: Final = 4 << 20
"""The aim for the size of one reply: 5 000 messages of 1 MB would be 5 GB."""


class BatchReader(DataSourceReader):
    """From `startingOffsets` (default earliest) up to `endingOffsets` (default latest), both fixed at planning."""

    def __init__(self, options: ReadOptions) -> None:
        limits = {"maxOffsetsPerTrigger": options.max_offsets, "minOffsetsPerTrigger": options.min_offsets}
        for name, value in limits.items():
            if value:
                raise ConfigError(f"{name} is for readStream: a batch read takes everything up to its end")
        if options.group is not None:
            raise ConfigError("group is for readStream: a batch read ends, and nothing has to wait for it")
        if options.start is not None and options.start.default == LATEST:
            raise ConfigError(
                "startingOffsets=latest reads nothing in a batch read: use earliest, a time, or readStream"
            )
        self._options = options

    @plain_errors
    def partitions(self) -> list[InputPartition]:
        """The ranges to read, one task each."""
        return self._ranges(ReadWindow())

    def _ranges(self, window: ReadWindow) -> list[InputPartition]:
        """The ranges that can hold something of a window."""
        options = self._options
        with TaskConnection(options.access) as connection:
            streams = SelectedStreams(connection, options.selection)
            epochs = streams.epochs()
            check_bounds(options, {topic for topic, _ in epochs})
            ranges = []
            for topic, partition in sorted(each for each in epochs if window.contains(*each)):
                start, end = (
                    streams.position((topic, partition), (bounds or Bounds(default)).of(topic, partition))
                    for bounds, default in ((options.start, EARLIEST), (options.end, LATEST))
                )
                if options.needs_start and options.start is not None and options.start.has_times:
                    check_start(options, topic, partition, start, streams.info((topic, partition)))
                if is_before(start.id, end.id) and end.added > start.added:
                    count = end.added - start.added
                    ranges.append(Range(topic, partition, start.id, end.id, count, options.fail_on_data_loss))
            if window.has_ids:
                ranges = [part for each in ranges if (part := streams.cut(each, window)) is not None]
            return list(streams.split_until(ranges, options.min_partitions))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of a range as Arrow batches."""
        return plain_rows(read_range(self._options, partition))


class PushingReader(BatchReader):
    """The same with filters: what cannot match is not read. Spark applies the filters to the rest.

    It is a class of its own because Spark refuses such a reader unless `spark.sql.python.filterPushdown.enabled` is
    set, as `register` does.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._window = ReadWindow()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Note what can match, and leave all filters to Spark, too."""
        self._window = read_window(filters)
        return filters

    @plain_errors
    def partitions(self) -> list[InputPartition]:
        """The ranges to read, one task each."""
        return self._ranges(self._window)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Starts at `startingOffsets` (default latest). A topic that a pattern finds later is read from its beginning.

    Spark stores the offsets in its checkpoint. rsmq stores nothing, so reading changes nothing on the server.
    """

    def __init__(self, options: ReadOptions) -> None:
        if options.end is not None:
            raise ConfigError("endingOffsets and endingTimestamp are for read: a stream ends when its query is stopped")
        self._options = options
        self._connection: TaskConnection | None = None
        self._target: Offsets | None = None
        self._planned: Offsets | None = None
        self._last_trigger: float | None = None
        self._group: QueryGroup | None = None

    # -- offsets, in a process of the driver that lives as long as the query --------------------------------------

    @plain_errors
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The offsets at which a new query starts."""
        streams, options = self._streams(), self._options
        ends = streams.ends()
        check_bounds(options, set(ends.epochs))
        bounds = Bounds(LATEST) if options.start is None else options.start
        saved = bounds.saved
        starts = {
            stream: saved.positions.get(stream) or streams.position(stream, bounds.of(*stream))
            for stream in {**ends.positions, **saved.positions}
        }
        if options.needs_start and bounds.has_times:
            for stream, start in starts.items():
                check_start(options, *stream, start, streams.info(stream))
        return Offsets({**ends.epochs, **saved.epochs}, starts).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """`maxOffsetsPerTrigger`."""
        return ReadMaxRows(self._options.max_offsets) if self._options.max_offsets else ReadAllAvailable()

    @plain_errors
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of the query: everything published up to now."""
        self._target = self._streams().ends()

    @plain_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch: the newest entries, or as far as the limit allows."""
        before = Offsets.from_json(start)
        ends = self._streams().ends() if self._target is None else self._target
        self._join_group(before, ends)
        if self._waits(before, ends):
            return start
        if isinstance(limit, ReadMaxRows):
            ends = self._limited(before, ends, limit.max_rows)
        after = merged(before, ends)
        self._planned = after
        if is_same(before, after):
            return start
        self._last_trigger = time.monotonic()
        return after.to_json()

    @plain_errors
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The newest entries, for the progress of the query, and how far the batch that is planned is behind them."""
        newest = self._streams().ends()
        lag = {} if self._planned is None else {BEHIND: behind(self._planned, newest)}
        return newest.to_json() | lag

    @plain_errors
    def commit(self, end: dict[str, Any]) -> None:
        """Spark has written a batch: what the query has read moves on."""
        if self._group is not None:
            self._group.move(Offsets.from_json(end))

    @plain_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The ranges between two offsets, one task each."""
        ranges = ranges_between(
            Offsets.from_json(start), Offsets.from_json(end), is_strict=self._options.fail_on_data_loss
        )
        return list(self._streams().split_until(ranges, self._options.min_partitions))

    def stop(self) -> None:
        """Leave the group, and close the connection."""
        if self._group is not None:
            self._group.leave()
            self._group = None
        if self._connection is not None:
            self._connection.__exit__()
            self._connection = None

    # -- data, on the executors -----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of a range as Arrow batches."""
        return plain_rows(read_range(self._options, partition))

    def _streams(self) -> SelectedStreams:
        if self._connection is None:
            self._connection = TaskConnection(self._options.access)
        return SelectedStreams(self._connection, self._options.selection)

    def _join_group(self, before: Offsets, ends: Offsets) -> None:
        """With `group`: the query is known on the server, and what it has not read is kept."""
        name = self._options.group
        if name is not None:
            if self._group is None:
                self._streams()
                assert self._connection is not None
                self._group = QueryGroup(self._connection, name)
            self._group.join({stream: start_of(stream, before, ends) for stream in ends.positions})

    def _waits(self, before: Offsets, ends: Offsets) -> bool:
        """Whether there are fewer messages than `minOffsetsPerTrigger`, and `maxTriggerDelay` has not passed. A query
        with an end does not wait."""
        if not self._options.min_offsets or self._target is not None or self._last_trigger is None:
            return False
        backlog = sum(each.expected for each in ranges_between(before, merged(before, ends), is_strict=False))
        has_waited = time.monotonic() - self._last_trigger >= self._options.max_delay.total_seconds()
        return backlog < self._options.min_offsets and not has_waited

    def _limited(self, before: Offsets, ends: Offsets, limit: int) -> Offsets:
        """At most `limit` entries after `before`, split over the streams by their backlogs."""
        streams = self._streams()
        starts = {stream: start_of(stream, before, ends) for stream in ends.positions}
        backlogs = {stream: end.added - starts[stream].added for stream, end in ends.positions.items()}
        positions = dict(ends.positions)
        for stream, count in split_limit(backlogs, limit).items():
            if count < backlogs[stream]:
                limited, end = streams.advance(stream, starts[stream], count, streams.info(stream)), positions[stream]
                if limited.added < end.added:  # lost entries count, too, and may take it beyond the end
                    positions[stream] = Position(limited.id, limited.added, end.since)
        return Offsets(ends.epochs, positions)

    def __getstate__(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("_connection", "_target", "_planned", "_last_trigger", "_group"))
        return {"_options": self._options} | nothing


def check_bounds(options: ReadOptions, topics: set[str]) -> None:
    """Raise ConfigError when offsets are given for a topic that is not read: they would be ignored."""
    for name, bounds in (("startingOffsets", options.start), ("endingOffsets", options.end)):
        for topic, _, _ in () if bounds is None else bounds.by_partition:
            if topic not in topics:
                raise ConfigError(f"{name} names topic {topic!r}, which is not read: {', '.join(sorted(topics))}")


def check_start(options: ReadOptions, topic: str, partition: int, start: Position, info: StreamInfo) -> None:
    """Raise ConfigError if there is no entry at or after a starting time."""
    assert options.start is not None
    bound = options.start.of(topic, partition)
    if bound not in (EARLIEST, LATEST) and start.id == info.last and start.id != bound:
        raise ConfigError(
            f"{topic}.{partition} has no entry at or after the starting time: give an earlier one, or "
            f"startingOffsetsByTimestampStrategy=latest to start with the next entry"
        )


def read_range(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The entries of a range as Arrow batches. Raises DataLoss at the end if there were not as many as expected.

    While the server is away the task waits, up to `unavailable_timeout`, and then continues where it was.
    """
    if not isinstance(partition, Range):
        return  # an empty plan: Spark passes a partition of its own
    stream, found = (partition.topic, partition.partition), 0
    with TaskConnection(options.access) as connection:
        key, cancelled, band = connection.keys.stream(*stream), dict[bytes, str](), None
        streams = SelectedStreams(connection, options.selection)
        if "cancelled" in options.columns:
            cancelled = streams.cancelled(stream, partition.start, partition.end)
        if "band" in options.columns:
            band = streams.band(stream)
        builder = ColumnBuilder(*stream, options.columns, cancelled, band)
        payloads = PayloadOpener(
            options.decode if reads_payloads(options) else "none", stream[0], decoded_limit(connection)
        )
        after, count = partition.start, min(FIRST_FETCH, options.fetch_size)
        while True:
            entries: list[StreamEntry] = connection.page("XRANGE", key, f"({after}", partition.end, count)
            if entries:
                found += len(entries)
                after = entries[-1][0].decode()
                size = 0
                for part in payloads.parts(entries):
                    batch = builder.batch(part)
                    size += batch.nbytes
                    yield batch
                count = next_count(len(entries), size, options.fetch_size)
            if not entries or after == partition.end:
                break
    partition.check(found)


def reads_payloads(options: ReadOptions) -> bool:
    """Whether the rows have payloads."""
    return not options.columns or not {"value", "headers"}.isdisjoint(options.columns)


def decoded_limit(connection: TaskConnection) -> int:
    """RSMQ_DECODED_LIMIT of this machine."""
    return int(connection.settings.decoded_limit)


def next_count(entries: int, size: int, most: int) -> int:
    """How many entries to request next: as many as fit into one reply, by the size of the last ones."""
    return max(1, min(most, REPLY_BYTES * entries // max(1, size)))


def start_of(stream: Stream, before: Offsets, ends: Offsets) -> Position:
    """Where a batch of a stream starts: at the end of the last batch, or at the beginning of a new or recreated one."""
    end, known = ends.positions[stream], before.positions.get(stream)
    is_recreated = before.epochs.get(stream[0], ends.epochs[stream[0]]) != ends.epochs[stream[0]]
    if known is None or is_recreated or end.added < known.added:
        return Position(NO_ID, end.since)
    return known


def merged(before: Offsets, ends: Offsets) -> Offsets:
    """`ends` as the next offsets. Deleted topics keep their last offsets; only new streams have `since`."""
    positions = dict(before.positions)
    for stream, end in ends.positions.items():
        is_new = start_of(stream, before, ends) is not before.positions.get(stream)
        positions[stream] = end if is_new else Position(end.id, end.added)
    return Offsets({**before.epochs, **ends.epochs}, positions)


def is_same(one: Offsets, other: Offsets) -> bool:
    """Whether no entry lies between two offsets."""
    return one.epochs == other.epochs and {
        stream: (position.id, position.added) for stream, position in one.positions.items()
    } == {stream: (position.id, position.added) for stream, position in other.positions.items()}
