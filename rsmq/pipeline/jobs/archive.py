"""`rsmq pipeline archive`: topics to Parquet, one run or continuously, each message exactly once.

A batch is written to folders of its own (`topic=/date=/batch=`), which it overwrites when it runs again. Then one
record commits it (see `archive_store`). A committed batch is not written again, even if Spark has forgotten it and the
topic has been trimmed since. If all of Spark's state is lost, the archive itself knows where to continue.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from rsmq.model.keys import check_name
from rsmq.pipeline.format.offsets import NO_ID, Offsets
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.jobs.archive_store import DAY_MS, FOLDERS, ArchivedBatch, ArchiveStore, Ends, Folder
from rsmq.pipeline.spark.errors import spark_errors

log = logging.getLogger("rsmq.pipeline")

POLL_SECONDS: Final = 1
LAST_DAY: Final = 2_932_896
"""The 31st of December 9999, in days since 1970: the last day that a date can hold."""


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """The options of an archive job. `source`: options of `format("rsmq")`. `every` None: what is there now, then stop.

    `name` tells several archives of one topic apart: retention waits for each of them.
    """

    source: dict[str, str]
    target: str
    name: str = "archive"
    every: timedelta | None = None
    batch: int = 1_000_000
    checkpoint: str | None = None


@dataclass(slots=True)
class ArchiveResult:
    """The result of one run. `offsets`: how far each partition is archived."""

    archive: str
    messages: int = 0
    batches: int = 0
    offsets: Ends = field(default_factory=dict)


def archive(
    spark: SparkSession,
    options: ArchiveOptions,
    on_progress: Callable[[ArchiveResult], None] = lambda result: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ArchiveResult:
    """Archive until there is nothing left, or until `is_stopping`. Raises RsmqError."""
    check_name("archive", options.name)
    store = ArchiveStore(spark, options.target)
    result = ArchiveResult(store.folder.address)
    with spark_errors(), TaskConnection(read_options(options.source).access) as connection:
        query = start_query(spark, store, options)
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
                        publish_offsets(connection, options.name, result.offsets)
                        on_progress(result)
                if has_ended or is_stopping():
                    return result
        finally:
            query.stop()


def start_query(spark: SparkSession, store: ArchiveStore, options: ArchiveOptions) -> StreamingQuery:
    """Start the streaming query that archives."""
    checkpoint = options.checkpoint or f"{store.folder.address}/_rsmq/checkpoints/{options.name}"
    remove_stale_checkpoint(store, Folder(spark, checkpoint))
    archived = store.offsets(options.name)
    every = options.every
    trigger: dict[str, Any] = (
        {"availableNow": True} if every is None else {"processingTime": f"{every.total_seconds()} seconds"}
    )
    return (
        spark.readStream.format("rsmq")
        .options(**options.source)
        .option("includeHeaders", "true")
        .option("startingOffsets", json.dumps(archived, sort_keys=True) if archived else "earliest")
        .option("maxOffsetsPerTrigger", str(options.batch))
        .load()
        .writeStream.foreachBatch(MicroBatchWriter(spark, store, options.name, checkpoint))
        .option("checkpointLocation", checkpoint)
        .trigger(**trigger)
        .start()
    )


def remove_stale_checkpoint(store: ArchiveStore, checkpoint: Folder) -> None:
    """Remove a checkpoint that lacks batches of the archive, such as one restored from an old copy.

    Spark would plan these batches again, with other ends. What it then wrote would overwrite committed data, or be
    ignored as replaced by a compaction. Without a checkpoint a new query continues where the archive ends.
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


def query_name(checkpoint: Folder) -> str:
    """The name of a query in the archive: the id that Spark gave it, shortened."""
    return str(json.loads(checkpoint.read("metadata"))["id"]).replace("-", "")[:12]


class MicroBatchWriter:
    """Writes one micro-batch into the archive, unless it is committed already."""

    def __init__(self, spark: SparkSession, store: ArchiveStore, name: str, checkpoint: str) -> None:
        self._store, self._name = store, name
        self._checkpoint = Folder(spark, checkpoint)

    def __call__(self, frame: DataFrame, number: int) -> None:
        query = query_name(self._checkpoint)
        plan = self._checkpoint.read(f"offsets/{number}").splitlines()  # a version, metadata, a line for each source
        batch = ArchivedBatch(self._name, query, number, parse_ends(json.loads(plan[2])))
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
        self._store.commit(batch)


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
