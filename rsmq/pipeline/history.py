"""What was published, counted by Spark: volume and latency over time, hot keys, the spread over partitions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from rsmq.clock import from_epoch_ms
from rsmq.pipeline.facts import History, HotKey, Latency, Spread, Volume

HOT_KEYS: Final = 10
"""Of each topic."""
MOST_STEPS: Final = 72
STEPS: Final = [
    timedelta(seconds=seconds) for seconds in (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400, 28 * 86_400)
]
VERSION_7: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
BORN: Final = "CAST(conv(concat(substr(id, 1, 8), substr(id, 10, 4)), 16, 10) AS BIGINT)"
"""A UUIDv7 starts with the milliseconds of its making."""


def history(rows: DataFrame, since: datetime | None, until: datetime | None) -> History:
    """Count the rows of the window; `since` is included, `until` is not."""
    if since is not None:
        rows = rows.where(F.col("id_ms") >= round(since.timestamp() * 1000))
    if until is not None:
        rows = rows.where(F.col("id_ms") < round(until.timestamp() * 1000))
    size = F.length("value") + F.coalesce(F.length("key"), F.lit(0))
    rows = rows.select("topic", "partition", "offset", "id_ms", "key", "id", size.cast("bigint").alias("size"))
    rows = rows.dropDuplicates(["topic", "partition", "offset"]).persist()
    try:
        first, last = rows.agg(F.min("id_ms"), F.max("id_ms")).collect()[0]
        step = step_for(first, last)
        return History(
            first=None if first is None else from_epoch_ms(first),
            last=None if last is None else from_epoch_ms(last),
            step=step,
            volumes=volumes(rows, step),
            latencies=latencies(rows, step),
            hot_keys=hot_keys(rows),
            spreads=spreads(rows),
        )
    finally:
        rows.unpersist()


def step_for(first_ms: int | None, last_ms: int | None) -> timedelta:
    """A step of time that makes a picture of at most `MOST_STEPS`."""
    span = timedelta(milliseconds=0 if first_ms is None or last_ms is None else last_ms - first_ms)
    return next((step for step in STEPS if span <= step * MOST_STEPS), STEPS[-1])


def volumes(rows: DataFrame, step: timedelta) -> tuple[Volume, ...]:
    """Messages and bytes of each topic and step."""
    found = rows.groupBy("topic", bucket(step)).agg(F.count("*"), F.sum("size")).orderBy("topic", "at").collect()
    return tuple(Volume(topic, from_epoch_ms(at), count, weight) for topic, at, count, weight in found)


def latencies(rows: DataFrame, step: timedelta) -> tuple[Latency, ...]:
    """From the making of the message id to the stream."""
    known = rows.where(F.col("id").rlike(VERSION_7)).withColumn("took", F.col("id_ms") - F.expr(BORN))
    parts = F.percentile_approx("took", [0.5, 0.95, 0.99], 1000)
    found = known.groupBy(bucket(step)).agg(F.count("*"), parts).orderBy("at").collect()
    return tuple(Latency(from_epoch_ms(at), count, *map(float, three)) for at, count, three in found)


def hot_keys(rows: DataFrame) -> tuple[HotKey, ...]:
    """The most frequent keys of each topic."""
    counts = rows.where("key IS NOT NULL").groupBy("topic", "key").agg(F.count("*").alias("n"))
    order = Window.partitionBy("topic").orderBy(F.desc("n"), "key")
    ranked = counts.withColumn("rank", F.row_number().over(order)).where(F.col("rank") <= HOT_KEYS)
    totals = dict(map(tuple, rows.groupBy("topic").count().collect()))
    return tuple(
        HotKey(row.topic, bytes(row.key).decode(errors="backslashreplace"), row.n, row.n / totals[row.topic])
        for row in ranked.orderBy("topic", "rank").collect()
    )


def spreads(rows: DataFrame) -> tuple[Spread, ...]:
    """Messages by partition; those with none count as such, up to the highest partition that was seen."""
    counts: dict[str, dict[int, int]] = {}
    for topic, partition, count in rows.groupBy("topic", "partition").count().collect():
        counts.setdefault(topic, {})[partition] = count
    return tuple(
        Spread(topic, tuple(found.get(number, 0) for number in range(max(found) + 1)))
        for topic, found in sorted(counts.items())
    )


def bucket(step: timedelta) -> Column:
    """The start of the step of time, as ms since 1970."""
    width = int(step.total_seconds() * 1000)
    return (F.floor(F.col("id_ms") / width) * width).alias("at")


def now() -> datetime:
    """When a report is made."""
    return datetime.now(UTC)
