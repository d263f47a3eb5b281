"""`rsmq pipeline archive` in one process, without a JVM: for what a machine reads in a while.

The offsets, ranges and counts are those of the source that Spark reads. A batch is first written below
`_rsmq/writing`, then moved into its folders, then committed by one record. The folder below `_rsmq/writing` exists from
before the first file until after the record: if a run finds one, the run before it was killed, and what that one had
moved and not committed is removed. So a batch is in the archive once, wherever the process was killed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import date, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.datasource import ReadMaxRows

from rsmq.model.keys import check_name
from rsmq.pipeline.format.columns import WITH_HEADERS, int64_scalar
from rsmq.pipeline.format.offsets import Offsets, Range, Stream
from rsmq.pipeline.format.options import Access, read_options
from rsmq.pipeline.format.reader import StreamReader, read_range
from rsmq.pipeline.format.selected_streams import SelectedStreams
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.jobs.archive import (
    LAST_DAY,
    ArchiveOptions,
    ArchiveResult,
    gaps_between,
    loss_told,
    parse_ends,
    publish_offsets,
)
from rsmq.pipeline.jobs.archive_store import DAY_MS, ArchivedBatch, Part
from rsmq.pipeline.jobs.arrow_archive import SCHEMA, ArrowArchive, ParquetFile
from rsmq.pipeline.jobs.cancellations import CancellationNotes, known_ends
from rsmq.pipeline.jobs.folder import exclusive
from rsmq.pipeline.spark.errors import spark_errors

WRITING: Final = "_rsmq/writing"
POLL_SECONDS: Final = 0.25
EPOCH: Final = date(1970, 1, 1)


def archive_by_arrow(
    options: ArchiveOptions,
    on_progress: Callable[[ArchiveResult], None] = lambda result: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ArchiveResult:
    """Archive until there is nothing left, or until `is_stopping`. Raises RsmqError, DataLoss for lost messages."""
    check_name("archive", options.name)
    store = ArrowArchive(options.target)
    with (
        loss_told(),
        spark_errors(),
        exclusive(store.folder.address, options.name),
        TaskConnection(access_of(options)) as connection,
    ):
        job = ArrowArchiver(store, options)
        job.remove_leftovers()
        streams = SelectedStreams(connection, job.selection)
        ends = known_ends(store.positions(options.name), streams)
        publish_offsets(connection, options.name, ends)  # the last run may have died before this
        notes = CancellationNotes(store, connection, job.selection, options.name)
        try:
            while True:
                next_round = time.monotonic() + (options.every or timedelta(0)).total_seconds()
                for result in job.round():
                    publish_offsets(connection, options.name, result.offsets)
                    on_progress(result)
                    if is_stopping():
                        return job.result
                notes.note()
                while options.every is not None and not is_stopping() and time.monotonic() < next_round:
                    time.sleep(POLL_SECONDS)
                if options.every is None or is_stopping():
                    return job.result
        finally:
            job.reader.stop()


def access_of(options: ArchiveOptions) -> Access:
    """How the server is reached."""
    return read_options(options.source).access


class ArrowArchiver:
    """One run. `result` counts what it has archived."""

    def __init__(self, store: ArrowArchive, options: ArchiveOptions) -> None:
        self._store, self._options = store, options
        self._query = f"arrow_{options.name}"
        self._source = replace(read_options(options.source_options(store)), columns=tuple(WITH_HEADERS.names))
        self.selection = self._source.selection
        self.reader = StreamReader(self._source)
        self._at: dict[str, Any] | None = None
        self._number = max((each.number for each in store.batches() if each.query == self._query), default=-1) + 1
        self.result = ArchiveResult(store.folder.address)

    def remove_leftovers(self) -> None:
        """Remove what a run that was killed has written and not committed."""
        begun = f"{WRITING}/{self._query}"
        if self._store.folder.exists(begun):
            for part in self._store.parts_of_batch(self._batch, self._store.topics()):
                self._store.folder.delete(part.path)
            self._store.folder.delete(begun)

    def round(self) -> Iterator[ArchiveResult]:
        """Archive what is there now, in batches; the result after each of them."""
        self.reader.prepareForTriggerAvailableNow()
        if self._at is None:
            self._at = self.reader.initialOffset()
        while (end := self.reader.latestOffset(self._at, ReadMaxRows(self._options.batch))) != self._at:
            self._archive(self._at, end)
            self._at = end
            yield self.result

    @property
    def _batch(self) -> str:
        return f"{self._query}-{self._number}"

    def _archive(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Write one batch and commit it."""
        found, days = self._write([each for each in self.reader.partitions(start, end) if isinstance(each, Range)])
        for topic, day in days:
            self._store.folder.move(self._staged(topic, day), Part(topic, day, self._batch).path)
        gaps = gaps_between(Offsets.from_json(start), Offsets.from_json(end), found)
        batch = ArchivedBatch(self._options.name, self._query, self._number, parse_ends(end), end)
        self._store.commit(batch, gaps)
        self._store.folder.delete(f"{WRITING}/{self._query}")
        self._number += 1
        self.result.batches += 1
        self.result.messages += sum(found.values())
        self.result.offsets = batch.offsets
        self.result.gaps += gaps

    def _write(self, ranges: list[Range]) -> tuple[dict[Stream, int], list[tuple[str, date]]]:
        """Write the entries of the ranges: one file for each topic and day. Returns the counts and the days."""
        found: Counter[Stream] = Counter()
        files: dict[tuple[str, date], ParquetFile] = {}
        folder = self._store.folder
        with ExitStack() as opened:
            for each in ranges:
                for rows in read_range(self._source, each):
                    found[each.topic, each.partition] += len(rows)
                    for day, of_day in by_day(rows):
                        file = files.get((each.topic, day))
                        if file is None:
                            path = f"{self._staged(each.topic, day)}/part-00000.parquet"
                            file = files[each.topic, day] = opened.enter_context(ParquetFile(folder, path))
                        file.write(of_day.select(SCHEMA.names))
        return found, list(files)

    def _staged(self, topic: str, day: date) -> str:
        return f"{WRITING}/{self._query}/{topic}/{day.isoformat()}"


def by_day(rows: pa.RecordBatch) -> Iterator[tuple[date, pa.RecordBatch]]:
    """The rows of each day (UTC, by the stream id). Ids rise, so a batch of one stream is nearly always one day."""
    days = pc.min_element_wise(pc.divide(rows.column("id_ms"), int64_scalar(DAY_MS)), int64_scalar(LAST_DAY))
    for number in days.unique():
        chosen = rows.filter(pc.equal(days, number))
        yield EPOCH + timedelta(days=number.as_py()), chosen
