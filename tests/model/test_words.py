"""Counts and durations as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rsmq.model.words import count, describe_exit, duration, number, pause


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (12_345, "12 345 messages"), (None, "? messages")],
)
def test_count_has_the_noun_in_its_number(value: int | None, text: str) -> None:
    """One is singular, everything else plural."""
    assert count(value, "message") == text


def test_count_of_an_irregular_phrase_uses_both_forms() -> None:
    """A verb has to agree, too."""
    assert count(1, "entry waits", "entries wait") == "1 entry waits"
    assert count(2, "entry waits", "entries wait") == "2 entries wait"
    assert number(1_000_000) == "1 000 000"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0004, "0.4 ms"), (0.3, "300 ms"), (1, "1 s"), (1.5, "1.5 s"), (60, "1 min"), (90, "90 s"),
        (600, "10 min"), (3600, "1 h"), (5400, "90 min"), (86_400, "1 day"), (100_000, "27.8 h"), (172_800, "2 days"),
        (302_400, "3.5 days"), (31_536_000, "365 days"), (-1, "-1 s"),
    ],
)  # fmt: skip
def test_duration_has_one_unit(seconds: float, text: str) -> None:
    """The unit that needs the fewest digits."""
    assert duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0.0 s"), (0.612, "0.6 s"), (12, "12.0 s"), (600, "10 min")])
def test_pause_is_in_seconds_while_it_is_short(seconds: float, text: str) -> None:
    """The next attempt of a message."""
    assert pause(timedelta(seconds=seconds)) == text


def test_exit_of_a_killed_child_names_the_signal() -> None:
    """The log says SIGKILL instead of -9."""
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-200) == "was killed by signal 200"
