"""`rsmq pipeline archive`: topics to Parquet, once or for ever, each message exactly once.

A batch goes to folders of its own (`topic=/date=/batch=`), which it overwrites when it runs again, and then counts by
one record (see `store`). A batch that counts is not read again, even if Spark has forgotten that it is done and the
topic has been trimmed since; and if all of Spark's own state is lost, the archive itself knows where to go on.
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

from rsmq.keys import check_name
from rsmq.pipeline.failure import spoken
from rsmq.pipeline.folder import Folder
from rsmq.pipeline.link import Link
from rsmq.pipeline.offset import NO_ID, Offsets
from rsmq.pipeline.option import read_options
from rsmq.pipeline.store import FOLDERS, Batch, Ends, Store

log = logging.getLogger("rsmq.pipeline")

POLL_SECONDS: Final = 1
DAY_MS: Final = 86_400_000
LAST_DAY: Final = 2_932_896
"""The 31st of December 9999, in days since 1970: as far as a date goes."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to archive. `source` are options of `format("rsmq")`; `every` None: once, what is there now.

    `name` tells archives of one topic apart: retention waits for each of them.
    """

    source: dict[str, str]
    target: str
    name: str = "archive"
    every: timedelta | None = None
    batch: int = 1_000_000
    checkpoint: str | None = None


@dataclass(slots=True)
class Done:
    """What came of it."""

    archive: str
    messages: int = 0
    batches: int = 0
    offsets: Ends = field(default_factory=dict)


def archive(
    spark: SparkSession,
    order: Order,
    on_progress: Callable[[Done], None] = lambda done: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Done:
    """Archive until all is there, or until `is_stopping`. Raises RsmqError."""
    check_name("archive", order.name)
    store = Store(spark, order.target)
    done = Done(store.folder.address)
    with spoken(), Link(read_options(order.source).access) as link:
        query = start(spark, store, order)
        seen = -1
        try:
            while True:
                has_ended = query.awaitTermination(POLL_SECONDS)
                for progress in query.recentProgress:
                    if progress["batchId"] > seen and is_committed(progress):
                        seen = progress["batchId"]
                        count(done, progress)
                        publish(link, order.name, done.offsets)
                        on_progress(done)
                if has_ended or is_stopping():
                    return done
        finally:
            query.stop()


def start(spark: SparkSession, store: Store, order: Order) -> StreamingQuery:
    """The running query."""
    checkpoint = order.checkpoint or f"{store.folder.address}/_rsmq/checkpoints/{order.name}"
    forget(store, Folder(spark, checkpoint))
    known = store.offsets(order.name)
    reader = (
        spark.readStream.format("rsmq")
        .options(**order.source)
        .option("includeHeaders", "true")
        .option("startingOffsets", json.dumps(known, sort_keys=True) if known else "earliest")
        .option("maxOffsetsPerTrigger", str(order.batch))
    )
    every = order.every
    trigger: dict[str, Any] = (
        {"availableNow": True} if every is None else {"processingTime": f"{every.total_seconds()} seconds"}
    )
    return (
        reader.load()
        .writeStream.foreachBatch(Writer(spark, store, order.name, checkpoint))
        .option("checkpointLocation", checkpoint)
        .trigger(**trigger)
        .start()
    )


def forget(store: Store, checkpoint: Folder) -> None:
    """Remove a checkpoint that has lost batches which the archive has: Spark would plan these anew, cut otherwise.

    What it then wrote would take the place of what counts, or be taken for what a compaction has replaced. Without a
    checkpoint a new query goes on where the archive ends.
    """
    if not checkpoint.exists("metadata"):
        return
    query = query_of(checkpoint)
    planned = max((int(item.name) for item in checkpoint.list("offsets") if item.name.isdecimal()), default=-1)
    archived = max((batch.number for batch in store.batches() if batch.query == query), default=-1)
    if planned < archived:
        log.warning(
            "%s knows batches up to %d, the archive has them up to %d: it is removed, and a new query goes on where "
            "the archive ends", checkpoint.address, planned, archived,
        )  # fmt: skip
        checkpoint.delete("")


def query_of(checkpoint: Folder) -> str:
    """The name of a query in the archive, from what Spark has noted of it."""
    return str(json.loads(checkpoint.read("metadata"))["id"]).replace("-", "")[:12]


class Writer:
    """Puts one micro-batch into the archive, unless it is there already."""

    def __init__(self, spark: SparkSession, store: Store, name: str, checkpoint: str) -> None:
        self._store, self._name = store, name
        self._checkpoint = Folder(spark, checkpoint)

    def __call__(self, frame: DataFrame, number: int) -> None:
        query = query_of(self._checkpoint)
        batch = Batch(self._name, query, number, self._ends(number))
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

    def _ends(self, number: int) -> Ends:
        """Where the batch ends, from Spark's own plan of it: a version, metadata, then one line a source."""
        return ends(json.loads(self._checkpoint.read(f"offsets/{number}").splitlines()[2]))


def ends(told: dict[str, Any]) -> Ends:
    """Offsets of the source as stream ids."""
    found: Ends = {}
    for (topic, partition), position in sorted(Offsets.from_json(told).positions.items()):
        found.setdefault(topic, {})[str(partition)] = position.id
    return found


def is_committed(progress: Any) -> bool:
    """Whether it tells of a batch that has run: a trigger that found nothing reports, too."""
    return "addBatch" in progress["durationMs"]


def count(done: Done, progress: Any) -> None:
    """Add one batch. Spark has it in its own log by now."""
    done.messages += progress["numInputRows"]
    done.batches += 1
    done.offsets = ends(json.loads(progress["sources"][0]["endOffset"]))


def publish(link: Link, name: str, offsets: Ends) -> None:
    """Tell retention how far the archive is: not earlier, as Spark might want to read the batch again."""
    for topic, ids in offsets.items():
        for partition, stream_id in ids.items():
            if stream_id != NO_ID:
                link.ask("HSET", link.keys.archived(topic, int(partition)), name, stream_id)
