"""The content of a report as plain values. Times are aware; latencies are in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rsmq.errors import ConfigError
from rsmq.model.partition import MOST_PARTITIONS

HOT_KEYS: Final = 10
"""Of each topic."""
MAX_STEPS: Final = 72
STEPS: Final = [
    timedelta(seconds=seconds) for seconds in (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400, 28 * 86_400)
]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Which topics (none: all) in which window of time. `archive` None: count what the topics still hold."""

    topics: tuple[str, ...]
    connection: dict[str, str]
    archive: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def source(self) -> dict[str, str]:
        """The options of a read of what the topics hold."""
        topics = {"subscribe": ",".join(self.topics)} if self.topics else {"subscribePattern": ".*"}
        window = {"startingTimestamp": self.since, "endingTimestamp": self.until}
        times = {name: time.isoformat() for name, time in window.items() if time is not None}
        return self.connection | topics | times | {"includeHeaders": "true"}

    def names(self, known: Sequence[str]) -> Sequence[str]:
        """The topics of the archive to count. Raises ConfigError if it has none."""
        names = self.topics or known
        if not names:
            raise ConfigError(f"there is no archive at {self.archive}: see `rsmq pipeline archive`")
        return names


@dataclass(frozen=True, slots=True)
class Volume:
    """Messages of a topic in one interval."""

    topic: str
    at: datetime
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PublishLatency:
    """The time from `publish` to the stream, in one interval. Only message ids that contain a time are measured."""

    at: datetime
    measured: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class HotKey:
    """One of the most frequent keys. `share`: of its topic's messages, 0 to 1."""

    topic: str
    key: str
    messages: int
    share: float


@dataclass(frozen=True, slots=True)
class PartitionCounts:
    """The messages of a topic by partition: those of `numbers`, in their order."""

    topic: str
    numbers: tuple[int, ...]
    messages: tuple[int, ...]

    @classmethod
    def of(cls, topic: str, found: Mapping[int, int]) -> PartitionCounts:
        """From those that have messages. An empty partition counts, too, up to the highest of these; but on a cluster
        the partitions of a resized topic have numbers of up to millions, with none between them."""
        low = [number for number in found if number < MOST_PARTITIONS]
        high = sorted(number for number in found if number >= MOST_PARTITIONS)
        numbers = (*range(max(low, default=-1) + 1), *high)
        return cls(topic, numbers, tuple(found.get(number, 0) for number in numbers))


@dataclass(frozen=True, slots=True)
class TrafficHistory:
    """The messages that were published in the window."""

    first: datetime | None
    last: datetime | None
    step: timedelta
    volumes: tuple[Volume, ...]
    latencies: tuple[PublishLatency, ...]
    hot_keys: tuple[HotKey, ...]
    spreads: tuple[PartitionCounts, ...]

    @property
    def messages(self) -> int:
        """How many, of all topics."""
        return sum(volume.messages for volume in self.volumes)


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """A member, the number of partitions that it owns now, and the window's messages in them."""

    member: str
    partitions: int
    messages: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group now. `pending`: delivered, not settled, and not waiting for a retry. `waiting`: the age of the oldest
    message that it has not settled."""

    topic: str
    name: str
    distribution: str
    unread: int
    pending: int
    waiting_for_retry: int
    dead_letters: int
    waiting: timedelta | None
    loads: tuple[MemberLoad, ...]

    @property
    def jain(self) -> float | None:
        """Fairness over its members; None under shared distribution, where members own no partitions."""
        return jain([load.messages for load in self.loads]) if self.loads else None


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """Dead letters with one reason. `example`: the most frequent error.

    `given_up`: seconds from the stream to the dead letters, median and 95th percentile.
    """

    topic: str
    group: str
    reason: str
    letters: int
    given_up: tuple[float, float]
    example: str


@dataclass(frozen=True, slots=True)
class InboxBacklog:
    """Device inboxes. `steps`: how many devices have up to that many letters; None: without bound."""

    devices: int
    connected: int
    letters: int
    dropped: int
    steps: tuple[tuple[int | None, int], ...]
    longest: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """A report. `source`: where the history was read from. `cut`: a sentence for each count that was limited."""

    made_at: datetime
    server: str
    source: str
    history: TrafficHistory
    groups: tuple[GroupReport, ...]
    deaths: tuple[DeadLetterCause, ...]
    backlog: InboxBacklog | None
    cut: tuple[str, ...] = ()


def partition_counts(rows: Iterable[tuple[str, int, int]]) -> tuple[PartitionCounts, ...]:
    """Messages by partition, of rows with topic, partition and number."""
    counts: dict[str, dict[int, int]] = {}
    for topic, partition, number in rows:
        counts.setdefault(topic, {})[partition] = number
    return tuple(PartitionCounts.of(topic, found) for topic, found in sorted(counts.items()))


def jain(loads: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all loads are equal, 1/n when one of n has everything. Without any load: 1."""
    squares = sum(load * load for load in loads)
    return sum(loads) ** 2 / (len(loads) * squares) if squares else 1.0


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest-rank percentile of sorted values; 0 if there are none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def step_for(first_ms: int | None, last_ms: int | None) -> timedelta:
    """The shortest interval that cuts the window into at most `MAX_STEPS`."""
    window = timedelta(milliseconds=0 if first_ms is None or last_ms is None else last_ms - first_ms)
    return next((step for step in STEPS if window <= step * MAX_STEPS), STEPS[-1])
