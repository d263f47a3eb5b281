"""The table from outcome to decision, and the policy it consults."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import wait_chain, wait_exponential, wait_fixed, wait_none, wait_random_exponential
from tenacity.wait import wait_base

from rsmq.errors import ConfigError, HandlerTimeout, Malformed
from rsmq.handler.failure import describe
from rsmq.handler.retry import (
    Ack,
    AlreadyHandled,
    Bury,
    Decision,
    Hold,
    Park,
    Reject,
    Retry,
    RetryPolicy,
    batch_outcomes,
    decide,
    decide_redelivery,
    is_suspect,
    readable_error,
)  # fmt: skip
from rsmq.model.duration import LONGEST_DELAY
from rsmq.model.interrupt import mark
from rsmq.model.reason import Reason

POLICY = RetryPolicy(max_attempts=3, wait=wait_fixed(2), retry_on=(ValueError, HandlerTimeout))
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("error", "attempt", "decision"),
    [
        (None, 1, Ack()),
        (None, 99, Ack()),
        (ValueError("x"), 1, Park(2 * SECOND)),
        (ValueError("x"), 2, Park(2 * SECOND)),
        (ValueError("x"), 3, Bury(Reason.FAILED, "ValueError: x")),
        (KeyError("x"), 1, Bury(Reason.FAILED, "KeyError: 'x'")),
        (HandlerTimeout("bill", 30), 1, Park(2 * SECOND)),
        (HandlerTimeout("bill", 30), 3, Bury(Reason.TIMEOUT, describe(HandlerTimeout("bill", 30)))),
        (Retry(), 1, Park(2 * SECOND)),
        (Retry(after=SECOND), 2, Park(SECOND)),
        (Retry(after=-SECOND), 1, Park(timedelta(0))),
        (Retry(after=timedelta(days=9999)), 1, Park(LONGEST_DELAY)),
        (Retry("later", after=SECOND), 3, Bury(Reason.FAILED, "Retry: later")),
        (Retry("too early", after=SECOND, counts=False), 3, Park(SECOND, is_counted=False)),
        (Retry(counts=False), 1, Park(2 * SECOND, is_counted=False)),
        (Reject("no such customer"), 1, Bury(Reason.REJECTED, "no such customer")),
        (Malformed("no field"), 1, Bury(Reason.MALFORMED, "no field")),
    ],
)  # fmt: skip
def test_decision_follows_error_and_attempt(
    error: BaseException | None, attempt: int, decision: Ack | Park | Bury
) -> None:
    """Each outcome has the decision that the documentation states."""
    assert decide(error, attempt, POLICY) == decision


def test_a_retry_of_an_old_message_counts() -> None:
    """From the age that the policy names: a message cannot wait for ever."""
    policy, early = RetryPolicy(max_attempts=2, uncounted_for="1h"), Retry("too early", after=SECOND, counts=False)
    assert decide(early, 2, policy, timedelta(minutes=59)) == Park(SECOND, is_counted=False)
    assert decide(early, 1, policy, timedelta(hours=1)) == Park(SECOND)
    assert decide(early, 2, policy, timedelta(hours=1)) == Bury(Reason.FAILED, "Retry: too early")


def test_age_of_free_retries_that_is_no_duration_is_refused() -> None:
    """Where the policy is written, not when the first message asks."""
    with pytest.raises(ConfigError, match="uncounted_for"):
        RetryPolicy(uncounted_for=7)  # type: ignore[arg-type]


ERRORS = st.sampled_from(
    [None, ValueError(), KeyError(), Retry(), Retry(after=SECOND), Reject(), Malformed(), OSError()]
)
WAITS: st.SearchStrategy[wait_base] = st.sampled_from(
    [wait_none(), wait_fixed(1), wait_exponential(), wait_random_exponential(), wait_chain(wait_none(), wait_fixed(9))]
)


@given(ERRORS, st.integers(1, 10_000), st.integers(1, 10_000), WAITS)
def test_decision_exists_for_every_outcome(
    error: BaseException | None, attempt: int, most: int, wait: wait_base
) -> None:
    """No delay is negative or endless, and nothing is parked after its last attempt."""
    match decide(error, attempt, RetryPolicy(max_attempts=most, wait=wait)):
        case Ack():
            assert error is None
        case Park(delay):
            assert timedelta(0) <= delay <= LONGEST_DELAY
            assert attempt < most
        case Bury():
            assert attempt >= most or isinstance(error, Reject | Malformed)


def test_default_wait_grows_and_is_bounded() -> None:
    """By default a retry waits up to 1 s, then up to twice as long each time, never above 5 min."""
    policy = RetryPolicy(max_attempts=100)
    for attempt, most in [(1, 1), (2, 2), (3, 4), (50, 300)]:
        assert max(policy._delay(attempt, ValueError()) for _ in range(50)) <= timedelta(seconds=most)


def test_retry_on_selects_the_errors_to_retry() -> None:
    """`retry_on` is a type, some types or a predicate."""
    assert RetryPolicy()._retries(ValueError())
    assert not RetryPolicy(retry_on=OSError)._retries(ValueError())
    assert RetryPolicy(retry_on=(OSError, ValueError))._retries(ValueError())
    assert not RetryPolicy(retry_on=lambda error: "again" in str(error))._retries(ValueError("never"))


def test_negative_wait_is_no_wait() -> None:
    assert RetryPolicy(wait=lambda _: -5.0)._delay(1, ValueError()) == timedelta(0)


def test_signal_inside_a_policy_is_not_its_failure() -> None:
    """What a signal handler raises there ends the worker; the same error from the policy's own code does not."""

    def interrupted(error: BaseException) -> bool:
        raise mark(KeyboardInterrupt(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        RetryPolicy(retry_on=interrupted)._retries(ValueError())
    with pytest.raises(KeyboardInterrupt):
        RetryPolicy(wait=interrupted)._delay(1, ValueError())  # type: ignore[arg-type]


def test_policy_without_attempts_is_refused() -> None:
    """A policy without an attempt is refused."""
    with pytest.raises(ConfigError, match="max_attempts=0 is not possible"):
        RetryPolicy(max_attempts=0)


def test_crash_allows_one_delivery_more_than_attempts() -> None:
    """The first delivery proves nothing, so a message is buried after `max_attempts` starts beyond it."""
    assert [decide_redelivery(attempts, POLICY) is not None for attempts in (1, 2, 3, 4)] == [False, False, False, True]
    assert decide_redelivery(4, POLICY) == Bury(
        Reason.CRASHED, "while it ran, its worker died or lost its lease 3 times"
    )


@given(st.integers(1, 20), st.integers(1, 20))
def test_crashed_messages_were_suspects_before(attempts: int, most: int) -> None:
    """A message is only buried after it ran without another suspect beside it."""
    policy = RetryPolicy(max_attempts=most)
    if decide_redelivery(attempts, policy) is not None:
        assert is_suspect(attempts - 1, policy)


def test_error_description_is_one_bounded_text() -> None:
    """A dead letter's error is bounded, however long the exception's text."""
    assert describe(ValueError("x")) == "ValueError: x"
    assert len(describe(ValueError("x" * 10_000))) == 1000


def test_documentation_names_every_reason() -> None:
    """The page about the wire format explains each `dlq.reason`."""
    page = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
    assert [reason for reason in Reason if f"`{reason}`" not in page] == []


NETWORK = RetryPolicy(max_attempts=4, retry_on=ConnectionError, wait=wait_fixed(1))


@pytest.mark.parametrize(
    ("errors", "decision"),
    [
        ([Reject("no customer")], Bury(Reason.REJECTED, "no customer")),
        ([ConnectionError("reset")], Park(SECOND)),
        ([ValueError("bug")], Bury(Reason.FAILED, "ValueError: bug")),
        ([Retry(after="1h")], Park(timedelta(hours=1))),
        ([Retry(after="1h", counts=False)], Park(timedelta(hours=1), is_counted=False)),
        ([Retry(after="1h"), Retry(after="2h")], Park(timedelta(hours=2))),
        ([Retry(after="2h", counts=False), Retry(after="1h")], Park(timedelta(hours=1))),
        ([Retry(after="1h"), asyncio.CancelledError()], Park(timedelta(hours=1))),
        ([AlreadyHandled(), AlreadyHandled()], Ack()),
        ([AlreadyHandled(), ValueError("bug")], Bury(Reason.FAILED, "{}")),
        ([ConnectionError("reset"), ValueError("bug")], Bury(Reason.FAILED, "{}")),
        ([Retry(after="1h"), ExceptionGroup("in", [Reject("no")])], Bury(Reason.REJECTED, "no (of {})")),
        ([ValueError("bug"), Malformed("no JSON")], Bury(Reason.MALFORMED, "no JSON (of {})")),
    ],
)  # fmt: skip
def test_strictest_part_of_a_group_decides(errors: list[BaseException], decision: Decision) -> None:
    """A task group hides what a handler has raised: if all parts agree they count, else the strictest does."""
    group = BaseExceptionGroup("unhandled errors in a TaskGroup", [BaseExceptionGroup("outer", errors)])
    if isinstance(decision, Bury):
        decision = replace(decision, error=decision.error.format(describe(group)))
    assert decide(group, 1, NETWORK) == decision


def test_policy_that_names_groups_retries_them() -> None:
    """`retry_on=ExceptionGroup` means the group with all of its parts."""
    policy = RetryPolicy(retry_on=ExceptionGroup)
    assert isinstance(decide(ExceptionGroup("both", [ValueError("a"), KeyError("b")]), 1, policy), Park)


class ReadsBadly(Retry, Hold, Reject):
    """An error whose attributes raise."""

    @property
    def after(self) -> timedelta:  # type: ignore[override]
        raise RuntimeError("no time")

    @property
    def reason(self) -> str:  # type: ignore[override]
        raise RuntimeError("no reason")


class NoDuration(Hold):
    """Its author has forgotten `super().__init__`, as in those that follow."""

    def __init__(self) -> None:
        pass


class NoDelay(Retry):
    def __init__(self) -> None:
        pass


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class OfNoName(Exception, metaclass=Nameless):
    pass


class HiddenParts(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> tuple[Exception, ...]:  # type: ignore[override]
        raise RuntimeError("no parts")


class NoTruth(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ReadsBadly.__new__(ReadsBadly), "ReadsBadly cannot be read (AttributeError"),
        (NoDuration(), "NoDuration cannot be read (AttributeError: 'NoDuration' object has no attribute 'duration')"),
        (ExceptionGroup("parts", [ValueError("x"), NoDuration()]), "ExceptionGroup cannot be read (AttributeError"),
        (OfNoName(), "of a class without a name cannot be read (RuntimeError: no name)"),
        (HiddenParts("parts", [ValueError("x")]), "HiddenParts cannot be read (RuntimeError: no parts)"),
    ],
)
def test_error_that_cannot_be_read_is_a_failed_attempt(error: BaseException, text: str) -> None:
    """It costs its own message an attempt, and the dead letter says what is wrong with its class."""
    for outcome in (readable_error(error), *batch_outcomes([error], ["message"])):
        assert outcome is not None
        buried = decide(outcome, 1, RetryPolicy(max_attempts=1))
        assert isinstance(buried, Bury)
        assert buried.reason == Reason.FAILED
        assert text in buried.error
        assert "call super().__init__" in buried.error


def test_error_of_an_unusual_class_is_itself() -> None:
    """Neither a truth value that raises nor a retry without its `__init__` changes what they mean."""
    assert readable_error(truth := NoTruth("x")) is truth
    assert decide(truth, 1, RetryPolicy(max_attempts=1)) == Bury(Reason.FAILED, "NoTruth: x")
    assert readable_error(delay := NoDelay()) is delay
    assert decide(delay, 1, POLICY) == Park(2 * SECOND)


def test_signal_while_an_error_is_read_is_not_its_failure() -> None:
    """Ctrl-C in the middle of it ends the worker."""

    class Interrupted(ExceptionGroup[Exception]):
        @property
        def exceptions(self) -> tuple[Exception, ...]:  # type: ignore[override]
            raise mark(KeyboardInterrupt(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        readable_error(Interrupted("parts", [ValueError("x")]))


@pytest.mark.parametrize("duration", ["0s", -SECOND, "20ms"])
def test_hold_lasts_a_tenth_of_a_second_at_least(duration: str | timedelta) -> None:
    """A provider that says `Retry-After: 0` would be asked again without end, and no attempt would be counted."""
    assert Hold(duration).duration == SECOND / 10
