"""The change between two snapshots: rates, and where each backlog goes. Pure: no server, no clock, no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rsmq.inspector.state import (
    NO_CALLS,
    NO_WORK,
    BandState,
    GroupPartition,
    GroupState,
    MemberState,
    Snapshot,
    TopicState,
    most_owners,
)
from rsmq.model.call_counts import CallCounts
from rsmq.model.held_name import HeldName
from rsmq.model.standstill import has_work
from rsmq.model.work import Work

STEADY: Final = 0.5
"""Messages a second: a backlog that changes by less counts as steady."""
STALLED: Final = timedelta(minutes=1)
SLOW: Final = timedelta(minutes=10)
"""Handlers may run for minutes."""


@dataclass(frozen=True, slots=True)
class TopicTrend:
    """A topic. `partitions`: how many messages go to now, in each band. `rate_in` is messages a second, None with a
    single snapshot."""

    name: str
    partitions: int
    messages: int
    delayed: int
    rate_in: float | None
    groups: int


@dataclass(frozen=True, slots=True)
class GroupTrend:
    """A group. `rate_out` is the messages that it settles a second. `growth` is what its backlog grows by a second,
    negative when it shrinks; `empty_in` is None unless it shrinks. `unread` is None where the server does not know
    it, and so is `backlog`, the sum of `unread` and `work` without what waits for a time. `new_calls`: what its members
    have told since the earlier snapshot. `untold`: the members that have not told for two beats what they do with their
    messages, so these count as ready.
    `stalled`: how long it has settled nothing, if messages of it are ready or wait for their keys and it is neither
    paused nor held; None: it goes on."""

    topic: str
    name: str
    distribution: str
    is_paused: bool
    rate_out: float | None
    unread: int | None
    growth: float | None
    empty_in: timedelta | None
    oldest: timedelta | None
    work: Work
    backlog: int | None
    dead_letters: int
    new_dead_letters: int
    owned: int
    shares: tuple[GroupPartition, ...]
    members: tuple[MemberState, ...]
    bands: tuple[BandState, ...] = ()
    holds: tuple[HeldName, ...] = ()
    follows: int = 0
    new_calls: CallCounts = NO_CALLS
    untold: tuple[str, ...] = ()
    stalled: timedelta | None = None

    @property
    def most_owners(self) -> int:
        """How many members can own partitions of it."""
        return self.follows or most_owners(self.shares, self.bands)

    @property
    def trend(self) -> str:
        """One word for `growth`; empty when it is unknown."""
        if self.growth is None:
            return ""
        return "steady" if abs(self.growth) < STEADY else "growing" if self.growth > 0 else "shrinking"

    @property
    def known_backlog(self) -> int:
        """`backlog`, where unread messages that the server does not know count as none."""
        return (self.unread or 0) + self.work.backlog

    @property
    def is_unserved(self) -> bool:
        """Whether it has no live member."""
        return all(member.heard_ago is None for member in self.members)


@dataclass(frozen=True, slots=True)
class Board:
    """Everything that is shown. `span` is the time that the rates are measured over, None with a single snapshot."""

    span: timedelta | None
    topics: tuple[TopicTrend, ...]
    groups: tuple[GroupTrend, ...]

    @property
    def members(self) -> tuple[MemberState, ...]:
        """Those of all groups."""
        return tuple(member for group in self.groups for member in group.members)


def compare(before: Snapshot | None, after: Snapshot) -> Board:
    """The later snapshot, with rates since the earlier one. What is new or was reset in between has no rate yet."""
    seconds = 0.0 if before is None else max(0.0, after.at - before.at)
    if before is None or not seconds:
        before = Snapshot(after.at, (), (), ())
    topics = {state.topic.name: state for state in before.topics}
    groups = {(state.topic, state.name): state for state in before.groups}
    return Board(
        span=timedelta(seconds=seconds) if seconds else None,
        topics=tuple(topic_trend(topics.get(state.topic.name), state, seconds) for state in after.topics),
        groups=tuple(
            group_trend(groups.get((state.topic, state.name)), before, state, after, seconds) for state in after.groups
        ),
    )


def members_of(snapshot: Snapshot, group: GroupState) -> tuple[MemberState, ...]:
    """The members of one group."""
    return tuple(each for each in snapshot.members if (each.topic, each.group) == (group.topic, group.name))


def topic_trend(before: TopicState | None, after: TopicState, seconds: float) -> TopicTrend:
    """A topic that was deleted and created again has fewer entries than before: no rate."""
    return TopicTrend(
        name=after.topic.name,
        partitions=after.topic.partitions,
        messages=after.length,
        delayed=after.delayed,
        rate_in=rate(None if before is None else added(before), added(after), seconds),
        groups=len(after.groups),
    )


def group_trend(
    before: GroupState | None, earlier: Snapshot, after: GroupState, later: Snapshot, seconds: float
) -> GroupTrend:
    """A message is settled when it was read, is not pending and waits for no retry."""
    members = members_of(later, after)
    was = None if before is None else backlog(before, members_of(earlier, before))
    now = backlog(after, members)
    growth = None if was is None or now is None or not seconds else (now - was) / seconds
    is_shrinking = now is not None and growth is not None and growth <= -STEADY
    return GroupTrend(
        topic=after.topic,
        name=after.name,
        distribution=after.distribution,
        is_paused=after.is_paused,
        holds=after.holds,
        rate_out=rate(None if before is None else settled(before), settled(after), seconds),
        unread=after.unread if after.is_unread_exact else None,
        growth=growth,
        empty_in=timedelta(seconds=now / -growth) if is_shrinking and now is not None and growth else None,
        oldest=max((share.oldest for share in after.shares if share.oldest is not None), default=None),
        work=work_of(after, members),
        backlog=now,
        dead_letters=after.dead_letters,
        new_dead_letters=0 if before is None else max(0, after.dead_letters - before.dead_letters),
        owned=sum(share.is_owned for share in after.shares),
        shares=after.shares,
        members=tuple(members),
        bands=after.bands,
        follows=after.follows,
        new_calls=calls_since(() if before is None else members_of(earlier, before), members),
        untold=untold(members),
        stalled=stalled(after, members),
    )


def calls_since(before: Sequence[MemberState], after: Sequence[MemberState]) -> CallCounts:
    """What members have told after an earlier look. One that was not there then has told all since."""
    told = {member.id: member.calls for member in before}
    return sum((member.calls - told.get(member.id, NO_CALLS) for member in after), NO_CALLS)


def added(topic: TopicState) -> int:
    """Entries ever added to it."""
    return sum(partition.added for partition in topic.partitions)


def settled(group: GroupState) -> int | None:
    """Messages that the group has finished since its counters began."""
    read = [share.read for share in group.shares if share.read is not None]
    return sum(read) - unsettled(group) if len(read) == len(group.shares) else None


def unsettled(group: GroupState) -> int:
    """Messages that were delivered: pending, or waiting for a retry, or both."""
    return group.pending + max(0, group.waiting_for_retry - group.pending_for_retry)


def work_of(group: GroupState, members: Sequence[MemberState]) -> Work:
    """What becomes of the messages that were delivered and are not settled.

    The members say what they do with theirs at each heartbeat; the server counts what is pending and what waits for a
    retry now. What no member speaks of is ready: its owner starts it next, or another one that takes it over.
    """
    said = sum((member.work for member in members if member.heard_ago is not None), NO_WORK)
    left = group.pending
    parts = list[int]()
    for part in (
        said.running,
        said.waiting_for_retry,
        said.waiting_for_key,
        said.waiting_for_rate,
        said.waiting_for_time,
    ):
        parts.append(min(part, left))
        left -= parts[-1]
    running, kept, for_key, for_rate, for_time = parts
    # with key order what waits for a retry is pending, too: a member speaks of it, unless it is dead
    of_the_dead = min(left, max(0, group.pending_for_retry - kept))
    for_retry = kept + of_the_dead + unsettled(group) - group.pending
    return Work(running, left - of_the_dead, for_key, for_rate, for_retry, for_time)


def stalled(group: GroupState, members: Sequence[MemberState]) -> timedelta | None:
    """How long a group has settled nothing, from STALLED on (while handlers run: from SLOW on). None: it goes on, or
    no member tells."""
    live = [each for each in members if each.heard_ago is not None]
    is_held = group.is_paused or any(not each.name for each in group.holds)
    if is_held or not any(has_work(each.work) for each in live):
        return None
    found = min((each.settled_nothing_for for each in live if each.settled_nothing_for is not None), default=None)
    limit = SLOW if any(each.work.running for each in live) else STALLED
    return found if found is not None and found >= limit else None


def untold(members: Sequence[MemberState]) -> tuple[str, ...]:
    """The live members that have pending messages and have not told for two beats what they do with them."""
    return tuple(each.id for each in members if each.pending and each.heard_ago is not None and not each.has_told)


def backlog(group: GroupState, members: Sequence[MemberState]) -> int | None:
    """Everything that it has not settled."""
    return group.unread + work_of(group, members).backlog if group.is_unread_exact else None


def rate(before: int | None, after: int | None, seconds: float) -> float | None:
    """Units a second; None for what is unknown or has started again."""
    if before is None or after is None or not seconds or after < before:
        return None
    return (after - before) / seconds
