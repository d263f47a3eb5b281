"""Rate limits: how many messages of a handler may start in a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from rsmq.errors import ConfigError
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.message import Message
from rsmq.model.words import duration

Over = Literal["group", "member"]
By = Literal["key"] | Callable[[Message], str | None]
Cost = Callable[[Message], int]

MOST: Final = 100_000


@dataclass(frozen=True, slots=True, init=False)
class Rate:
    """At most `limit` messages start in any time of length `per`, `over` the whole "group" or each "member".

    With `by="key"` that holds for each key by itself, such as a customer or a recipient. A key has one owner, so that
    is exact and needs no command; a handover takes the times along. If an owner dies, its times are lost with it: then
    the next owner may start up to `limit` more within `per`. Messages without a key are not limited.

    With `by` a function, such as `by=lambda message: message.headers["provider"]`, it holds for each value that the
    function returns, over the whole group: exact, and what one member does not use is free for the others. Members take
    blocks of starts from the server, a few times a second while there are messages. None: the message is not limited.
    The function gets the message before its payload is decoded: headers, key and data.

    All of `limit` may start at once, and then no more until the first of them are `per` ago. With `burst` no more than
    that many start at once, and the others evenly, one every `per / limit`: `Rate(20, per="1s", burst=1)` is one every
    50 ms. `cost=` is how many a message counts for, such as its tokens or segments, 1 to `limit`; a handler that learns
    it only later says `message.spent(n)`. Both hold over the group, with `by` a function or without `by`: then, too,
    what one member does not use is free for the others. One rate has one of them.

    Without any of these, over the group each live member has an equal share, computed from the members it knows,
    without a call per message. A share that one member does not use is not given to others; while members join, the
    group may exceed the limit.
    """

    limit: int
    per: timedelta
    over: Over
    by: By | None
    cost: Cost | None
    burst: int | None

    def __init__(
        self,
        limit: int,
        per: Duration = timedelta(seconds=1),
        over: Over = "group",
        *,
        by: By | None = None,
        cost: Cost | None = None,
        burst: int | None = None,
    ) -> None:
        object.__setattr__(self, "limit", limit)
        object.__setattr__(self, "per", checked_duration("per", per))
        object.__setattr__(self, "over", over)
        object.__setattr__(self, "by", by)
        object.__setattr__(self, "cost", cost)
        object.__setattr__(self, "burst", burst)
        is_number = isinstance(self.limit, int) and not isinstance(self.limit, bool)
        if not is_number or not 1 <= self.limit <= MOST:
            raise ConfigError(f"a rate of {self.limit!r} is not possible: use 1 to {MOST}, and choose `per`")
        if not timedelta(0) < self.per <= timedelta(days=1):
            raise ConfigError(f"a rate per {duration(self.per)} is not possible: write per='1s', at most a day")
        if self.over not in ("group", "member"):
            hint = ", or by='key'" if str(self.over) == "key" else ""
            raise ConfigError(f"a rate over {self.over!r} is unknown: use over='group' or over='member'{hint}")
        if self.by not in (None, "key") and not callable(self.by):
            raise ConfigError(
                f"a rate by {self.by!r} is unknown: use by='key', a function of the message such as by=lambda message: "
                f"message.headers['provider'], or leave it out for one rate over all"
            )
        if self.by is not None and self.over != "group":
            raise ConfigError("a rate with `by` holds over the whole group: leave over='member' out, or leave `by` out")
        self._check_lent()

    def _check_lent(self) -> None:
        if self.cost is not None and not callable(self.cost):
            raise ConfigError(
                f"cost={self.cost!r} is not possible: write a function of the message that returns a number"
            )
        is_number = isinstance(self.burst, int) and not isinstance(self.burst, bool)
        if self.burst is not None and (not is_number or not 1 <= self.burst <= self.limit):
            raise ConfigError(f"burst={self.burst!r} is not possible: use 1 (evenly) to the limit of {self.limit}")
        if (self.cost or self.burst) and self.by == "key":
            even = "write Rate(1, per='50ms', by='key')" if self.burst else "use a function, such as by=lambda m: m.key"
            raise ConfigError(f"a rate by='key' has neither cost nor burst: {even}")
        if self.cost and self.burst:
            raise ConfigError("a rate has a cost or a burst, not both: leave one of them out")
        if (self.cost or self.burst) and self.over == "member":
            raise ConfigError("cost and burst hold over the whole group: leave over='member' out")

    @property
    def name_of(self) -> Callable[[Message], str | None] | None:
        """What gives a message its name, if the server lends the starts of each name to members; None: it does not."""
        if callable(self.by):
            return self.by
        return _everything if self.cost or self.burst else None


def share_of(rate: Rate, members: int) -> tuple[int, float]:
    """The share of one of `members`, as a limit and seconds. All shares together never exceed the rate."""
    seconds = rate.per.total_seconds()
    if rate.over == "member" or members <= 1:
        return rate.limit, seconds
    if rate.limit >= members:
        return rate.limit // members, seconds
    return 1, seconds * members / rate.limit


def _everything(_message: Message) -> str:
    """One name for all messages."""
    return "all"


class Window:
    """The start times of the last seconds: exact, so that no time window has more starts than the limit.

    Kept as moments with their number of starts, because many messages start at once.
    """

    def __init__(self) -> None:
        self._starts: deque[tuple[float, int]] = deque()
        self._count = 0

    def room(self, now: float, limit: int, seconds: float) -> int:
        """How many messages may start now."""
        starts = self._starts
        while starts and starts[0][0] <= now - seconds:
            self._count -= starts.popleft()[1]
        return max(0, limit - self._count)

    def wait(self, now: float, limit: int, seconds: float) -> float:
        """Seconds until a message may start."""
        if self.room(now, limit, seconds) > 0:
            return 0.0
        left, moments = self._count, iter(self._starts)
        while left >= limit:  # until so many have left that there is room
            at, count = next(moments)
            left -= count
        return max(0.0, at + seconds - now)

    def advance(self, seconds: float) -> None:
        """They started so much longer ago."""
        self._starts = deque((at - seconds, count) for at, count in self._starts)

    def note(self, now: float, count: int = 1) -> None:
        """Record that so many messages start."""
        if count:
            self._starts.append((now, count))
            self._count += count

    def __repr__(self) -> str:
        return f"<Window {self._count} starts>"
