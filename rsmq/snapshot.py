"""One look over everything: topics, groups, their shares and members, as they were at one moment. Only data.

The counters only grow (`added`, `read`), so that two looks make a rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """One partition. `added` counts the entries ever added."""

    partition: int
    added: int
    length: int
    delayed: int


@dataclass(frozen=True, slots=True)
class SharePoint:
    """One partition as one group sees it.

    `lag` and `read` (entries ever read) are None where the server cannot tell: after a reset into the middle.
    `oldest` is the age of the oldest message that is not settled: in hand, not delivered, or parked (of many parked
    ones only those that are due next are looked at). `in_hand` tells how many each member has.
    """

    partition: int
    owner: str
    epoch: int
    lease_left: timedelta | None
    lag: int | None
    read: int | None
    oldest: timedelta | None
    parked: int
    dead_letters: int
    in_hand: Mapping[str, int]

    @property
    def pending(self) -> int:
        """Delivered and not settled."""
        return sum(self.in_hand.values())


@dataclass(frozen=True, slots=True)
class MemberPoint:
    """One member. `heard_ago` is None when its heartbeat has run out, `loop_lag` when it does not tell."""

    id: str
    handler: str
    concurrency: int
    heard_ago: timedelta | None
    loop_lag: timedelta | None


@dataclass(frozen=True, slots=True)
class GroupPoint:
    """A group of a topic."""

    topic: str
    name: str
    distribution: str
    is_paused: bool
    members: tuple[MemberPoint, ...]
    shares: tuple[SharePoint, ...]


@dataclass(frozen=True, slots=True)
class TopicPoint:
    """A topic with its groups."""

    name: str
    streams: tuple[StreamPoint, ...]
    groups: tuple[GroupPoint, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under one prefix. `at` is the monotonic clock in seconds: for the span between two looks."""

    at: float
    topics: tuple[TopicPoint, ...]
