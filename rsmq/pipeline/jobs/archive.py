"""`rsmq pipeline archive`: topics to Parquet, one run or continuously, each message exactly once.

A batch is written to folders of its own (`topic=/date=/batch=`). Then one record commits it (see `archive_store`). The
archive itself knows where to continue, with the count of entries: what is lost before it was archived is an error, or,
with `accepts_loss`, a record in the archive.

`archive` does it by Spark, `archive_by_arrow` in this process (see there). They write the same files and records, and
one continues where the other has ended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from rsmq.model.clock import now_ms
from rsmq.model.keys import check_name
from rsmq.pipeline.format.offsets import GO_ON, NEW_QUERY, NO_ID, DataLoss, Offsets, Stream, ranges_between
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.format.selected_streams import is_before
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.jobs.archive_store import DAY_MS, FOLDERS, ArchivedBatch, ArchiveStore, Ends, Gap
from rsmq.pipeline.jobs.cancellations import CancellationNotes
from rsmq.pipeline.jobs.folder import Folder, exclusive
from rsmq.pipeline.jobs.hadoop_folder import HadoopFolder
from rsmq.pipeline.jobs.spark_archive import SparkArchive
from rsmq.pipeline.spark.errors import spark_errors

log = logging.getLogger("rsmq.pipeline")

POLL_SECONDS: Final = 1
LAST_DAY: Final = 2_932_896
"""The 31st of December 9999, in days since 1970: the last day that a date can hold."""


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """The options of an archive job. `source`: options of `format("rsmq")`. `every` None: what is there now, then stop.

    `name` tells several archives of one topic apart: retention waits for each of them. `accepts_loss`: what is lost
    before it was archived is recorded, and the archive goes on; otherwise DataLoss is raised.
    """

    source: dict[str, str]
    target: str
    name: str = "archive"
    every: timedelta | None = None
    batch: int = 1_000_000
    checkpoint: str | None = None
    accepts_loss: bool = False

    def source_options(self, store: ArchiveStore) -> dict[str, str]:
        """The options of the read: all columns, from where the archive ends. Bodies that lie in a store end with their
        entries, so the archive has its own."""
        return (
            {"decode": "bodies"}
            | self.source
            | {
                "includeHeaders": "true",
                "startingOffsets": starting_offsets(store, self.name),
                "failOnDataLoss": "false" if self.accepts_loss else "true",
            }
        )


@dataclass(slots=True)
class ArchiveResult:
    """The result of one run. `offsets`: how far each partition is archived. `gaps`: what was lost, and is recorded."""

    archive: str
    messages: int = 0
    batches: int = 0
    offsets: Ends = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """How many messages are in the gaps."""
        return sum(gap.missing for gap in self.gaps)


def archive(
    spark: SparkSession,
    options: ArchiveOptions,
    on_progress: Callable[[ArchiveResult], None] = lambda result: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ArchiveResult:
    """Archive until there is nothing left, or until `is_stopping`. Raises RsmqError, DataLoss for lost messages."""
    check_name("archive", options.name)
    store = SparkArchive(spark, options.target)
    result = ArchiveResult(store.folder.address)
    with (
        loss_told(),
        spark_errors(),
        exclusive(store.folder.address, options.name),
        TaskConnection(read_options(options.source).access) as connection,
    ):
        notes = CancellationNotes(store, connection, read_options(options.source).selection, options.name)
        writer = MicroBatchWriter(store, options)
        query = start_query(store, options, writer)
        newest = -1
        try:
            while True:
                has_ended = query.awaitTermination(POLL_SECONDS)
                for progress in query.recentProgress:
                    # a trigger that found nothing reports, too: it added no batch
                    if progress["batchId"] > newest and "addBatch" in progress["durationMs"]:
                        newest = progress["batchId"]
                        result.messages += progress["numInputRows"]
                        result.batches += 1
                        result.offsets = parse_ends(json.loads(progress["sources"][0]["endOffset"]))
                        result.gaps = writer.gaps
                        publish_offsets(connection, options.name, result.offsets)
                        on_progress(result)
                        notes.note()
                if has_ended or is_stopping():
                    notes.note()
                    return result
        finally:
            query.stop()


@contextmanager
def loss_told() -> Iterator[None]:
    """Name the ways out that this command has when messages are missing."""
    try:
        yield
    except DataLoss as error:
        text = str(error).replace(GO_ON, "run it with --accept-loss: it records the gap in the archive and goes on")
        raise DataLoss(text.replace(NEW_QUERY, "Use another --name")) from None


def starting_offsets(store: ArchiveStore, name: str) -> str:
    """Where an archive continues, as an option of the source: with counts, where its records have them."""
    known = store.positions(name)
    saved: dict[str, Any] = known.to_json()
    for topic, ids in store.offsets(name).items():
        for number, stream_id in ids.items():
            if (topic, int(number)) not in known.positions:
                saved.setdefault(topic, {})[number] = stream_id
    return json.dumps(saved, sort_keys=True) if saved else "earliest"


def start_query(store: SparkArchive, options: ArchiveOptions, writer: MicroBatchWriter) -> StreamingQuery:
    """Start the streaming query that archives."""
    remove_stale_checkpoint(store, options.name, writer.checkpoint)
    every = options.every
    trigger: dict[str, Any] = (
        {"availableNow": True} if every is None else {"processingTime": f"{every.total_seconds()} seconds"}
    )
    return (
        store.spark.readStream.format("rsmq")
        .options(**options.source_options(store))
        .option("maxOffsetsPerTrigger", str(options.batch))
        .load()
        .writeStream.foreachBatch(writer)
        .option("checkpointLocation", writer.checkpoint.address)
        .trigger(**trigger)
        .start()
    )


def remove_stale_checkpoint(store: ArchiveStore, name: str, checkpoint: Folder) -> None:
    """Remove a checkpoint that lacks batches of the archive: restored from an old copy, or archived by Arrow since.

    Spark would plan these batches again, with other ends. What it then wrote would overwrite committed data, be there
    twice, or be ignored as replaced by a compaction. Without a checkpoint a new query continues where the archive ends.
    """
    if not checkpoint.exists("metadata"):
        return
    query = query_name(checkpoint)
    planned = max((int(item.name) for item in checkpoint.list("offsets") if item.name.isdecimal()), default=-1)
    archived = max((batch.number for batch in store.batches() if batch.query == query), default=-1)
    if planned < archived:
        log.warning(
            "%s ends at batch %d, the archive at batch %d: the checkpoint is removed, and a new query continues where "
            "the archive ends", checkpoint.address, planned, archived,
        )  # fmt: skip
        checkpoint.delete("")
    elif planned >= 0 and is_ahead(store.offsets(name), parse_ends(planned_offsets(checkpoint, planned))):
        log.info("another run has archived more than %s has planned: a new query continues", checkpoint.address)
        checkpoint.delete("")


def is_ahead(one: Ends, other: Ends) -> bool:
    """Whether `one` is further than `other` in any partition."""
    return any(
        is_before(other.get(topic, {}).get(number, NO_ID), stream_id)
        for topic, ids in one.items()
        for number, stream_id in ids.items()
    )


def planned_offsets(checkpoint: Folder, number: int) -> dict[str, Any]:
    """The end of a batch that Spark has planned, as offsets of the source."""
    lines = checkpoint.read(f"offsets/{number}").splitlines()  # a version, metadata, a line for each source
    found: dict[str, Any] = json.loads(lines[2])
    return found


def query_name(checkpoint: Folder) -> str:
    """The name of a query in the archive: the id that Spark gave it, shortened."""
    return str(json.loads(checkpoint.read("metadata"))["id"]).replace("-", "")[:12]


class MicroBatchWriter:
    """Writes one micro-batch into the archive, unless it is committed already."""

    def __init__(self, store: SparkArchive, options: ArchiveOptions) -> None:
        self._store, self._options = store, options
        self._before = store.positions(options.name)
        path = options.checkpoint or f"{store.folder.address}/_rsmq/checkpoints/{options.name}"
        self.checkpoint = HadoopFolder(store.spark, path)
        self.gaps: list[Gap] = []

    def __call__(self, frame: DataFrame, number: int) -> None:
        query = query_name(self.checkpoint)
        plan = planned_offsets(self.checkpoint, number)
        batch = ArchivedBatch(self._options.name, query, number, parse_ends(plan), plan)
        if batch in self._store.batches():
            return
        days = F.least((F.col("id_ms") / DAY_MS).cast("int"), F.lit(LAST_DAY))
        (
            frame.withColumns({"date": F.date_from_unix_date(days), "batch": F.lit(f"{query}-{number}")})
            .write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .option("compression", "zstd")
            .partitionBy(*FOLDERS)
            .parquet(self._store.folder.address)
        )
        gaps = self._missing(f"{query}-{number}", number, Offsets.from_json(plan)) if self._options.accepts_loss else []
        self._store.commit(batch, gaps, is_repeated=True)
        self.gaps += gaps

    def _missing(self, batch: str, number: int, end: Offsets) -> list[Gap]:
        """What a batch lacks of what it should hold."""
        is_later = self.checkpoint.exists(f"offsets/{number - 1}")
        start = Offsets.from_json(planned_offsets(self.checkpoint, number - 1)) if is_later else self._before
        rows = self._store.read(self._store.parts_of_batch(batch, sorted(end.epochs)))
        counts = {(topic, part): n for topic, part, n in rows.groupBy("topic", "partition").count().collect()}
        return gaps_between(start, end, counts)


def gaps_between(start: Offsets, end: Offsets, found: dict[Stream, int]) -> list[Gap]:
    """The gaps of a batch: `found` messages of each stream, instead of those that its offsets count."""
    gaps = []
    for each in ranges_between(start, end, is_strict=False):
        missing = each.expected - found.get((each.topic, each.partition), 0)
        if missing > 0:
            gaps.append(Gap(each.topic, each.partition, each.start, each.end, each.expected, missing, now_ms()))
    return gaps


def parse_ends(offsets: dict[str, Any]) -> Ends:
    """Offsets of the source as stream ids."""
    ends: Ends = {}
    for (topic, partition), position in sorted(Offsets.from_json(offsets).positions.items()):
        ends.setdefault(topic, {})[str(partition)] = position.id
    return ends


def publish_offsets(connection: TaskConnection, name: str, offsets: Ends) -> None:
    """Tell retention how far the archive is. Called after Spark's commit: before it, Spark may read the batch again."""
    for topic, ids in offsets.items():
        for partition, stream_id in ids.items():
            if stream_id != NO_ID:
                connection.ask("HSET", connection.keys.archived(topic, int(partition)), name, stream_id)
