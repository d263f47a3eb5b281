"""A breaker: after several failures in a row, nothing starts for a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from rsmq.errors import ConfigError
from rsmq.handler.retry import AlreadyHandled, BatchRolledBack, Hold, Reject, Retry
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.message import Message
from rsmq.model.words import duration


@dataclass(frozen=True, slots=True, init=False)
class Breaker:
    """After `failures` failures in a row of a name, everything under that name is held for `hold`, in all members.

    What is held has not started, and has no attempt. At the end of the hold one message is tried, in one member: if it
    succeeds, all others follow; if it fails, the hold begins again. `by` gives a message its name, such as
    `by=lambda message: message.headers["provider"]`; without it the name is that of the handler's rate or limit, or all
    messages are of one name. A message without a name (None) counts for nothing, and is not held.

    A failure is an error of one of the types `on`, also a timeout. `Reject`, `Hold`, and a `Retry` that does not count
    are none, and neither is a payload that cannot be read. Each member counts by itself.
    """

    failures: int
    hold: timedelta
    by: Callable[[Message], str | None] | None
    on: tuple[type[BaseException], ...]

    def __init__(
        self,
        failures: int = 5,
        hold: Duration = timedelta(seconds=30),
        *,
        by: Callable[[Message], str | None] | None = None,
        on: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
    ) -> None:
        types = on if isinstance(on, tuple) else (on,)
        object.__setattr__(self, "failures", failures)
        object.__setattr__(self, "hold", checked_duration("hold", hold))
        object.__setattr__(self, "by", by)
        object.__setattr__(self, "on", types)
        if not isinstance(failures, int) or isinstance(failures, bool) or failures < 1:
            raise ConfigError(f"a breaker after {failures!r} failures is not possible: use 1 or more")
        if not timedelta(0) < self.hold <= LONGEST_DELAY:
            raise ConfigError(
                f"a breaker cannot hold for {duration(self.hold)}: use more than 0, at most {duration(LONGEST_DELAY)}"
            )
        if by is not None and not callable(by):
            raise ConfigError(f"a breaker by {by!r} is unknown: use a function of the message, or leave it out")
        if not types or not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
            raise ConfigError(f"a breaker on {on!r} is not possible: use an exception class, or a tuple of them")

    def counts(self, error: BaseException) -> bool:
        """Whether an error of a handler is a failure."""
        if isinstance(error, Reject | Hold | AlreadyHandled | BatchRolledBack):
            return False
        if isinstance(error, Retry) and not error.counts:
            return False
        return isinstance(error, self.on)
