"""Decides what happens to a message after its handler, from the outcome and the retry policy. Pure.

Errors and policies are code of the user: none of what they do here ends more than their own message.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from tenacity import RetryCallState, wait_random_exponential
from tenacity.retry import retry_base
from tenacity.wait import wait_base

from rsmq.errors import CannotDecode, ConfigError, HandlerTimeout, LostBody, Malformed, StoreUnavailable, WrongBody
from rsmq.handler.failure import describe, exc_info, parts, source_of, text_of
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.interrupt import is_from_signal
from rsmq.model.reason import Reason
from rsmq.model.words import count

log = logging.getLogger("rsmq.handler")

Outcome = BaseException | None
"""How a handler ended for a message: None means it succeeded."""

FREE_FOR: Final = timedelta(days=7)
DEFAULT_WAIT: Final[wait_base] = wait_random_exponential(multiplier=1, max=300)


class Retry(Exception):
    """Raised or returned by a handler, in a batch for an item, to try this message again.

    `after` is a timedelta or text such as `30s`; without it the policy decides how long to wait. Counts as an attempt,
    unless `counts` is False: for work that only comes too early, such as while a provider is down. Once the message is
    older than `uncounted_for` of the policy, every retry counts.
    """

    after: timedelta | None = None
    counts: bool = True

    def __init__(
        self, reason: str = "the handler asked for a retry", *, after: Duration | None = None, counts: bool = True
    ) -> None:
        super().__init__(reason)
        self.after = None if after is None else checked_duration("after", after)
        self.counts = counts


class Reject(Exception):
    """Raised or returned by a handler, in a batch for an item, to make this message a dead letter at once."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


SHORTEST_HOLD: Final = timedelta(milliseconds=100)


class Hold(Exception):
    """Raised by a handler when its provider says "not now", such as with status 429: nothing of its name starts for
    `duration`, a timedelta or text such as `30s`, in all members of the group. A tenth of a second at least: a provider
    that says 0 would be asked again without end.

    The name is that of the message under the handler's rate, limit or breaker, or all messages where these have no
    `by`; or give it as `name`. What waits has not started and has no attempt. Neither has the message that raises it,
    however often, and however old it is. In a handler without any of these options, or a batch, only the message itself
    waits, with its key.
    """

    name: str | None = None

    def __init__(self, duration: Duration, name: str | None = None, reason: str = "its handler asks to wait") -> None:
        super().__init__(reason)
        self.duration = min(max(checked_duration("duration", duration), SHORTEST_HOLD), LONGEST_DELAY)
        self.name = name
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"a hold of the name {name!r} is not possible: give text, or leave it out")


class AlreadyHandled(Exception):
    """Raised by a dependency: an earlier run of the handler has done all of this message. It is acknowledged."""


class BatchRolledBack(Exception):
    """Raised for a batch whose transaction was rolled back because of some of its messages.

    `outcomes` is what a batch handler returns. The messages without an error are handled again, without the others.
    """

    def __init__(self, outcomes: Any) -> None:
        super().__init__("the transaction of a batch was rolled back because of some of its messages")
        self.outcomes = outcomes


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledge it."""


@dataclass(frozen=True, slots=True)
class Park:
    """Try again after `delay`; `is_counted`: it was an attempt. `hold`: its name is to be held so long."""

    delay: timedelta
    is_counted: bool = True
    hold: Hold | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Bury:
    """Move it to the dead letters, without its body if that is too large to copy. `cause` has the traceback."""

    reason: Reason
    error: str
    is_copied: bool = True
    cause: BaseException | None = field(default=None, compare=False)


Decision = Ack | Park | Bury


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and when a failed message is tried again.

    `max_attempts` includes the first attempt. `wait` is any tenacity wait; the default is exponential with full jitter,
    from 1 s to 5 min. Only errors in `retry_on` (types, or a predicate) are retried; others bury the message at once.
    By default all errors are, also a SystemExit. A `wait` or predicate that fails is logged: the message is retried,
    after the default wait. `uncounted_for`: up to which age of a message `Retry(counts=False)` is free.
    """

    max_attempts: int = 5
    wait: wait_base = field(default_factory=lambda: DEFAULT_WAIT)
    retry_on: tuple[type[BaseException], ...] | type[BaseException] | Callable[[BaseException], bool] = BaseException
    uncounted_for: Duration = FREE_FOR

    def __post_init__(self) -> None:
        checked_duration("uncounted_for", self.uncounted_for)
        if not isinstance(self.max_attempts, int) or isinstance(self.max_attempts, bool) or self.max_attempts < 1:
            raise ConfigError(f"max_attempts={self.max_attempts!r} is not possible: use 1 (no retry) or more")
        if not _takes_one(self.wait):
            raise ConfigError(
                f"wait={self.wait!r} is not possible: write a wait of tenacity, such as wait=wait_fixed(5) or "
                f"wait=wait_exponential(max=60)"
            )
        if not (_is_error_type(self.retry_on) or _is_predicate(self.retry_on)):
            raise ConfigError(
                f"retry_on={self.retry_on!r} is not possible: write an exception class, a tuple of them, such as "
                f"retry_on=(TimeoutError, OSError), or a plain function that takes the error and returns a bool"
            )

    def _retries(self, error: BaseException, whole: BaseException | None = None) -> bool:
        """Whether the policy retries this error, which may be a part of a group. Never raises."""
        try:
            if isinstance(self.retry_on, type | tuple):
                return isinstance(error, self.retry_on) or (
                    isinstance(whole, BaseExceptionGroup) and isinstance(whole, self._groups())
                )
            return bool(self.retry_on(error))
        except BaseException as problem:
            _log_failure("retry_on", "the message is retried", problem)
            return True

    def _groups(self) -> tuple[type[BaseException], ...]:
        """The classes of groups that it names: `retry_on=ExceptionGroup` means the group with all of its parts."""
        kinds = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        return tuple(each for each in kinds if isinstance(each, type) and issubclass(each, BaseExceptionGroup))

    def _is_free(self, error: BaseException, age: timedelta) -> bool:
        """Whether an error of a message of this age is a retry that does not count: its handler says so, or the store
        for what it publishes is away."""
        is_early = isinstance(error, StoreUnavailable) or (isinstance(error, Retry) and not error.counts)
        return is_early and age < checked_duration("uncounted_for", self.uncounted_for)

    def _delay(self, attempt: int, error: BaseException) -> timedelta:
        """The wait after the given failed attempt; the first attempt is 1. Never raises."""
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        state.attempt_number = attempt
        state.set_exception((type(error), error, error.__traceback__))
        try:
            seconds = _seconds(self.wait(state))
        except BaseException as problem:
            _log_failure("wait", "the default wait applies", problem)
            seconds = DEFAULT_WAIT(state)
        return timedelta(seconds=min(max(0.0, seconds), LONGEST_DELAY.total_seconds()))


def _is_error_type(value: object) -> bool:
    each_of = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, type) and issubclass(each, BaseException) for each in each_of)


def _is_predicate(value: object) -> bool:
    """A retry of tenacity takes a state, not the error."""
    return _takes_one(value) and not isinstance(value, retry_base)


def _takes_one(value: object) -> bool:
    """Whether it can be called with one argument, and is neither a class nor async."""
    if not callable(value) or isinstance(value, type) or inspect.iscoroutinefunction(value):
        return False
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, such as some builtins
        return True
    return True


def _seconds(value: Any) -> float:
    seconds = float(value)
    if math.isnan(seconds):
        raise ValueError("it returned NaN, not a number of seconds")
    return seconds


def _log_failure(name: str, consequence: str, problem: BaseException) -> None:
    if is_from_signal(problem):
        raise problem
    log.error(
        "%s of a retry policy failed, so %s: %s", name, consequence, describe(problem), exc_info=exc_info(problem)
    )


def batch_outcomes(result: Any, messages: Sequence[object]) -> list[Outcome]:
    """One outcome per message from the result of a batch handler: None for done, else the error. Never raises.

    The handler returns None (all done), or a list with one entry per message: None, Retry(...), Reject(...) or any
    other error. Any other result is a TypeError for every message, because it does not say which are done.
    """
    if result is None:
        return [None] * len(messages)
    if not isinstance(result, list | tuple):
        wrong = f"it returned {type(result).__name__}"
    elif len(result) != len(messages):
        wrong = f"it returned {count(len(result), 'outcome')} for {count(len(messages), 'message')}"
    else:
        strange = next((each for each in result if each is not None and not isinstance(each, BaseException)), None)
        if strange is None:
            return [None if each is None else readable_error(each) for each in result]
        wrong = f"one outcome is {type(strange).__name__}"
    error = TypeError(
        f"{wrong}: a batch handler returns None (all done) or a list with one entry per message: "
        f"None, Retry(...), Reject(...) or an exception"
    )
    return [error] * len(messages)


def readable_error(error: BaseException) -> BaseException:
    """An error of user code where it is caught, or one in its place if it cannot be read. Raises only for a signal.

    A subclass of `Hold` may lack a duration, because its `__init__` does not call that of `Hold`; and a class may
    override what is read of every error. The returned error can be read.
    """
    try:
        for part in parts(error):
            if isinstance(part, Hold) and not (
                isinstance(part.duration, timedelta) and isinstance(part.name, str | None)
            ):
                raise TypeError(f"it holds {part.name!r} for {part.duration!r}")
            if isinstance(part, Retry):
                _ = part.after, bool(part.counts)
            if isinstance(part, Reject):
                getattr(part, "reason", None)
        describe(error)
        source_of(error)
        return error
    except BaseException as problem:
        if is_from_signal(problem):
            raise
        trace = object.__getattribute__(error, "__traceback__")
        return TypeError(
            f"the error {name_of_class(error)} cannot be read ({describe(problem)}): if it has an __init__, call "
            f"super().__init__ there"
        ).with_traceback(trace)


def name_of_class(error: BaseException) -> str:
    """The name of its class, which a metaclass may hide."""
    try:
        return type(error).__name__
    except Exception:
        return "of a class without a name"


def decide(error: Outcome, attempt: int, policy: RetryPolicy, age: timedelta = timedelta(0)) -> Decision:
    """The decision for one handled message, which was stored `age` ago. `error` is one that `readable_error` returned.

    Of a group of errors, as a task group raises it, the strictest part decides: `Reject`
    before an unreadable payload, an error that is not retried, one that is, `Retry`, `Hold`, and at last a retry that
    does not count.
    """
    if error is None:
        return Ack()
    whole, error = error, strictest(error, policy, age)
    match error:
        case AlreadyHandled():
            return Ack()
        case Reject():
            return Bury(Reason.REJECTED, said_by(whole, text_of(getattr(error, "reason", error))), cause=whole)
        case LostBody():
            return Bury(Reason.LOST_BODY, said_by(whole, text_of(error)), cause=whole)
        case Malformed():
            return Bury(Reason.MALFORMED, said_by(whole, text_of(error)), cause=whole)
        case WrongBody():
            return Bury(Reason.LOST_BODY, said_by(whole, text_of(error)), cause=whole)
        case CannotDecode():
            return Bury(Reason.NO_KEY, said_by(whole, text_of(error)), cause=whole)
        case Hold():
            return Park(error.duration, is_counted=False, hold=error)
    exhausted = Reason.TIMEOUT if isinstance(error, HandlerTimeout) else Reason.FAILED
    is_free = policy._is_free(error, age)
    if not is_free and (
        attempt >= policy.max_attempts or not (isinstance(error, Retry) or policy._retries(error, whole))
    ):
        return Bury(exhausted, describe(whole), cause=whole)
    if isinstance(error, Retry) and isinstance(error.after, timedelta):
        return Park(min(max(error.after, timedelta(0)), LONGEST_DELAY), is_counted=not is_free)
    return Park(policy._delay(attempt, error), is_counted=not is_free)


def strictest(error: BaseException, policy: RetryPolicy, age: timedelta) -> BaseException:
    """The part of a group that decides; of any other error, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error

    def rank(part: BaseException) -> tuple[int, timedelta]:
        after = part.after if isinstance(part, Retry) and isinstance(part.after, timedelta) else timedelta(0)
        match part:
            case AlreadyHandled():
                return 0, after
            case Hold():
                return 2, part.duration
            case Retry():
                return 1 if policy._is_free(part, age) else 3, after
            case Reject():
                return 7, after
            case Malformed():
                return 6, after
        return 4 if policy._retries(part, error) else 5, after

    return max(parts(error), key=rank)


def said_by(error: BaseException | None, text: str) -> str:
    """The text of a dead letter: that of the error, or of the part that decided, with the other parts behind it."""
    if not isinstance(error, BaseExceptionGroup) or len(parts(error)) == 1:
        return text
    return text_of(f"{text} (of {describe(error)})")


def decide_redelivery(attempts: int, policy: RetryPolicy) -> Bury | None:
    """Bury a message found unsettled after a crash, once too many attempts were charged to it; else None.

    The first delivery charges every prefetched message, started or not, so it proves nothing. After it, a message is
    buried when it has *started* `max_attempts` times without an end, in the end with no other suspect beside it.
    """
    if attempts > policy.max_attempts:
        return Bury(Reason.CRASHED, f"while it ran, its worker died or lost its lease {count(attempts - 1, 'time')}")
    return None


def is_suspect(attempts: int, policy: RetryPolicy) -> bool:
    """Whether a redelivered message must run without another suspect beside it."""
    return attempts >= min(2, policy.max_attempts)
