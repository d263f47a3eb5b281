"""What changed between two snapshots: rates, and where each lag goes. Pure: no server, no clock, no terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rsmq.snapshot import GroupPoint, MemberPoint, SharePoint, Snapshot, TopicPoint

STEADY: Final = 0.5
"""Messages a second: a backlog that changes by less stays as it is."""


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic. `rate_in` is messages a second, None with a single look."""

    name: str
    partitions: int
    messages: int
    delayed: int
    rate_in: float | None
    groups: int


@dataclass(frozen=True, slots=True)
class ShareRow:
    """A partition as a group sees it; an empty `owner` is nobody."""

    partition: int
    owner: str
    epoch: int
    lag: int | None
    in_hand: int
    parked: int
    dead_letters: int
    oldest: timedelta | None


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member of a group. `heard_ago` None: its heartbeat has run out."""

    topic: str
    group: str
    id: str
    handler: str
    concurrency: int
    heard_ago: timedelta | None
    loop_lag: timedelta | None
    in_hand: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group. `rate_out` is what it settled a second; `growth` is what its backlog grew by a second, negative when it
    shrinks; `empty_in` is None unless it shrinks. `lag` is None where the server cannot tell."""

    topic: str
    name: str
    distribution: str
    is_paused: bool
    rate_out: float | None
    lag: int | None
    growth: float | None
    empty_in: timedelta | None
    oldest: timedelta | None
    in_hand: int
    parked: int
    dead_letters: int
    new_dead_letters: int
    owned: int
    shares: tuple[ShareRow, ...]
    members: tuple[MemberRow, ...]

    @property
    def trend(self) -> str:
        """One word for `growth`; empty when it is not known."""
        if self.growth is None:
            return ""
        return "steady" if abs(self.growth) < STEADY else "growing" if self.growth > 0 else "shrinking"

    @property
    def is_unserved(self) -> bool:
        """Whether nobody alive serves it."""
        return all(member.heard_ago is None for member in self.members)


@dataclass(frozen=True, slots=True)
class Board:
    """Everything to be shown. `span` is what the rates are measured over, None with a single look."""

    span: timedelta | None
    topics: tuple[TopicRow, ...]
    groups: tuple[GroupRow, ...]

    @property
    def members(self) -> tuple[MemberRow, ...]:
        """Those of all groups."""
        return tuple(member for group in self.groups for member in group.members)


def compare(before: Snapshot | None, after: Snapshot) -> Board:
    """The later snapshot, with rates since the earlier one. What is new or was reset in between has no rate yet."""
    seconds = None if before is None else after.at - before.at
    if before is None or seconds is None or seconds <= 0:
        before, seconds = Snapshot(after.at, ()), 0.0
    topics = {topic.name: topic for topic in before.topics}
    groups = {(group.topic, group.name): group for topic in before.topics for group in topic.groups}
    return Board(
        span=timedelta(seconds=seconds) if seconds else None,
        topics=tuple(topic_row(topics.get(topic.name), topic, seconds) for topic in after.topics),
        groups=tuple(
            group_row(groups.get((group.topic, group.name)), group, seconds)
            for topic in after.topics
            for group in topic.groups
        ),
    )


def topic_row(before: TopicPoint | None, after: TopicPoint, seconds: float) -> TopicRow:
    """A topic that was deleted and made again has fewer entries than before: no rate."""
    return TopicRow(
        name=after.name,
        partitions=len(after.streams),
        messages=sum(stream.length for stream in after.streams),
        delayed=sum(stream.delayed for stream in after.streams),
        rate_in=rate(None if before is None else added(before), added(after), seconds),
        groups=len(after.groups),
    )


def group_row(before: GroupPoint | None, after: GroupPoint, seconds: float) -> GroupRow:
    """Settled is what was read, is not in hand and waits for no retry."""
    was = None if before is None else backlog(before)
    now, shares = backlog(after), after.shares
    growth = None if was is None or now is None or not seconds else (now - was) / seconds
    is_shrinking = now is not None and growth is not None and growth <= -STEADY
    return GroupRow(
        topic=after.topic,
        name=after.name,
        distribution=after.distribution,
        is_paused=after.is_paused,
        rate_out=rate(None if before is None else settled(before), settled(after), seconds),
        lag=total(share.lag for share in shares),
        growth=growth,
        empty_in=timedelta(seconds=now / -growth) if is_shrinking and now is not None and growth else None,
        oldest=max((share.oldest for share in shares if share.oldest is not None), default=None),
        in_hand=sum(share.pending for share in shares),
        parked=sum(share.parked for share in shares),
        dead_letters=dead(after),
        new_dead_letters=0 if before is None else max(0, dead(after) - dead(before)),
        owned=sum(bool(share.owner) for share in shares),
        shares=tuple(map(share_row, shares)),
        members=tuple(member_row(after, member) for member in after.members),
    )


def share_row(share: SharePoint) -> ShareRow:
    """An owner whose lease ran out is no owner."""
    is_held = share.lease_left is not None and share.lease_left > timedelta(0)
    return ShareRow(
        share.partition, share.owner if is_held else "", share.epoch, share.lag, share.pending, share.parked,
        share.dead_letters, share.oldest,
    )  # fmt: skip


def member_row(group: GroupPoint, member: MemberPoint) -> MemberRow:
    """With what it holds of its group's partitions."""
    return MemberRow(
        topic=group.topic,
        group=group.name,
        id=member.id,
        handler=member.handler,
        concurrency=member.concurrency,
        heard_ago=member.heard_ago,
        loop_lag=member.loop_lag,
        in_hand=sum(share.in_hand.get(member.id, 0) for share in group.shares),
        partitions=tuple(share.partition for share in group.shares if share.owner == member.id),
    )


def added(topic: TopicPoint) -> int:
    """Entries ever added to it."""
    return sum(stream.added for stream in topic.streams)


def settled(group: GroupPoint) -> int | None:
    """Messages that the group has done with, since it began to count."""
    read = total(share.read for share in group.shares)
    return None if read is None else read - sum(share.pending + share.parked for share in group.shares)


def backlog(group: GroupPoint) -> int | None:
    """Everything it has not settled."""
    lag = total(share.lag for share in group.shares)
    return None if lag is None else lag + sum(share.pending + share.parked for share in group.shares)


def dead(group: GroupPoint) -> int:
    """Its dead letters."""
    return sum(share.dead_letters for share in group.shares)


def total(parts: Iterable[int | None]) -> int | None:
    """The sum, None when a part is not known."""
    known = list(parts)
    return None if any(part is None for part in known) else sum(part or 0 for part in known)


def rate(before: int | None, after: int | None, seconds: float) -> float | None:
    """Units a second; None for what is not known or has started again."""
    if before is None or after is None or not seconds or after < before:
        return None
    return (after - before) / seconds
