"""`rsmq pipeline replay`: messages of the archive into a topic, also a live one, each exactly once.

A replay is a job with a name. The topic itself stores how far the job is: the script that appends also writes a mark
for each source partition. So a replay may be interrupted and run again. Its messages are fixed when it first runs:
those that the archive held then and that pass the filters.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import check_name
from rsmq.model.stream_id import parse_stream_id
from rsmq.pipeline.jobs.archive_store import IDENTITY, ArchiveStore, Ends, message_bytes
from rsmq.pipeline.spark.errors import filter_rows, spark_errors

REPLAYS: Final = "_rsmq/replays"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a replay. Times are aware; `since` is included, `until` not. `rate`: messages a second, or None.

    `where` is an SQL expression over the columns of the archive, in which `key` and `value` are text.
    """

    archive: str
    topics: tuple[str, ...]
    target: str
    since: datetime | None = None
    until: datetime | None = None
    keys: tuple[str, ...] = ()
    where: str | None = None
    rate: float | None = None
    job: str | None = None

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
        }

    @property
    def name(self) -> str:
        """The name of the job; without `job` the same filters give the same name."""
        if self.job is not None:
            return check_name("job", self.job)
        text = json.dumps([self.archive, self.filters], sort_keys=True)
        return f"replay-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class TopicShare:
    """The part of a replay from one topic. `first` and `last`: when the server stored these messages."""

    topic: str
    messages: int
    bytes: int
    keys: int
    first: datetime
    last: datetime


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


class ReplayJob:
    """One replay. `connection` are the options of `format("rsmq")` for the server to write to."""

    def __init__(self, spark: SparkSession, options: ReplayOptions, connection: dict[str, str]) -> None:
        check_name("topic", options.target)
        self._spark = spark
        self._options = options
        self._connection = connection
        self._store = ArchiveStore(spark, options.archive)
        self._record = f"{REPLAYS}/{options.name}.json"
        self._finished = f"{REPLAYS}/{options.name}.finished.json"

    def plan(self) -> ReplayPlan:
        """Count what would be replayed. Changes nothing. Raises RsmqError."""
        with spark_errors():
            is_begun = self._store.folder.exists(self._record)
            rows = self._rows(self._archived_ends()).select(*IDENTITY, "id_ms", "key", message_bytes())
            counts = (
                self._distinct(rows)
                .groupBy("topic")
                .agg(F.count("*"), F.sum("size"), F.approx_count_distinct("key"), F.min("id_ms"), F.max("id_ms"))
            )
            shares = [
                TopicShare(topic, count, size, keys, from_epoch_ms(first), from_epoch_ms(last))
                for topic, count, size, keys, first, last in sorted(map(tuple, counts.collect()))
            ]
            is_finished = self._store.folder.exists(self._finished)
            return ReplayPlan(self._options.name, self._options.target, tuple(shares), is_begun, is_finished)

    def run(self, plan: ReplayPlan) -> None:
        """Publish the messages, or those that are left. Raises RsmqError; run it again to continue."""
        if plan.is_finished:
            return
        with spark_errors():
            folder = self._store.folder
            ends = self._archived_ends()
            folder.write(self._record, json.dumps({"filters": self._options.filters, "upto": ends}))
            if plan.messages:
                self._publish(self._distinct(self._rows(ends)), ends)
            folder.write(self._finished, json.dumps({"messages": plan.messages}))

    def _archived_ends(self) -> Ends:
        """How far the archive was when the job first ran; how far it is now if the job has not run yet."""
        folder = self._store.folder
        if not folder.exists(self._record):
            return self._store.offsets()
        record = json.loads(folder.read(self._record))
        if record["filters"] != self._options.filters:
            raise ConfigError(f"job {self._options.name!r} has replayed something else: use another --job")
        ends: Ends = record["upto"]
        return ends

    def _rows(self, ends: Ends) -> DataFrame:
        """The messages of the job, each as often as the archive has it."""
        options = self._options
        known = self._store.topics()
        for topic in options.topics:
            if topic not in known:
                raise ConfigError(f"the archive has no topic {topic!r}: it has {', '.join(known) or 'none at all'}")
        rows = self._store.messages(options.topics, options.since, options.until).where(is_up_to(ends))
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
        is_shared = any(self._store.writers(topic) > 1 for topic in self._options.topics)
        return rows.dropDuplicates(IDENTITY) if is_shared else rows

    def _publish(self, rows: DataFrame, ends: Ends) -> None:
        """Write to the topic. Each task has whole source partitions, sorted by id, so a mark only ever rises."""
        options = self._options
        streams = [f"{topic}.{partition}" for topic in sorted(options.topics) for partition in sorted(ends[topic])]
        tasks = min(len(streams), self._spark.sparkContext.defaultParallelism)
        number = F.array_position(F.array(*map(F.lit, streams)), F.concat_ws(".", "topic", "partition"))
        rate = {} if options.rate is None else {"ratePerTask": f"{options.rate / tasks:.9f}"}
        (
            rows.drop("date", "batch")
            .repartitionById(tasks, (number % tasks).cast("int"))
            .sortWithinPartitions("id_ms", "id_seq", "topic", "partition")
            .write.format("rsmq")
            .options(**self._connection, **rate)
            .options(topic=options.target, idempotence="marker", jobId=options.name)
            .mode("append")
            .save()
        )


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
