"""Which members are alive: decided from observations, without I/O, and carefully after every outage."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Liveness:
    """Judges the members of one group from the observations of one member (times in seconds, monotonic clock).

    A member is *dead* when its heartbeat key is gone. It is *absent* when its channel had no subscriber for the grace.
    After an outage, a failover, a stall or a jump of the server's clock all members seem dead, and live ones need a
    moment to renew. So no member is declared dead or absent until the observer has seen the server without a gap for
    that long.
    """

    def __init__(self, member: str, *, ttl: float, grace: float) -> None:
        self._member, self._ttl, self._grace = member, ttl, grace
        self._steady_since: float | None = None
        self._last = self._listened = 0.0
        self._offset: float | None = None
        self._known: set[str] = {member}
        self._missing_since: dict[str, float] = {}
        self._silent_since: dict[str, float] = {}

    def failed(self) -> None:
        """A request failed: discard what was observed before."""
        self._steady_since = None
        self._missing_since.clear()
        self._silent_since.clear()

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

    def saw_listeners(self, now: float, listeners: Mapping[str, int]) -> None:
        """The number of subscribers of each member's channel. Silence counts only while the checks have no gap."""
        self._steady(now)
        if now - self._listened > self._grace:
            self._silent_since.clear()
        self._listened = now
        for member, count in listeners.items():
            if count > 0:
                self._silent_since.pop(member, None)
            else:
                self._silent_since.setdefault(member, now)
        for gone in self._silent_since.keys() - listeners.keys():
            del self._silent_since[gone]

    def absent(self, now: float) -> frozenset[str]:
        """Members whose process has ended or is cut off."""
        if self._grace <= 0:
            return frozenset()
        return frozenset(member for member, since in self._silent_since.items() if now - since >= self._grace)

    def dead(self, now: float) -> frozenset[str]:
        """Members without a heartbeat key, observed without a gap for longer than a live member needs to renew."""
        if self._steady_since is None or now - self._steady_since < self._ttl:
            return frozenset()
        return frozenset(self._missing_since)

    def live(self, now: float) -> tuple[str, ...]:
        """All other members, always including the observer, sorted."""
        gone = (self.absent(now) | self.dead(now)) - {self._member}
        return tuple(sorted(self._known - gone))
