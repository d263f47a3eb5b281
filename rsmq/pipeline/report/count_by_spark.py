"""Counts the messages of a report by Spark."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from rsmq.model.clock import from_epoch_ms
from rsmq.pipeline.jobs.archive_store import IDENTITY
from rsmq.pipeline.jobs.spark_archive import SparkArchive, message_bytes
from rsmq.pipeline.report.data import (
    HOT_KEYS,
    HotKey,
    PublishLatency,
    ReportOptions,
    TrafficHistory,
    Volume,
    partition_counts,
    step_for,
)

UUID7: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
CREATED_MS: Final = "CAST(conv(concat(substr(id, 1, 8), substr(id, 10, 4)), 16, 10) AS BIGINT)"
"""A UUIDv7 starts with the milliseconds of its creation."""


def count_by_spark(spark: SparkSession, options: ReportOptions) -> TrafficHistory:
    """Count the messages of the window, from the archive or from the topics."""
    if options.archive is None:
        return count_messages(spark.read.format("rsmq").options(**options.source).load())
    store = SparkArchive(spark, options.archive)
    return count_messages(store.messages(options.names(store.topics()), options.since, options.until))


def count_messages(rows: DataFrame) -> TrafficHistory:
    """Volume and latency over time, hot keys, and messages by partition."""
    rows = rows.select(*IDENTITY, "id_ms", "key", "id", message_bytes()).dropDuplicates(IDENTITY).persist()
    try:
        first, last = rows.agg(F.min("id_ms"), F.max("id_ms")).collect()[0]
        step = step_for(first, last)
        return TrafficHistory(
            first=None if first is None else from_epoch_ms(first),
            last=None if last is None else from_epoch_ms(last),
            step=step,
            volumes=volumes(rows, step),
            latencies=latencies(rows, step),
            hot_keys=hot_keys(rows),
            spreads=partition_counts(rows.groupBy("topic", "partition").count().collect()),
        )
    finally:
        rows.unpersist()


def volumes(rows: DataFrame, step: timedelta) -> tuple[Volume, ...]:
    """Messages and bytes of each topic and interval."""
    counts = rows.groupBy("topic", interval(step)).agg(F.count("*"), F.sum("size")).orderBy("topic", "at").collect()
    return tuple(Volume(topic, from_epoch_ms(at), count, size) for topic, at, count, size in counts)


def latencies(rows: DataFrame, step: timedelta) -> tuple[PublishLatency, ...]:
    """From the creation of the message id to the stream."""
    timed = rows.where(F.col("id").rlike(UUID7)).withColumn("took", F.col("id_ms") - F.expr(CREATED_MS))
    percentiles = F.percentile_approx("took", [0.5, 0.95, 0.99], 1000)
    found = timed.groupBy(interval(step)).agg(F.count("*"), percentiles).orderBy("at").collect()
    return tuple(PublishLatency(from_epoch_ms(at), count, *map(float, three)) for at, count, three in found)


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


def interval(step: timedelta) -> Column:
    """The start of a row's interval, as ms since 1970."""
    width = int(step.total_seconds() * 1000)
    return (F.floor(F.col("id_ms") / width) * width).alias("at")
