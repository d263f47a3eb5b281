"""Which members are alive: decided from observations, without I/O, and carefully after every outage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Final

MOST_DOUBTS: Final = 50
"""Checks that find a subscriber of a member whose process is said to have ended. After them it counts as running."""


class Liveness:
    """Judges the members of one group from the observations of one member (times in seconds, monotonic clock).

    A member is *dead* when its heartbeat key is gone. It is *absent* when its channel had no subscriber for the grace.
    The grace is for live members that have lost only their subscription. So a member whose process has ended is absent
    at the first check that finds no subscriber.

    After an outage, a failover, a stall or a jump of the server's clock all members seem dead, and live ones need a
    moment to renew. So no member is declared dead or absent until the observer has seen the server without a gap for
    that long.
    """

    def __init__(self, member: str, *, ttl: float, grace: float) -> None:
        self._member = member
        self._ttl = ttl  # in seconds, as all times here
        self._grace = grace
        self._steady_since: float | None = None
        self._last = 0.0
        self._listened = 0.0
        self._offset: float | None = None
        self._known: set[str] = {member}
        self._missing_since: dict[str, float] = {}
        self._silent_since: dict[str, float] = {}
        self._ended: dict[str, int] = {}  # member -> checks that may still find a subscriber

    def failed(self) -> None:
        """A request failed: discard what was observed before."""
        self._steady_since = None
        self._missing_since.clear()
        self._silent_since.clear()

    def ended(self, member: str) -> None:
        """The process of a member has ended: it is absent as soon as it has no subscriber."""
        if member != self._member and self._grace > 0:
            self._ended[member] = MOST_DOUBTS

    def has_ended(self, member: str) -> bool:
        """Whether the process of a member is known to have ended."""
        return member in self._ended

    @property
    def awaits_silence(self) -> bool:
        """Whether a member whose process has ended still has a subscriber: the server has not seen its end yet."""
        return any(member in self._known and member not in self._silent_since for member in self._ended)

    def _steady(self, now: float) -> None:
        if self._steady_since is not None and now - self._last > self._ttl / 2:
            self.failed()
        if self._steady_since is None:
            self._steady_since = now
        self._last = now

    def saw_clock(self, now: float, server: float) -> None:
        """The server's wall clock (seconds). A jump of it expires keys that were renewed in time."""
        offset = server - now
        if self._offset is not None and abs(offset - self._offset) > self._ttl / 2:
            self.failed()
        self._offset = offset

    def saw_members(self, now: float, members: Collection[str], alive: Collection[str]) -> None:
        """The set of members, and the members with a heartbeat key."""
        self._steady(now)
        self._known = {self._member, *members}
        for gone in self._missing_since.keys() - self._known:
            del self._missing_since[gone]
        for member in self._known:
            if member in alive or member == self._member:
                self._missing_since.pop(member, None)
            else:
                self._missing_since.setdefault(member, now)

    def saw_server(self, now: float) -> None:
        """The server has answered something else."""
        self._steady(now)

    def joined(self, members: Collection[str]) -> None:
        """They said so after the last `saw_members`."""
        self._known = self._known.union(members)
        for member in members:
            self._missing_since.pop(member, None)

    def left(self, members: Collection[str]) -> None:
        """They said so after the last `saw_members`, or another member has removed them."""
        self._known = self._known.difference(members) | {self._member}
        for member in members:
            self._missing_since.pop(member, None)
            self._silent_since.pop(member, None)

    @property
    def misses_some(self) -> bool:
        """Whether a member had no heartbeat key at the last look."""
        return bool(self._missing_since)

    def saw_listeners(self, now: float, listeners: Mapping[str, int]) -> None:
        """The number of subscribers of each member's channel. Silence counts only while the checks have no gap."""
        self._steady(now)
        if now - self._listened > self._grace:
            self._silent_since.clear()
        self._listened = now
        for member, count in listeners.items():
            if count > 0:
                self._silent_since.pop(member, None)
                self._doubt(member)
            else:
                self._silent_since.setdefault(member, now)
        for gone in self._silent_since.keys() - listeners.keys():
            del self._silent_since[gone]
        for gone in self._ended.keys() - listeners.keys():
            del self._ended[gone]

    def _doubt(self, member: str) -> None:
        """A member that is said to have ended has a subscriber."""
        if member in self._ended:
            self._ended[member] -= 1
            if not self._ended[member]:
                del self._ended[member]

    def absent(self, now: float) -> frozenset[str]:
        """Members whose process has ended or is cut off."""
        if self._grace <= 0:
            return frozenset()
        return frozenset(
            member for member, since in self._silent_since.items()
            if now - since >= self._grace or member in self._ended
        )  # fmt: skip

    def next_absence(self, now: float) -> float:
        """When the grace of the next member without a subscriber is over; inf without one."""
        return min([end for since in self._silent_since.values() if (end := since + self._grace) > now], default=inf)

    def dead(self, now: float) -> frozenset[str]:
        """Members without a heartbeat key, observed without a gap for longer than a live member needs to renew."""
        if self._steady_since is None or now - self._steady_since < self._ttl:
            return frozenset()
        return frozenset(self._missing_since)

    def live(self, now: float) -> tuple[str, ...]:
        """All other members, always including the observer, sorted."""
        gone = (self.absent(now) | self.dead(now)) - {self._member}
        return tuple(sorted(self._known - gone))
