"""`rsmq pipeline report`: counts the messages of the archive or the topics, and reads the state of the server."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from heapq import nlargest
from typing import Final

import anyio
from pyspark.sql import SparkSession

from rsmq.dlq import DeadLetter, DeadLetters
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.state import GroupState, MemberState
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.persistence import Devices
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.report.count_by_arrow import count_by_arrow
from rsmq.pipeline.report.count_by_spark import count_by_spark
from rsmq.pipeline.report.data import (
    DeadLetterCause,
    GroupReport,
    InboxBacklog,
    MemberLoad,
    PartitionCounts,
    ReportData,
    ReportOptions,
    percentile,
)
from rsmq.pipeline.spark.errors import spark_errors
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.topics import Topic
from rsmq.redis.wire.url import database_of, redact

MAX_DEAD_LETTERS: Final = 100_000
MAX_DEVICES: Final = 200_000
INBOX_STEPS: Final = (0, 1, 10, 100, 1000)
LONGEST_INBOXES: Final = 10


def collect(spark: SparkSession | None, options: ReportOptions) -> ReportData:
    """Count the messages, by Spark or, without a session, by Arrow; and read the state of the server. Raises
    RsmqError."""
    settings = read_options(options.connection | {"subscribePattern": ".*"}).access.settings()
    with spark_errors():
        history = count_by_arrow(options) if spark is None else count_by_spark(spark, options)
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


class LiveState:
    """Reads the state of the server: groups, members, dead letters, inboxes. `cut`: which counts were limited."""

    def __init__(self, settings: Settings, published: Sequence[PartitionCounts]) -> None:
        self._settings = settings
        self._keys = Keys(settings.prefix, database_of(settings.url))
        self._published = {each.topic: dict(zip(each.numbers, each.messages, strict=True)) for each in published}
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
        counts = self._published.get(group.topic, {})
        loads = [
            MemberLoad(member.id, len(member.partitions), sum(counts.get(number, 0) for number in member.partitions))
            for member in members
            if (member.topic, member.group) == (group.topic, group.name) and member.heard_ago is not None
        ]
        return GroupReport(
            topic=group.topic,
            name=group.name,
            distribution=group.distribution,
            unread=group.unread,
            # with key order, what waits for a retry is pending for the server, too
            pending=max(0, group.pending - group.pending_for_retry),
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
