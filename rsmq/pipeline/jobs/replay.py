"""`rsmq pipeline replay`: messages of the archive into a topic, also a live one, each exactly once.

A replay is a job with a name. The topic itself stores how far the job is: the script that appends also writes a mark
for each source partition. So a replay may be interrupted and run again, by Spark or by Arrow. Its messages are fixed
when it first runs: those that the archive held then and that pass the filters.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.model.clock import from_epoch_ms, now_ms
from rsmq.model.keys import check_name
from rsmq.model.layout import checked_band
from rsmq.model.stream_id import parse_stream_id
from rsmq.pipeline.format.columns import ALL_GROUPS
from rsmq.pipeline.jobs.archive_store import IDENTITY, ArchiveStore, Ends
from rsmq.pipeline.jobs.spark_archive import SparkArchive, message_bytes
from rsmq.pipeline.spark.errors import filter_rows, spark_errors

REPLAYS: Final = "_rsmq/replays"
Expiry = Literal["shift", "drop", "keep"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a replay. Times are aware; `since` is included, `until` not. `rate`: messages a second, or None.

    `where` is an SQL expression over the columns of the archive, in which `key` and `value` are text. `expiry`: what
    becomes of the moment at which a message expires: it moves by the message's age, is left out, or is kept as it was.
    `with_cancelled`: also what was cancelled or replaced for every group when it was archived. `band`: that of the
    target in which all of it is published; None: each message in the band that it had.
    """

    archive: str
    topics: tuple[str, ...]
    target: str
    since: datetime | None = None
    until: datetime | None = None
    keys: tuple[str, ...] = ()
    where: str | None = field(default=None, repr=False)
    rate: float | None = None
    job: str | None = None
    expiry: Expiry = "shift"
    with_cancelled: bool = False
    band: str | None = None

    @property
    def filters(self) -> dict[str, Any]:
        """The options that decide which messages are replayed, as JSON."""
        return {
            "topics": sorted(self.topics),
            "target": self.target,
            "since": None if self.since is None else self.since.astimezone(UTC).isoformat(),
            "until": None if self.until is None else self.until.astimezone(UTC).isoformat(),
            "keys": sorted(self.keys),
            "where": self.where,
            "expiry": self.expiry,
            "with_cancelled": self.with_cancelled,
            **({} if self.band is None else {"band": self.band}),
        }

    @property
    def sink(self) -> dict[str, str]:
        """The options of the write. Payloads stay as the archive has them."""
        band = {} if self.band is None else {"band": self.band}
        return {"topic": self.target, "idempotence": "marker", "jobId": self.name, "encode": "none", **band}

    @property
    def name(self) -> str:
        """The name of the job; without `job` the same filters give the same name."""
        if self.job is not None:
            return check_name("job", self.job)
        text = json.dumps([self.archive, self.filters], sort_keys=True)
        return f"replay-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class TopicShare:
    """The part of a replay from one topic. `first` and `last`: when the server stored these messages.

    `cancelled`: further ones that were cancelled or replaced, and are left out. `expiring`: those that have an expiry.
    `is_resized`: a key came through several partitions, so all of the topic is published in one order.
    """

    topic: str
    messages: int
    bytes: int
    keys: int
    first: datetime
    last: datetime
    cancelled: int = 0
    expiring: int = 0
    is_resized: bool = False


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The plan of a replay. `is_begun`: an earlier run has started it; `is_finished`: all is published."""

    job: str
    target: str
    shares: tuple[TopicShare, ...]
    is_begun: bool
    is_finished: bool

    @property
    def messages(self) -> int:
        """How many, of all topics."""
        return sum(share.messages for share in self.shares)


class ReplayJob(ABC):
    """One replay. `connection` are the options of `format("rsmq")` for the server to write to."""

    def __init__(self, store: ArchiveStore, options: ReplayOptions, connection: dict[str, str]) -> None:
        check_name("topic", options.target)
        if options.band is not None:
            checked_band(options.band)
        self._options = options
        self._connection = connection
        self._records = store
        self._record = f"{REPLAYS}/{options.name}.json"
        self._finished = f"{REPLAYS}/{options.name}.finished.json"

    def plan(self) -> ReplayPlan:
        """Count what would be replayed. Changes nothing. Raises RsmqError."""
        with spark_errors():
            folder = self._records.folder
            is_begun = folder.exists(self._record)
            self._check_topics()
            shares = tuple(self._count(self._archived_ends()))
            return ReplayPlan(self._options.name, self._options.target, shares, is_begun, folder.exists(self._finished))

    def run(self, plan: ReplayPlan) -> None:
        """Publish the messages, or those that are left. Raises RsmqError; run it again to continue."""
        if plan.is_finished:
            return
        with spark_errors():
            folder = self._records.folder
            ends, notes = self._archived_ends(), self._records.notes()
            record = {"filters": self._options.filters, "upto": ends, "notes": notes[-1] if notes else ""}
            folder.write(self._record, json.dumps(record))
            if plan.messages:
                self._publish(ends, is_resized=any(share.is_resized for share in plan.shares))
            folder.write(self._finished, json.dumps({"messages": plan.messages}))

    @abstractmethod
    def _count(self, ends: Ends) -> list[TopicShare]:
        """Count the messages of each topic up to these ends."""

    @abstractmethod
    def _publish(self, ends: Ends, *, is_resized: bool) -> None:
        """Publish them. With `is_resized`, in one order."""

    def _archived_ends(self) -> Ends:
        """How far the archive was when the job first ran; how far it is now if the job has not run yet. Notes about
        cancellations that came later are not read either."""
        folder = self._records.folder
        if not folder.exists(self._record):
            return self._records.offsets()
        record = json.loads(folder.read(self._record))
        if record["filters"] != self._options.filters:
            raise ConfigError(f"job {self._options.name!r} has replayed something else: use another --job")
        self._records.newest_note = record.get("notes")
        ends: Ends = record["upto"]
        return ends

    def _check_topics(self) -> None:
        known = self._records.topics()
        for topic in self._options.topics:
            if topic not in known:
                raise ConfigError(f"the archive has no topic {topic!r}: it has {', '.join(known) or 'none at all'}")

    @property
    def _is_shared(self) -> bool:
        """Whether several queries have archived a topic: then the archive may hold a message twice."""
        return any(self._records.writers(topic) > 1 for topic in self._options.topics)


class SparkReplay(ReplayJob):
    """A replay by Spark: one task for several source partitions."""

    def __init__(self, spark: SparkSession, options: ReplayOptions, connection: dict[str, str]) -> None:
        self._archive = SparkArchive(spark, options.archive)
        super().__init__(self._archive, options, connection)

    def _count(self, ends: Ends) -> list[TopicShare]:
        rows = self._distinct(self._rows(ends)).select(
            *IDENTITY, "id_ms", "key", "expires", message_bytes(), is_left_out(self._options).alias("is_out")
        )
        moved = rows.where("key IS NOT NULL AND NOT is_out").groupBy("topic", "key")
        several = moved.agg(F.count_distinct("partition").alias("n")).where("n > 1").select("topic").distinct()
        resized = {row.topic for row in several.collect()}
        out, kept = F.col("is_out"), ~F.col("is_out")
        found = rows.groupBy("topic").agg(
            F.count_if(kept).alias("messages"),
            F.coalesce(F.sum(F.when(kept, F.col("size"))), F.lit(0)).alias("bytes"),
            F.approx_count_distinct(F.when(kept, F.col("key"))).alias("keys"),
            F.min("id_ms").alias("first"),
            F.max("id_ms").alias("last"),
            F.count_if(out).alias("cancelled"),
            F.count(F.when(kept, F.col("expires"))).alias("expiring"),
        )
        return [
            TopicShare(
                row.topic, row.messages, row.bytes, row.keys, from_epoch_ms(row["first"]), from_epoch_ms(row["last"]),
                row.cancelled, row.expiring, row.topic in resized,
            )
            for row in found.orderBy("topic").collect()
        ]  # fmt: skip

    def _rows(self, ends: Ends) -> DataFrame:
        """The messages of the job, each as often as the archive has it."""
        options = self._options
        rows = self._archive.messages(options.topics, options.since, options.until).where(is_up_to(ends))
        if options.keys:
            rows = rows.where(F.col("key").isin([bytearray(key.encode()) for key in options.keys]))
        if options.where is None:
            return rows
        original = {"_key": F.col("key"), "_value": F.col("value")}
        text = rows.withColumns(original | {name: F.col(name).cast("string") for name in ("key", "value")})
        matching = filter_rows(text, options.where)
        return matching.withColumns({"key": F.col("_key"), "value": F.col("_value")}).drop(*original)

    def _distinct(self, rows: DataFrame) -> DataFrame:
        """Each message once. Only topics that several queries have archived need a comparison."""
        return rows.dropDuplicates(IDENTITY) if self._is_shared else rows

    def _publish(self, ends: Ends, *, is_resized: bool) -> None:
        """Write to the topic. Each task has whole source partitions, sorted by id, so a mark only ever rises."""
        options = self._options
        rows = self._distinct(self._rows(ends)).where(~is_left_out(options))
        streams = [f"{topic}.{partition}" for topic in sorted(options.topics) for partition in sorted(ends[topic])]
        tasks = 1 if is_resized else min(len(streams), self._archive.spark.sparkContext.defaultParallelism)
        number = F.array_position(F.array(*map(F.lit, streams)), F.concat_ws(".", "topic", "partition"))
        rate = {} if options.rate is None else {"ratePerTask": f"{options.rate / tasks:.9f}"}
        (
            rows.drop("date", "batch", "cancelled")
            .withColumn("expires", expiry_column(options.expiry))
            .repartitionById(tasks, (number % tasks).cast("int"))
            .sortWithinPartitions("id_ms", "id_seq", "topic", "partition")
            .write.format("rsmq")
            .options(**self._connection, **rate, **options.sink)
            .mode("append")
            .save()
        )


def is_left_out(options: ReplayOptions) -> Column:
    """Whether a row was cancelled or replaced for every group, and is not asked for."""
    if options.with_cancelled:
        return F.lit(False)
    return F.coalesce(F.col("cancelled") == ALL_GROUPS, F.lit(False))


def expiry_column(expiry: Expiry) -> Column:
    """When the copy of a row expires."""
    if expiry == "drop":
        return F.lit(None).cast("bigint")
    return F.col("expires") + (F.lit(now_ms()) - F.col("id_ms") if expiry == "shift" else F.lit(0))


def is_up_to(ends: Ends) -> Column:
    """Whether a row is not newer than the end of its stream."""
    limits = [
        part
        for topic, ids in sorted(ends.items())
        for partition, stream_id in sorted(ids.items())
        for part in (F.lit(f"{topic}.{partition}"), id_struct(*map(F.lit, parse_stream_id(stream_id.encode()))))
    ]
    own = id_struct(F.col("id_ms"), F.col("id_seq"))
    return own <= F.create_map(*limits)[F.concat_ws(".", "topic", "partition")]


def id_struct(ms: Column, seq: Column) -> Column:
    """A stream id as a struct of numbers, which compares in the order of the stream."""
    return F.struct(ms.cast("bigint").alias("ms"), seq.cast("bigint").alias("seq"))
