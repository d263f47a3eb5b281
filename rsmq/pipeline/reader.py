"""Batch reads: the streams as they are when Spark plans, cut into ranges; and what a task does with its range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from rsmq.errors import ConfigError
from rsmq.pipeline.column import Columns, Entry
from rsmq.pipeline.given import Bounds
from rsmq.pipeline.link import Link
from rsmq.pipeline.offset import Range
from rsmq.pipeline.option import ReadOptions
from rsmq.pipeline.survey import Survey, before
from rsmq.stream import EARLIEST, LATEST

FIRST_FETCH: Final = 50
"""Until it is known how large the messages are."""
REPLY_BYTES: Final = 4 << 20
"""What one reply should weigh at most: 5 000 messages of 1 MB would be 5 GB."""


class Reader(DataSourceReader):
    """From `startingOffsets` (default earliest) up to `endingOffsets` (default latest), both fixed at planning."""

    def __init__(self, options: ReadOptions) -> None:
        if options.max_offsets:
            raise ConfigError("maxOffsetsPerTrigger is for readStream: a batch read takes everything up to its end")
        if options.start is not None and options.start.default == LATEST:
            raise ConfigError(
                "startingOffsets=latest reads nothing in a batch read: use earliest, a time, or readStream"
            )
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """The ranges to read, a task each."""
        options = self._options
        with Link(options.access) as link:
            survey = Survey(link, options.selection)
            streams = survey.streams()
            check_bounds(options, {topic for topic, _ in streams})
            ranges = []
            for topic, partition in sorted(streams):
                start, end = (
                    survey.position((topic, partition), (bounds or Bounds(default)).of(topic, partition))
                    for bounds, default in ((options.start, EARLIEST), (options.end, LATEST))
                )
                if before(start.id, end.id) and end.added > start.added:
                    count = end.added - start.added
                    ranges.append(Range(topic, partition, start.id, end.id, count, options.fail_on_data_loss))
            return list(survey.plan(ranges, options.min_partitions))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of a range as Arrow batches."""
        return read_range(self._options, partition)


def check_bounds(options: ReadOptions, topics: set[str]) -> None:
    """Raise ConfigError when offsets are given for a topic that is not read: they would be ignored."""
    for name, bounds in (("startingOffsets", options.start), ("endingOffsets", options.end)):
        for topic, _, _ in () if bounds is None else bounds.by_partition:
            if topic not in topics:
                raise ConfigError(f"{name} names topic {topic!r}, which is not read: {', '.join(sorted(topics))}")


def read_range(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The entries of a range as Arrow batches, then DataLoss if they are not as many as promised.

    A server that is away is waited for, up to `unavailable_timeout`, and the range goes on where it was.
    """
    if not isinstance(partition, Range):
        return  # Spark makes one partition of none
    columns = Columns(partition.topic, partition.partition, include_headers=options.include_headers)
    found = 0
    with Link(options.access) as link:
        key = link.keys.stream(partition.topic, partition.partition)
        after, count = partition.start, min(FIRST_FETCH, options.fetch_size)
        while True:
            entries: list[Entry] = link.ask("XRANGE", key, f"({after}", partition.end, "COUNT", count)
            if entries:
                found += len(entries)
                after = entries[-1][0].decode()
                batch = columns.batch(entries)
                count = next_count(len(entries), batch.nbytes, options.fetch_size)
                yield batch
            if not entries or after == partition.end:
                break
    partition.check(found)


def next_count(entries: int, size: int, most: int) -> int:
    """How many entries to ask for next: as many as fit one reply, by the size of the last ones."""
    return max(1, min(most, REPLY_BYTES * entries // max(1, size)))
