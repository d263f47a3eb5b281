"""The notes on failed attempts: what is written is read again, and anything else is left out."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rsmq.model.failed_attempt import FailedAttempt, failed_attempts, from_field, read_note, to_field

FIRST = FailedAttempt(1, datetime(2024, 6, 10, 6, 13, 20, tzinfo=UTC), "OSError: no paper")
SECOND = FailedAttempt(2, datetime(2024, 6, 10, 6, 13, 21, 500_000, tzinfo=UTC), 'ValueError: "ö"\nsecond line')


def test_notes_of_the_server() -> None:
    """The newest note stands alone, those before it are a list."""
    past = b'["1 1718000000000 OSError: no paper"]'
    newest = '2 1718000001500 ValueError: "ö"\nsecond line'.encode()
    assert failed_attempts(newest, past) == (FIRST, SECOND)
    assert failed_attempts(newest, None) == (SECOND,)
    assert failed_attempts(None, None) == ()


def test_notes_that_are_not_utf8_are_read_as_far_as_they_are_text() -> None:
    """A note that was cut within a character does not cost the others."""
    past = b'["1 1718000000000 \xe6\x95", "2 1718000001500 whole"]'
    assert [(each.attempt, each.error) for each in failed_attempts(None, past)] == [(1, "\ufffd"), (2, "whole")]


def test_field_of_a_dead_letter() -> None:
    """What is written is read again."""
    assert from_field(to_field([FIRST, SECOND]).encode()) == (FIRST, SECOND)
    assert from_field(None) == ()


@pytest.mark.parametrize(
    "raw", [b"", b"x y z", b"1 x y", b"\xff", b"{}", b"[1, null, {}, [], \"x\"]", b"[" * 5000, b'[{"attempt": -1}]']
)  # fmt: skip
def test_what_another_client_has_written(raw: bytes) -> None:
    """It is left out."""
    assert failed_attempts(raw, raw) == from_field(raw) == ()


def test_a_time_far_away() -> None:
    """Is the last one that can be shown."""
    late = read_note(f"3 {10**18} x")
    assert late
    assert late.at.year == 9999
