"""Who looks at whom: in a large group a few members look at all the others, and tell what they see."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from math import inf
from typing import Final

import mmh3

from rsmq.model.member import host_of

WATCHERS = 8
"""Members of a group that look at all the others. In a group that is not larger, all do."""
TIMES_DIFFERENT: Final = 2
"""Looks in a row that must count another number of members, before all of them are read: news may be on its way."""
STAND_IN_LEASES: Final = 2
"""Leases for which a member stays a watcher that became one because none looked: the watchers are removed within
them if they are dead or paused."""


def watchers_of(members: Collection[str], salt: str) -> frozenset[str]:
    """The WATCHERS members that look at all the others, by a hash; of different hosts as far as there are."""
    if len(members) <= WATCHERS:
        return frozenset(members)
    on_host, ranked = dict[str, int](), list[tuple[int, int, str]]()
    for rank, member in sorted((_rank(member, salt), member) for member in members):
        host = host_of(member)
        on_host[host] = on_host.get(host, 0) + 1
        ranked.append((on_host[host], rank, member))
    return frozenset(member for *_, member in sorted(ranked)[:WATCHERS])


@lru_cache(maxsize=4096)
def _rank(member: str, salt: str) -> int:
    return mmh3.hash64(f"{salt}/{member}/watch")[0]


class GroupWatch:
    """Decides what one member looks at (times in seconds, monotonic clock; no I/O).

    A *watcher* looks at all others. What it tells is a hint: a member that hears that another one is silent looks at
    that one itself from then on, and judges by what it sees. So a hint that is wrong, late or lost costs time, and
    nothing else. If no watcher has looked for a moment, a member that notices it stands in for them.
    """

    def __init__(self, member: str, salt: str, *, heartbeat: float, ttl: float) -> None:
        self._member, self._salt = member, salt
        self._heartbeat, self._ttl = heartbeat, ttl
        self._seen: tuple[Collection[str], Collection[str]] = ((), ())
        self._is_watcher = True
        self._stands_in_until = -inf
        self._unwatched = self._different = 0
        self._full_look_at = -inf
        self.is_large = False
        """Whether not all look at all."""
        self.suspects: frozenset[str] = frozenset()
        """Those that some member has found silent."""

    def saw(self, members: Collection[str], live: Collection[str]) -> None:
        """The members of the group, and those of them that live."""
        if self._seen == (members, live):
            return
        self._seen = list(members), live
        self.is_large = len(members) > WATCHERS
        self._is_watcher = not self.is_large or self._member in watchers_of(live, self._salt)
        self.suspects &= frozenset(members) - {self._member}

    def looked(self, now: float, members: int) -> None:
        """All of so many members were read. Those that are no watchers do it so rarely that all of them together read
        about as much as the watchers."""
        self._different = 0
        self._full_look_at = now + members / WATCHERS * self._heartbeat

    def watches(self, now: float) -> bool:
        """Whether this member looks at all others."""
        return self._is_watcher or now < self._stands_in_until

    def reads_all(self, now: float) -> bool:
        """Whether it must read all members at this heartbeat."""
        return self.watches(now) or now >= self._full_look_at or self._different >= TIMES_DIFFERENT

    def suspect(self, members: Iterable[str]) -> None:
        """They were found silent, here or by another member."""
        self.suspects = self.suspects.union(members) - {self._member}

    def clear(self, members: Iterable[str]) -> None:
        """They are not silent."""
        self.suspects = self.suspects.difference(members)

    def glanced(self, now: float, *, is_counted: bool, is_watched: bool) -> bool:
        """Whether the server has as many members as this one knows, and whether some member has looked at all of them.
        True: no watcher has, so glance again after a short pause, which decides who stands in."""
        self._different = 0 if is_counted else self._different + 1
        self._unwatched = 0 if is_watched else self._unwatched + 1
        if self._unwatched >= 2:
            self._unwatched = 0
            self._stands_in_until = now + STAND_IN_LEASES * self._ttl
        return self._unwatched > 0

    def __repr__(self) -> str:
        return f"<GroupWatch {self._salt} suspects={len(self.suspects)}>"
