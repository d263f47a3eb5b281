"""Durations as users write them: one parser for settings, options and commands."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rsmq import ConfigError
from rsmq.model.duration import checked_duration, parse_duration
from rsmq.model.words import duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", timedelta(milliseconds=500)), ("5s", timedelta(seconds=5)), ("2m", timedelta(minutes=2)),
        ("2min", timedelta(minutes=2)), ("2h", timedelta(hours=2)), ("1d", timedelta(days=1)),
        ("1h30m", timedelta(minutes=90)), ("1d 2h", timedelta(hours=26)), ("0.5s", timedelta(milliseconds=500)),
        ("3.5 days", timedelta(hours=84)), ("1 day", timedelta(days=1)), ("0s", timedelta(0)),
        ("PT6S", timedelta(seconds=6)), ("p1d", timedelta(days=1)), ("-PT1S", timedelta(seconds=-1)),
    ],
)  # fmt: skip
def test_text_with_a_unit_is_a_duration(text: str, expected: timedelta) -> None:
    """Short forms, several units, and ISO 8601."""
    assert parse_duration(text) == expected
    assert checked_duration("delay", text) == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "5", "1.5", "s", "five", " 5s", "5s ", "5S", "5M", "1m1h", "1s 1s", "-5s", "1e3s", "٣s", "00:00:05", "P",
     "1_0s", "9999999999999d", "999999999999d", "5s\n", "5 h 3", "1,5s"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    """No unit, an unknown unit, the wrong order, or too large: nothing is guessed."""
    with pytest.raises(ValueError, match="text with a unit, such as 5s"):
        parse_duration(text)


@given(st.integers(0, 10**12))
@example(86_220_001)
@example(999_999)
@example(59_960)
def test_what_is_printed_can_be_read(milliseconds: int) -> None:
    """A duration from a log line can be pasted into a setting."""
    text = duration(timedelta(milliseconds=milliseconds))
    assert duration(parse_duration(text)) == text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "delay=5 is not a duration: it has no unit, so write delay='5s' for seconds, or a timedelta"),
        (0.5, "write delay='0.5s'"),
        ("5", "delay='5' is not a duration: it has no unit, so write delay='5s'"),
        ("soon", "delay='soon' is not a duration: write delay='5s' "),
        (True, "delay=True is not a duration: write delay='5s' "),
        (None, "delay=None is not a duration"),
        (float("nan"), "delay=nan is not a duration: write"),
    ],
)
def test_a_wrong_option_says_what_to_write(value: Any, says: str) -> None:
    """A ConfigError with the option's own name."""
    with pytest.raises(ConfigError) as caught:
        checked_duration("delay", value)
    assert says in str(caught.value)
