"""What stands in the way of a group's backlog, by name: for the doctor, and for its page on the dashboard. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from rsmq.inspector import text
from rsmq.inspector.trend import GroupTrend
from rsmq.model.words import count, duration, number

MANY: Final = 100
"""A backlog of less is soon done."""
MOST: Final = 0.5
"""The part of a backlog that one name stands in front of."""


def stalled(group: GroupTrend) -> Iterator[str]:
    """It settles nothing though it has messages that are ready, or wait for their keys."""
    if group.stalled is None:
        return
    work = group.work
    running = [each.longest for each in group.members if each.longest is not None]
    longest = f" (the longest for {duration(max(running))})" if running and work.running else ""
    waits, state = text.waiting(work), "waiting_for_retry" if work.waiting_for_retry else "running"
    yield (
        f"{title(group)} has settled nothing for {duration(group.stalled)}: {number(work.ready)} ready, "
        f"{number(work.running)} running{longest}, {number(work.waiting)} waiting{f' ({waits})' if waits else ''}. "
        f"`rsmq message find {group.topic} --group {group.name} --state {state}` names those in front, and "
        f"`rsmq trace` the error of each"
    )


def behind_one_name(group: GroupTrend) -> Iterator[str]:
    """Most of its backlog waits behind one key, one rate or one tenant."""
    whole = group.known_backlog
    if whole < MANY:
        return
    live = [each for each in group.members if each.heard_ago is not None]
    for name, many in largest(each.waiting_for_key_by for each in live):
        if many >= MOST * whole:
            yield (
                f"{part(many, whole)} of {title(group)} wait behind the key {name!r}: a key is handled one message at "
                f"a time. Use a finer key, or ordering='none'"
            )
    rates = largest(each.waiting_for_rate_by for each in live)
    named = [(name, many) for name, many in rates if name and many >= MOST * whole]
    held = {each.name for each in group.holds}  # which is said by itself: no rate would help
    for name, many in named:
        if name not in held:
            yield f"{part(many, whole)} of {title(group)} wait for the rate of {name!r}: raise it, or let it wait"
    for_rate = group.work.waiting_for_rate
    if not named and "" not in held and for_rate >= MOST * whole:
        yield f"{part(for_rate, whole)} of {title(group)} wait for their handler's rate: raise it, or let them wait"
    for name, many in largest(each.waiting_by_tenant for each in live):
        if many >= MOST * whole and name not in dict(named):
            yield (
                f"{part(many, whole)} of {title(group)} are those of tenant {name or 'none'!r}: others take their "
                f"turns before them, as `weights` says"
            )


def not_reading(group: GroupTrend) -> Iterator[str]:
    """A member owns partitions and reads none of them."""
    for member in group.members:
        if member.heard_ago is not None and member.read_nothing_for is not None:
            yield (
                f"{member.id} of {title(group)} owns {count(len(member.partitions), 'partition')} and has read nothing "
                f"for {duration(member.read_nothing_for)}: the lines of rsmq.fetch in its log say why"
            )


def outgrown(group: GroupTrend) -> Iterator[str]:
    """Every member can own a partition."""
    live = [member for member in group.members if member.heard_ago is not None]
    if group.distribution == "hash" and len(live) > group.most_owners:
        yield (
            f"{title(group)} has {count(len(live), 'member')} and {count(group.most_owners, 'partition')}: "
            f"{count(len(live) - group.most_owners, 'member is', 'members are')} idle. Stop some, "
            f"give the handler distribution='shared', or let the topic grow: "
            f"`rsmq topic resize {group.topic} {2 * group.most_owners}`"
        )


def obstacles(group: GroupTrend) -> list[str]:
    """All of them, the worst first."""
    return [said for each in (stalled, not_reading, behind_one_name, outgrown) for said in each(group)]


def largest(told: Iterable[Iterable[tuple[str, int]]]) -> list[tuple[str, int]]:
    """The sums by name, the largest first. Each member tells only its largest."""
    found = Counter[str]()
    for each in told:
        for name, many in each:
            found[name] += many
    return found.most_common()


def part(many: int, whole: int) -> str:
    """How many of the backlog."""
    return f"{number(min(many, whole))} of {count(whole, 'message')}"


def title(group: GroupTrend) -> str:
    """The group in a sentence."""
    return f"group {group.name} of {group.topic}"
