"""`rsmq pipeline replay`: from the archive into a topic, each message exactly once, also into a live one.

A replay is a job with a name. Where it has come to stands in the topic itself (a mark per source partition, written by
the script that appends), so that it may be cut off and run again. What belongs to it is fixed when it first runs:
everything that the archive held at that moment, as far as the filters let it through.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.keys import check_name
from rsmq.pipeline.failure import first_line, spoken
from rsmq.pipeline.store import Ends, Store
from rsmq.pipeline.survey import as_numbers

REPLAYS: Final = "_rsmq/replays"
IDENTITY: Final = ["topic", "partition", "offset"]


@dataclass(frozen=True, slots=True)
class Order:
    """What to replay. Times are aware; `since` is included, `until` is not. `rate`: messages a second, None: no limit.

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
        """What belongs to it, as JSON."""
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
        """The job's name: the same for the same filters, unless one is given."""
        if self.job is not None:
            return check_name("job", self.job)
        text = json.dumps([self.archive, self.filters], sort_keys=True)
        return f"replay-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Share:
    """What a replay takes from one topic. Times are when the messages were stored first."""

    topic: str
    messages: int
    bytes: int
    keys: int
    first: datetime
    last: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replay would do. `is_finished`: it has done so before, and would do nothing."""

    job: str
    target: str
    shares: tuple[Share, ...]
    is_begun: bool
    is_finished: bool

    @property
    def messages(self) -> int:
        """How many, of all topics."""
        return sum(share.messages for share in self.shares)


class Replay:
    """One job."""

    def __init__(self, spark: SparkSession, order: Order, connection: dict[str, str]) -> None:
        check_name("topic", order.target)
        self._spark, self._order, self._connection = spark, order, connection
        self._store = Store(spark, order.archive)
        self._record = f"{REPLAYS}/{order.name}.json"
        self._finished = f"{REPLAYS}/{order.name}.finished.json"

    def plan(self) -> Plan:
        """Count what would be replayed. Changes nothing. Raises RsmqError."""
        with spoken():
            is_begun = self._store.folder.exists(self._record)
            size = F.length("value") + F.coalesce(F.length("key"), F.lit(0))
            rows = self._rows(self._upto()).select(*IDENTITY, "id_ms", "key", size.alias("size"))
            found = (
                self._once(rows)
                .groupBy("topic")
                .agg(F.count("*"), F.sum("size"), F.approx_count_distinct("key"), F.min("id_ms"), F.max("id_ms"))
            )
            shares = [
                Share(topic, count, weight, keys, moment(first), moment(last))
                for topic, count, weight, keys, first, last in sorted(map(tuple, found.collect()))
            ]
            is_finished = self._store.folder.exists(self._finished)
            return Plan(self._order.name, self._order.target, tuple(shares), is_begun, is_finished)

    def run(self, plan: Plan) -> None:
        """Do it, or what is left of it. Raises RsmqError; run again, it goes on."""
        if plan.is_finished:
            return
        with spoken():
            folder = self._store.folder
            upto = self._upto()
            folder.write(self._record, json.dumps({"filters": self._order.filters, "upto": upto}))
            if plan.messages:
                self._write(self._once(self._rows(upto)), upto)
            folder.write(self._finished, json.dumps({"messages": plan.messages}))

    def _upto(self) -> Ends:
        """How far the archive had come when the job began, or has come now."""
        folder = self._store.folder
        if not folder.exists(self._record):
            return self._store.offsets()
        told = json.loads(folder.read(self._record))
        if told["filters"] != self._order.filters:
            raise ConfigError(f"job {self._order.name!r} has replayed something else: give this one another --job")
        upto: Ends = told["upto"]
        return upto

    def _rows(self, upto: Ends) -> DataFrame:
        """The messages of the job, each as often as it is in the archive."""
        order = self._order
        days = [None if moment is None else moment.astimezone(UTC).date() for moment in (order.since, order.until)]
        parts = self._store.parts(self._topics(), *days)
        rows = self._store.read(parts).where(is_within(upto))
        if order.since is not None:
            rows = rows.where(F.col("id_ms") >= round(order.since.timestamp() * 1000))
        if order.until is not None:
            rows = rows.where(F.col("id_ms") < round(order.until.timestamp() * 1000))
        if order.keys:
            rows = rows.where(F.col("key").isin([bytearray(key.encode()) for key in order.keys]))
        return rows if order.where is None else filtered(rows, order.where)

    def _once(self, rows: DataFrame) -> DataFrame:
        """Each message once. What a single query has archived is there once: only then nothing has to be compared."""
        is_shared = any(self._store.writers(topic) > 1 for topic in self._order.topics)
        return rows.dropDuplicates(IDENTITY) if is_shared else rows

    def _topics(self) -> list[str]:
        known = self._store.topics()
        for topic in self._order.topics:
            if topic not in known:
                raise ConfigError(f"the archive has no topic {topic!r}: it has {', '.join(known) or 'none at all'}")
        return list(self._order.topics)

    def _write(self, rows: DataFrame, upto: Ends) -> None:
        """A task takes some of the source partitions, in the order of their ids: a mark only ever rises."""
        streams = [f"{topic}.{partition}" for topic in sorted(self._order.topics) for partition in sorted(upto[topic])]
        tasks = min(len(streams), self._spark.sparkContext.defaultParallelism)
        number = F.array_position(F.array(*map(F.lit, streams)), F.concat_ws(".", "topic", "partition"))
        ordered = (
            rows.drop("date", "batch")
            .repartitionById(tasks, (number % tasks).cast("int"))
            .sortWithinPartitions("id_ms", "id_seq", "topic", "partition")
        )
        pace = {} if self._order.rate is None else {"ratePerTask": f"{self._order.rate / tasks:.9f}"}
        (
            ordered.write.format("rsmq")
            .options(**self._connection, **pace)
            .options(topic=self._order.target, idempotence="marker", jobId=self._order.name)
            .mode("append")
            .save()
        )


def is_within(upto: Ends) -> Column:
    """Whether a row is not newer than the ends of its stream."""
    limits = [
        part
        for topic, ids in sorted(upto.items())
        for partition, stream_id in sorted(ids.items())
        for part in (F.lit(f"{topic}.{partition}"), place(*map(F.lit, as_numbers(stream_id))))
    ]
    return place("id_ms", "id_seq") <= F.create_map(*limits)[F.concat_ws(".", "topic", "partition")]


def place(ms: Any, sequence: Any) -> Column:
    """A stream id as something that compares."""
    columns = (F.col(each) if isinstance(each, str) else each for each in (ms, sequence))
    return F.struct(*(each.cast("bigint").alias(name) for each, name in zip(columns, ("ms", "seq"), strict=True)))


def filtered(rows: DataFrame, where: str) -> DataFrame:
    """The rows for which an SQL expression is true. Raises ConfigError for one that is not understood."""
    try:
        told = rows.withColumns(
            {
                "_key": F.col("key"),
                "_value": F.col("value"),
                "key": F.col("key").cast("string"),
                "value": F.col("value").cast("string"),
            }
        )
        return told.where(where).withColumns({"key": F.col("_key"), "value": F.col("_value")}).drop("_key", "_value")
    except (AnalysisException, ParseException) as error:
        raise ConfigError(f"--where {where!r} is not understood: {first_line(str(error))}") from None


def moment(ms: int) -> datetime:
    """Milliseconds since 1970 as a time."""
    return datetime.fromtimestamp(ms / 1000, UTC)
