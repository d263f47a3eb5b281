"""What a report tells, as plain values. Times are aware; latencies in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Volume:
    """Messages of a topic in one step of time."""

    topic: str
    at: datetime
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Latency:
    """From `publish` to the stream, in one step of time; only messages whose id says when it was made."""

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
class Spread:
    """How a topic's messages spread over its partitions."""

    topic: str
    messages: tuple[int, ...]

    @property
    def jain(self) -> float:
        """1: even."""
        return jain(self.messages)


@dataclass(frozen=True, slots=True)
class History:
    """What was published in the window."""

    first: datetime | None
    last: datetime | None
    step: timedelta
    volumes: tuple[Volume, ...]
    latencies: tuple[Latency, ...]
    hot_keys: tuple[HotKey, ...]
    spreads: tuple[Spread, ...]

    @property
    def messages(self) -> int:
        """How many, of all topics."""
        return sum(volume.messages for volume in self.volumes)


@dataclass(frozen=True, slots=True)
class Load:
    """A member and what falls to it: the partitions that it owns now, and the window's messages in them."""

    member: str
    partitions: int
    messages: int


@dataclass(frozen=True, slots=True)
class Group:
    """A group as it is now. `waiting`: the age of the oldest message that it has not settled."""

    topic: str
    name: str
    distribution: str
    lag: int
    pending: int
    parked: int
    dead_letters: int
    waiting: timedelta | None
    loads: tuple[Load, ...]

    @property
    def jain(self) -> float | None:
        """Fairness over its members; None under shared distribution, where nobody owns anything."""
        return jain([load.messages for load in self.loads]) if self.loads else None


@dataclass(frozen=True, slots=True)
class Deaths:
    """Dead letters of one reason. `given_up`: from the stream to the dead letters, median and 95 of 100, in seconds."""

    topic: str
    group: str
    reason: str
    letters: int
    given_up: tuple[float, float]
    example: str


@dataclass(frozen=True, slots=True)
class Backlog:
    """Device inboxes. `steps`: how many devices have up to so many letters, the last without bound."""

    devices: int
    connected: int
    letters: int
    dropped: int
    steps: tuple[tuple[int | None, int], ...]
    longest: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """A report. `source`: where the history was read from; `cut`: what was not counted to its end, in words."""

    made_at: datetime
    server: str
    source: str
    history: History
    groups: tuple[Group, ...]
    deaths: tuple[Deaths, ...]
    backlog: Backlog | None
    cut: tuple[str, ...] = ()


def jain(loads: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything. Of nothing: 1."""
    squares = sum(load * load for load in loads)
    return sum(loads) ** 2 / (len(loads) * squares) if squares else 1.0


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest-rank percentile of sorted values; 0 of none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
