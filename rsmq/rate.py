"""Rate limits: how many messages of a handler may start within a span."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from rsmq.errors import ConfigError

Over = Literal["group", "member"]

MOST: Final = 100_000


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `limit` messages start within any span of `per`. `over` the whole group, or each member of it.

    Over the group every live member has an equal share, by what it knows of the others: nothing is asked per message.
    What one member does not use is not given to the others; while members join, the group may start more.
    """

    limit: int
    per: timedelta = timedelta(seconds=1)
    over: Over = "group"

    def __post_init__(self) -> None:
        is_number = isinstance(self.limit, int) and not isinstance(self.limit, bool)
        if not is_number or not 1 <= self.limit <= MOST:
            raise ConfigError(f"a rate of {self.limit!r} is not possible: use 1 to {MOST}, and choose `per`")
        if not isinstance(self.per, timedelta) or not timedelta(0) < self.per <= timedelta(days=1):
            raise ConfigError(f"a rate per {self.per!r} is not possible: write per=timedelta(seconds=1), at most a day")
        if self.over not in ("group", "member"):
            raise ConfigError(f"a rate over {self.over!r} is unknown: use 'group' or 'member'")

    def share(self, members: int) -> tuple[int, float]:
        """What one of so many members may do: a limit, and seconds. The sum is never above the whole."""
        seconds = self.per.total_seconds()
        if self.over == "member" or members <= 1:
            return self.limit, seconds
        if self.limit >= members:
            return self.limit // members, seconds
        return 1, seconds * members / self.limit


class Window:
    """The starts within the last span: exact, so that no window whatever has more of them than the limit."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def room(self, now: float, limit: int, seconds: float) -> int:
        """How many may start now."""
        starts = self._starts
        while starts and starts[0] <= now - seconds:
            starts.popleft()
        return max(0, limit - len(starts))

    def wait(self, now: float, limit: int, seconds: float) -> float:
        """Seconds until one may start."""
        if self.room(now, limit, seconds) > 0:
            return 0.0
        return max(0.0, self._starts[-limit] + seconds - now)

    def note(self, now: float) -> None:
        """One starts."""
        self._starts.append(now)

    def __repr__(self) -> str:
        return f"<Window {len(self._starts)} starts>"
