"""What the server knows of topics and groups, as samples: the figures that no single worker has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.inspector import GroupState, Inspector, TopicState
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.telemetry import metric
from rsmq.telemetry.metric import Sample
from rsmq.telemetry.oldest import oldest_unsettled


class Survey:
    """Asks through an inspector: a few pipelines for each group, O(partitions), nothing is changed."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client, self._keys = client, keys
        self._inspector = Inspector(client, keys, settings)

    async def take(self) -> list[Sample]:
        """All figures now. Raises what the connection raises."""
        started = monotonic()
        samples = [sample for topic in await self._inspector.topics() for sample in of_topic(topic)]
        members = await self._inspector.members()
        for group in await self._inspector.groups():
            ages = [each.heard_ago for each in members if (each.topic, each.group) == (group.topic, group.name)]
            samples += of_group(group, ages, await oldest_unsettled(self._client, self._keys, group))
        return [*samples, Sample(metric.LOOK, (), monotonic() - started)]


def of_topic(topic: TopicState) -> Iterator[Sample]:
    """The figures of one topic."""
    yield Sample(metric.STORED, (topic.topic.name,), topic.length)
    yield Sample(metric.DELAYED, (topic.topic.name,), topic.delayed)


def of_group(group: GroupState, heard_ago: Sequence[timedelta | None], oldest: float) -> Iterator[Sample]:
    """The figures of one group; `heard_ago` of each of its members."""
    silent = sum(age is None for age in heard_ago)
    free = [share for share in group.shares if share.lease_left is None or share.lease_left <= timedelta(0)]
    values = {
        metric.LAG: group.lag,
        metric.LAG_EXACT: group.is_lag_exact,
        metric.OLDEST: oldest,
        metric.PENDING: group.pending,
        metric.PARKED: group.parked,
        metric.DEAD: group.dead_letters,
        metric.MEMBERS: len(heard_ago) - silent,
        metric.SILENT: silent,
        metric.UNOWNED: 0 if group.distribution == "shared" else len(free),
        metric.PAUSED: group.is_paused,
    }
    yield from (Sample(kind, (group.topic, group.name), value) for kind, value in values.items())
