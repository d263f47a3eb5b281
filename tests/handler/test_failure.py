"""Errors written down: where the user's code failed, within a bound, whatever the error is."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rsmq.errors import HandlerTimeout, Malformed
from rsmq.handler.carried import Carried, carrying
from rsmq.handler.failure import MOST_BYTES, describe, exc_info, traceback_of
from rsmq.handler.handler import build_handler
from rsmq.handler.retry import Reject, Retry
from rsmq.model.message import Message


class SilentError(Exception):
    """An error that refuses to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class UnsendableError(Exception):
    """An error that cannot be made again from its text, as many libraries have."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")


def caught(function: Callable[..., Any], *args: Any) -> Exception:
    """The error that a call raises."""
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def fail(error: BaseException) -> None:
    """The innermost call of these tests."""
    raise error


def fail_because() -> None:
    """An error that came from another one."""
    try:
        {}["shop"]
    except KeyError as error:
        raise ValueError("no such shop") from error


def deep(depth: int) -> None:
    """Fails after so many calls."""
    if depth == 0:
        fail(ValueError("at the bottom"))
    deep(depth - 1)


def long_chain(errors: int) -> None:
    """Fails with an error that came from many others."""
    try:
        fail(ValueError("error 0"))
    except ValueError as first:
        last = first
    for number in range(1, errors):
        try:
            raise ValueError(f"error {number}") from last
        except ValueError as error:
            last = error
    raise last


def test_error_without_a_text_is_described_by_its_type() -> None:
    """No colon is left over: `TimeoutError`, as a traceback ends."""
    assert (describe(TimeoutError()), describe(TimeoutError("late"))) == ("TimeoutError", "TimeoutError: late")


def test_traceback_starts_in_the_users_code() -> None:
    """The calls of rsmq around a handler are left out: they are the same for all errors."""

    def handle(payload: bytes) -> None:
        fail(ValueError("x"))

    text = traceback_of(caught(build_handler(handle, "t", group="g").invoke, Message(None, b"1-0", [b"data", b""])))
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: x\n")
    assert "in fail\n    raise error\n" in text
    assert "rsmq/handler" not in text


def test_traceback_of_an_error_that_came_from_another_shows_both() -> None:
    """Where it began comes first, as Python prints it."""
    first, joint, last = traceback_of(caught(fail_because)).partition(
        "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    assert joint
    assert first.endswith("KeyError: 'shop'\n")
    assert last.endswith("ValueError: no such shop\n")
    assert first.count("in fail_because") == last.count("in fail_because") == 1


def test_traceback_of_many_calls_keeps_the_innermost() -> None:
    """A recursion does not push out the line that failed, and the text says that calls are missing."""
    text = traceback_of(caught(deep, 500))
    assert "in fail\n    raise error\nValueError: at the bottom\n" in text
    assert "outer calls are left out" in text
    assert len(text.encode()) <= MOST_BYTES


@pytest.mark.parametrize("most", [MOST_BYTES, 1500])
def test_traceback_of_a_long_chain_keeps_its_ends(most: int) -> None:
    """The first error says why, the last one what came of it."""
    text = traceback_of(caught(long_chain, 50), most)
    assert [f"ValueError: error {number}\n" in text for number in (0, 1, 20, 48, 49)] == [True, True, False, True, True]
    assert "44 errors of this chain are left out" in text
    assert len(text.encode()) <= most


@pytest.mark.parametrize("error", [ValueError("ü" * 100_000), ValueError("\n" * 100_000), SilentError(), KeyError()])
def test_traceback_is_bounded_and_shows_the_call_whatever_the_text(error: Exception) -> None:
    """A text of megabytes, or none at all, leaves room for the calls."""
    text = traceback_of(caught(fail, error))
    assert "in fail\n    raise error\n" in text
    assert type(error).__name__ in text
    assert len(text.encode()) <= MOST_BYTES


def test_traceback_of_a_group_shows_where_its_members_failed() -> None:
    """A task group's error says nothing itself."""
    group = ExceptionGroup("unhandled errors", [caught(deep, 2), ExceptionGroup("inner", [caught(fail_because)])])
    text = traceback_of(caught(fail, group))
    for part in ("ValueError: at the bottom", "KeyError: 'shop'", "ValueError: no such shop", "unhandled errors"):
        assert part in text


@pytest.mark.parametrize("error", [Reject("no"), Retry(), Malformed("no JSON"), HandlerTimeout("bill", 3)])
def test_error_that_was_never_raised_has_no_traceback(error: Exception) -> None:
    """A batch handler returns such errors: there is no call to show."""
    assert traceback_of(error) == ""
    assert exc_info(error) is None


def test_error_text_can_be_stored_and_never_raises() -> None:
    """What UTF-8 cannot hold is escaped, and an error that cannot say what it is has a text all the same."""
    assert describe(ValueError("file \udcff")) == "ValueError: file \\udcff"
    assert describe(SilentError()) == "SilentError: its text cannot be shown, because its __str__ raises"
    assert len(describe(ValueError("\udcff" * 1000))) == 1000
    logged = exc_info(caught(fail, SilentError()))
    assert logged is not None
    assert str(logged[1]) == describe(SilentError())
    assert "file \\udcff" in traceback_of(caught(fail, ValueError("file \udcff")))


def test_error_of_another_process_brings_its_traceback() -> None:
    """Pickling drops tracebacks, so the text of it travels along."""
    arrived = pickle.loads(pickle.dumps(caught(carrying, fail_because)))
    assert (type(arrived), str(arrived)) == (ValueError, "no such shop")
    text = traceback_of(arrived)
    assert text.count("in fail_because") == 2
    assert "KeyError: 'shop'" in text


def test_error_that_pickle_cannot_make_again_keeps_its_class() -> None:
    """Most errors of SDKs take other arguments than they pass on: their class decides about a retry."""
    sent = caught(carrying, fail, UnsendableError(5, where="shop"))
    assert isinstance(sent, Carried)
    arrived = pickle.loads(pickle.dumps(sent))
    assert type(arrived) is UnsendableError
    assert describe(arrived) == "UnsendableError: code 5 at shop"
    assert "in fail\n    raise error\n" in traceback_of(arrived)


def sent_over(error: BaseException) -> BaseException:
    """The error as it arrives from another process."""
    return pickle.loads(pickle.dumps(caught(carrying, fail, error)))  # type: ignore[no-any-return]


def test_error_of_another_process_brings_causes_notes_and_groups() -> None:
    """What a predicate of `retry_on` may look at."""
    error = UnsendableError(5, where="shop")
    error.__cause__ = UnsendableError(7, where="bank")
    error.add_note("in the night")
    arrived = sent_over(ExceptionGroup("both", [error, Reject("no such customer")]))
    assert isinstance(arrived, ExceptionGroup)
    first, second = arrived.exceptions
    assert type(first) is UnsendableError
    assert type(first.__cause__) is UnsendableError
    assert str(first.__cause__) == "code 7 at bank"
    assert first.__notes__ == ["in the night"]
    assert (type(second), second.reason) == (Reject, "no such customer")  # type: ignore[attr-defined]


def test_error_of_a_local_class_arrives_as_its_nearest_known_class() -> None:
    """Pickle knows no class that a function has made; its name and text stay."""

    class Local(KeyError):
        """Only in this function."""

    arrived = sent_over(Local("shop"))
    assert isinstance(arrived, KeyError)
    assert describe(arrived) == "Local: 'shop'"


def test_error_that_holds_what_cannot_be_sent_arrives_without_it() -> None:
    """A lock, a socket or a generator in an attribute is left out."""
    error = ValueError("locked")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.code = 409  # type: ignore[attr-defined]
    arrived = sent_over(error)
    assert (type(arrived), str(arrived), arrived.code) == (ValueError, "locked", 409)  # type: ignore[attr-defined]
    assert not hasattr(arrived, "lock")


def test_call_in_another_process_that_returns_a_coroutine_fails() -> None:
    """Nothing there would await it, and its message would be settled."""

    async def forgotten() -> None:
        raise AssertionError("never runs")

    arrived = pickle.loads(pickle.dumps(caught(carrying, forgotten)))
    assert "forgotten returned coroutine" in str(arrived)
