"""Counts of calls: how heartbeats carry them, how they add up, and what they say about durations."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.model.call_counts import BOUNDS, CallCounts, CallTimes, told


def times_of(*seconds: float) -> CallTimes:
    times = CallTimes()
    for each in seconds:
        times.note(each)
    return times


@given(st.lists(st.floats(0, 1000), max_size=50), st.integers(0, 10**9), st.integers(0, 10**6))
def test_what_is_told_is_read_again(seconds: list[float], settled: int, buried: int) -> None:
    """Through JSON, as the server has it."""
    said = told(Counter(settled=settled, buried=buried, reads=7), times_of(*seconds))
    read = CallCounts.read(json.loads(json.dumps(said)))
    assert (read.settled, read.dead, read.calls, read.failed) == (settled, buried, len(seconds), 0)
    assert said or not (seconds or settled or buried)


@pytest.mark.parametrize(
    "found",
    [None, 5, [], "x", {"settled": -1}, {"settled": True}, {"settled": 1 << 70}, {"took": "abc"}, {"took": [-1, None]},
     {"took": {"a": 1}}],
)  # fmt: skip
def test_what_another_client_has_written_counts_nothing(found: object) -> None:
    assert CallCounts.read(found) == CallCounts()


def test_difference_of_a_process_is_what_came_since() -> None:
    before = CallCounts.read(told(Counter(settled=3, failed=1), times_of(0.0001)))
    after = CallCounts.read(told(Counter(settled=8, failed=1), times_of(0.0001, 0.0001, 2)))
    assert (after - before).known == {"settled": 5, "took": (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1)}
    assert before + (after - before) == after


def test_quantiles_lie_within_the_bounds_of_their_calls() -> None:
    """Of a hundred calls one took a minute and a half: it is the 99th of them that says so, not the middle one."""
    counts = CallCounts.read(told({}, times_of(*[0.03] * 98, 90.0, 90.0)))
    middle, most = counts.quantile(0.5), counts.quantile(0.99)
    assert middle is not None
    assert most is not None
    assert 0.025 <= middle <= 0.05
    assert 60 <= most <= 300
    assert CallCounts().quantile(0.5) is None
    assert CallCounts.read(told({}, times_of(1000))).quantile(0.5) == float("inf")


def test_long_call_at_the_end_of_a_burst_counts_as_long() -> None:
    """A burst ends after a turn, so only its last call can be longer."""
    times = CallTimes()
    times.note_burst(2.01, 101, 0.01)
    assert times.counts[0] == 100
    assert times.counts[BOUNDS.index(2.5)] == 1
    times.note_burst(0.004, 2, 0.01)
    assert times.counts[BOUNDS.index(0.0025)] == 2
