"""The back-off: it doubles, it is bounded, and no number of failures breaks it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsmq.model.backoff import Backoff


def test_backoff_doubles_up_to_its_limit() -> None:
    """A role that fails again and again waits ever longer, up to the limit."""
    backoff = Backoff(0.1, 10.0)
    assert [backoff.next() for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.failures == 9


def test_backoff_after_a_success_starts_again() -> None:
    """A success forgets all failures."""
    backoff = Backoff(0.1, 10.0, failures=7)
    backoff.reset()
    assert [backoff.next(), backoff.next()] == [0.1, 0.2]


@given(first=st.floats(0, 1e6), longest=st.floats(0, 1e6), failures=st.integers(0, 10**9))
def test_backoff_stays_within_its_limits(first: float, longest: float, failures: int) -> None:
    """No pause is shorter than the first or longer than the limit; none overflows, even after years of failures."""
    pause = Backoff(first, longest, failures).next()
    assert min(first, longest) <= pause <= longest
