"""Streaming reads: exact offsets, admission by `maxOffsetsPerTrigger`, and `Trigger.AvailableNow`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from rsmq.errors import ConfigError
from rsmq.pipeline.given import Bounds
from rsmq.pipeline.link import Link
from rsmq.pipeline.offset import Offsets, Position, Stream, ranges_between, shares
from rsmq.pipeline.option import ReadOptions
from rsmq.pipeline.reader import check_bounds, read_range
from rsmq.pipeline.survey import Survey
from rsmq.stream import LATEST


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Starts at `startingOffsets` (default latest) and follows its topics, new ones of a pattern from their beginning.

    Spark keeps the offsets in its checkpoint; rsmq keeps nothing, so that reading changes nothing in the server.
    """

    def __init__(self, options: ReadOptions) -> None:
        if options.end is not None:
            raise ConfigError("endingOffsets and endingTimestamp are for read: a stream ends when its query is stopped")
        self._options = options
        self._link: Link | None = None
        self._target: Offsets | None = None

    # -- offsets, in a process of the driver that lives as long as the query --------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query starts."""
        survey, options = self._survey(), self._options
        ends = survey.ends()
        check_bounds(options, set(ends.epochs))
        bounds = Bounds(LATEST) if options.start is None else options.start
        starts = {stream: survey.position(stream, bounds.of(*stream)) for stream in ends.positions}
        return Offsets(ends.epochs, starts).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """`maxOffsetsPerTrigger`."""
        return ReadMaxRows(self._options.max_offsets) if self._options.max_offsets else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Everything up to now, and no more, whatever is published meanwhile."""
        self._target = self._survey().ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes: to the newest entries, or as far as the limit allows."""
        before = Offsets.from_json(start)
        ends = self._survey().ends() if self._target is None else self._target
        if isinstance(limit, ReadMaxRows):
            ends = self._admit(before, ends, limit.max_rows)
        after = merged(before, ends)
        return start if is_same(before, after) else after.to_json()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The newest entries, for the progress of the query."""
        return self._survey().ends().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The ranges between two offsets, a task each."""
        ranges = ranges_between(
            Offsets.from_json(start), Offsets.from_json(end), is_strict=self._options.fail_on_data_loss
        )
        return list(self._survey().plan(ranges, self._options.min_partitions))

    def stop(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.__exit__()
            self._link = None

    # -- data, on the executors -----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of a range as Arrow batches."""
        return read_range(self._options, partition)

    def _survey(self) -> Survey:
        if self._link is None:
            self._link = Link(self._options.access)
        return Survey(self._link, self._options.selection)

    def _admit(self, before: Offsets, ends: Offsets, most: int) -> Offsets:
        """At most so many entries more than `before`, split over the streams by their backlogs."""
        survey = self._survey()
        starts = {stream: start_of(stream, before, ends) for stream in ends.positions}
        backlogs = {stream: end.added - starts[stream].added for stream, end in ends.positions.items()}
        admitted = dict(ends.positions)
        for stream, share in shares(backlogs, most).items():
            if share < backlogs[stream]:
                limited, end = survey.advance(stream, starts[stream], share, survey.state(stream)), admitted[stream]
                if limited.added < end.added:  # not beyond the end, if what was lost has brought it there
                    admitted[stream] = Position(limited.id, limited.added, end.since)
        return Offsets(ends.epochs, admitted)

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_link": None, "_target": None}


def start_of(stream: Stream, before: Offsets, ends: Offsets) -> Position:
    """Where a stream is read from: where the last batch ended, or its beginning if it is new or was made again."""
    end, known = ends.positions[stream], before.positions.get(stream)
    is_other = before.epochs.get(stream[0], ends.epochs[stream[0]]) != ends.epochs[stream[0]]
    if known is None or is_other or end.added < known.added:
        return Position("0-0", end.since)
    return known


def merged(before: Offsets, ends: Offsets) -> Offsets:
    """`ends` as the next offsets: topics that are gone keep their last ones, only new streams say `since`."""
    positions = dict(before.positions)
    for stream, end in ends.positions.items():
        is_new = start_of(stream, before, ends) is not before.positions.get(stream)
        positions[stream] = end if is_new else Position(end.id, end.added)
    return Offsets({**before.epochs, **ends.epochs}, positions)


def is_same(one: Offsets, other: Offsets) -> bool:
    """Whether nothing lies between two offsets."""
    return one.epochs == other.epochs and {
        stream: (position.id, position.added) for stream, position in one.positions.items()
    } == {stream: (position.id, position.added) for stream, position in other.positions.items()}
