"""`rsmq pipeline report`: counts the messages of the archive or the topics, and reads the state of the server."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from typing import Final

import anyio
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from rsmq.dlq import DeadLetter, DeadLetters
from rsmq.errors import ConfigError
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.state import GroupState, MemberState
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.persistence import Devices
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.jobs.archive_store import IDENTITY, ArchiveStore, between, message_bytes
from rsmq.pipeline.report.data import (
    DeadLetterCause,
    GroupReport,
    HotKey,
    InboxBacklog,
    MemberLoad,
    PartitionCounts,
    PublishLatency,
    ReportData,
    TrafficHistory,
    Volume,
    percentile,
)
from rsmq.pipeline.spark.errors import spark_errors
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.topics import Topic
from rsmq.redis.wire.url import database_of, redact

HOT_KEYS: Final = 10
"""Of each topic."""
MAX_STEPS: Final = 72
STEPS: Final = [
    timedelta(seconds=seconds) for seconds in (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400, 28 * 86_400)
]
UUID7: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
CREATED_MS: Final = "CAST(conv(concat(substr(id, 1, 8), substr(id, 10, 4)), 16, 10) AS BIGINT)"
"""A UUIDv7 starts with the milliseconds of its creation."""
MAX_DEAD_LETTERS: Final = 100_000
MAX_DEVICES: Final = 200_000
INBOX_STEPS: Final = (0, 1, 10, 100, 1000)
LONGEST_INBOXES: Final = 10


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Which topics (none: all) in which window of time. `archive` None: count what the topics still hold."""

    topics: tuple[str, ...]
    connection: dict[str, str]
    archive: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def collect(spark: SparkSession, options: ReportOptions) -> ReportData:
    """Count the messages and read the state of the server. Raises RsmqError."""
    settings = read_options(options.connection | {"subscribePattern": ".*"}).access.settings()
    with spark_errors():
        history = count_messages(read_messages(spark, options))
    state = LiveState(settings, history.spreads)
    anyio.run(state.read, options.topics)
    return ReportData(
        made_at=datetime.now(UTC),
        server=redact(settings.url or ""),
        source="the topics" if options.archive is None else f"the archive {options.archive}",
        history=history,
        groups=tuple(state.groups),
        deaths=tuple(state.deaths),
        backlog=state.backlog,
        cut=tuple(state.cut),
    )


def read_messages(spark: SparkSession, options: ReportOptions) -> DataFrame:
    """The messages of the window, from the archive or from the topics."""
    if options.archive is None:
        topics = {"subscribe": ",".join(options.topics)} if options.topics else {"subscribePattern": ".*"}
        reader = spark.read.format("rsmq").options(**options.connection, **topics, includeHeaders="true")
        return between(reader.load(), options.since, options.until)
    store = ArchiveStore(spark, options.archive)
    names = options.topics or store.topics()
    if not names:
        raise ConfigError(f"there is no archive at {options.archive}: see `rsmq pipeline archive`")
    return store.messages(names, options.since, options.until)


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
            spreads=partition_counts(rows),
        )
    finally:
        rows.unpersist()


def step_for(first_ms: int | None, last_ms: int | None) -> timedelta:
    """The shortest interval that cuts the window into at most `MAX_STEPS`."""
    window = timedelta(milliseconds=0 if first_ms is None or last_ms is None else last_ms - first_ms)
    return next((step for step in STEPS if window <= step * MAX_STEPS), STEPS[-1])


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


def partition_counts(rows: DataFrame) -> tuple[PartitionCounts, ...]:
    """Messages by partition. An empty partition counts, up to the highest partition with messages."""
    counts: dict[str, dict[int, int]] = {}
    for topic, partition, count in rows.groupBy("topic", "partition").count().collect():
        counts.setdefault(topic, {})[partition] = count
    return tuple(
        PartitionCounts(topic, tuple(found.get(number, 0) for number in range(max(found) + 1)))
        for topic, found in sorted(counts.items())
    )


def interval(step: timedelta) -> Column:
    """The start of a row's interval, as ms since 1970."""
    width = int(step.total_seconds() * 1000)
    return (F.floor(F.col("id_ms") / width) * width).alias("at")


class LiveState:
    """Reads the state of the server: groups, members, dead letters, inboxes. `cut`: which counts were limited."""

    def __init__(self, settings: Settings, published: Sequence[PartitionCounts]) -> None:
        self._settings = settings
        self._keys = Keys(settings.prefix, database_of(settings.url))
        self._published = {counts.topic: counts.messages for counts in published}
        self.groups: list[GroupReport] = []
        self.deaths: list[DeadLetterCause] = []
        self.backlog: InboxBacklog | None = None
        self.cut: list[str] = []

    async def read(self, topics: Sequence[str]) -> None:
        """Read the state of some topics, or of all if none is named."""
        url = self._settings.url
        assert url is not None, "the connection options of a report have a url"
        async with Connector(url, self._settings).connected() as client:
            snapshot = await Inspector(client, self._keys, self._settings).snapshot(topics or None)
            by_name = {state.topic.name: state.topic for state in snapshot.topics}
            for group in snapshot.groups:
                self.groups.append(self._group(group, snapshot.members))
                if group.dead_letters:
                    await self._read_dead_letters(client, by_name[group.topic], group.name)
            await self._read_devices(client)

    def _group(self, group: GroupState, members: Sequence[MemberState]) -> GroupReport:
        counts = self._published.get(group.topic, ())
        loads = [
            MemberLoad(member.id, len(member.partitions), sum(counts[n] for n in member.partitions if n < len(counts)))
            for member in members
            if (member.topic, member.group) == (group.topic, group.name) and member.heard_ago is not None
        ]
        return GroupReport(
            topic=group.topic,
            name=group.name,
            distribution=group.distribution,
            unread=group.unread,
            pending=group.pending,
            waiting_for_retry=group.waiting_for_retry,
            dead_letters=group.dead_letters,
            waiting=max((share.oldest for share in group.shares if share.oldest is not None), default=None),
            loads=tuple(loads) if group.distribution == "hash" else (),
        )

    async def _read_dead_letters(self, client: Client, topic: Topic, group: str) -> None:
        by_reason: dict[str, list[DeadLetter]] = {}
        count = 0
        async for letter in DeadLetters(client, self._keys).iterate(topic, group):
            if count == MAX_DEAD_LETTERS:
                self.cut.append(f"only the oldest {MAX_DEAD_LETTERS} dead letters of {topic.name}/{group} are counted")
                break
            count += 1
            by_reason.setdefault(letter.reason, []).append(letter)
        for reason, letters in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
            seconds = sorted(filter(None, map(seconds_in_stream, letters)))
            error = Counter(letter.error for letter in letters).most_common(1)[0][0]
            given_up = (percentile(seconds, 0.5), percentile(seconds, 0.95))
            self.deaths.append(DeadLetterCause(topic.name, group, reason, len(letters), given_up, error))

    async def _read_devices(self, client: Client) -> None:
        steps = [0] * (len(INBOX_STEPS) + 1)
        total, connected, letters, dropped = 0, 0, 0, 0
        longest: list[tuple[int, str]] = []
        async for device in Devices(client, self._keys).iterate():
            if total == MAX_DEVICES:
                self.cut.append(f"only {MAX_DEVICES} devices are counted")
                break
            total += 1
            connected += device.gateway is not None
            letters += device.backlog
            dropped += device.dropped
            steps[bisect.bisect_left(INBOX_STEPS, device.backlog)] += 1
            longest = nlargest(LONGEST_INBOXES, [*longest, (device.backlog, device.client_id)])
        if total:
            named = tuple((name, count) for count, name in longest if count)
            self.backlog = InboxBacklog(
                total, connected, letters, dropped, tuple(zip((*INBOX_STEPS, None), steps, strict=True)), named
            )


def seconds_in_stream(letter: DeadLetter) -> float | None:
    """The time from the stream to the dead letters; None if the letter does not have its stream id."""
    ms = letter.origin.partition("-")[0]
    return max(0.0, letter.at.timestamp() - int(ms) / 1000) if ms.isdecimal() else None
