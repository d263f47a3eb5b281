"""What becomes of a message after its handler: a pure table from outcome to decision, and the policy it consults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from tenacity import RetryCallState, wait_random_exponential
from tenacity.wait import wait_base

from rsmq.errors import ConfigError, HandlerTimeout, Malformed

Outcome = BaseException | None
"""How a handler ended for a message: None is well."""

LONGEST_DELAY: Final = timedelta(days=365)


class Retry(Exception):
    """Raised (or returned, for an item of a batch) by a handler: try this message again, after `after` if given.

    Counts as an attempt. Without `after` the policy's wait decides.
    """

    def __init__(self, reason: str = "the handler asked for a retry", *, after: timedelta | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Reject(Exception):
    """Raised (or returned, for an item of a batch) by a handler: never try again, keep it as a dead letter."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class Reason(StrEnum):
    """Why a message is a dead letter (field `dlq.reason`)."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    REJECTED = "rejected"
    MALFORMED = "malformed"
    LOST_BODY = "lost-body"


@dataclass(frozen=True, slots=True)
class Ack:
    """Settled."""


@dataclass(frozen=True, slots=True)
class Park:
    """Try again after `delay`."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Bury:
    """Keep as a dead letter, with its body unless that is too large to be copied."""

    reason: Reason
    error: str
    is_copied: bool = True


Decision = Ack | Park | Bury


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and when a failed message is tried again.

    `max_attempts` counts the first one. `wait` is any tenacity wait; the default is exponential with full jitter,
    from 1 s to 5 min. Only errors in `retry_on` (types, or a predicate) are retried, others are dead-lettered at once.
    """

    max_attempts: int = 5
    wait: wait_base = field(default_factory=lambda: wait_random_exponential(multiplier=1, max=300))
    retry_on: tuple[type[BaseException], ...] | type[BaseException] | Callable[[BaseException], bool] = Exception

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}: 1 means no retry, less means nothing")

    def retries(self, error: BaseException) -> bool:
        """Whether this error is worth another attempt."""
        if isinstance(self.retry_on, type | tuple):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))

    def delay(self, attempt: int, error: BaseException) -> timedelta:
        """The wait after the given failed attempt (1-based)."""
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        state.attempt_number = attempt
        state.set_exception((type(error), error, error.__traceback__))
        return timedelta(seconds=min(max(0.0, self.wait(state)), LONGEST_DELAY.total_seconds()))


def batch_outcomes(result: Any, messages: Sequence[object]) -> list[Outcome]:
    """One outcome a message from what a batch handler returned: None for done, else the error. Never raises.

    The handler returns nothing (all done), or a list with one entry a message: None, Retry(...), Reject(...) or any
    other exception. Everything else is a TypeError for each of them, because nobody can tell what was done.
    """
    if result is None:
        return [None] * len(messages)
    if not isinstance(result, list | tuple):
        wrong = f"it returned {type(result).__name__}"
    elif len(result) != len(messages):
        wrong = f"it returned {len(result)} outcomes for {len(messages)} messages"
    else:
        strange = next((each for each in result if each is not None and not isinstance(each, Exception)), None)
        if strange is None:
            return list(result)
        wrong = f"one outcome is {type(strange).__name__}"
    error = TypeError(
        f"{wrong}: a batch handler returns None (all done) or a list with one entry a message: "
        f"None, Retry(...), Reject(...) or an exception"
    )
    return [error] * len(messages)


def decide(error: Outcome, attempt: int, policy: RetryPolicy) -> Decision:
    """The decision for one handled message: total, and without I/O."""
    match error:
        case None:
            return Ack()
        case Reject():
            return Bury(Reason.REJECTED, error.reason)
        case Malformed():
            return Bury(Reason.MALFORMED, str(error))
    exhausted = Reason.TIMEOUT if isinstance(error, HandlerTimeout) else Reason.FAILED
    if attempt >= policy.max_attempts or not (isinstance(error, Retry) or policy.retries(error)):
        return Bury(exhausted, describe(error))
    if isinstance(error, Retry) and error.after is not None:
        return Park(min(max(error.after, timedelta(0)), LONGEST_DELAY))
    return Park(policy.delay(attempt, error))


def decide_redelivery(attempts: int, policy: RetryPolicy) -> Bury | None:
    """Whether a message found unsettled after a crash is condemned, given the attempts charged so far.

    The first delivery is charged to whatever was prefetched, started or not: circumstantial. Only what has then
    *started* `max_attempts` times without an end is guilty, the last times with no other suspect beside it.
    """
    if attempts > policy.max_attempts:
        return Bury(Reason.CRASHED, f"the process died {attempts - 1} times while it was being handled")
    return None


def is_suspect(attempts: int, policy: RetryPolicy) -> bool:
    """Whether a redelivered message must run without another suspect beside it."""
    return attempts >= min(2, policy.max_attempts)


def describe(error: BaseException) -> str:
    """An error as one bounded line: type and message, no traceback (payloads hide in tracebacks)."""
    return f"{type(error).__name__}: {error}"[:1000]
