"""Time: what a person passes and what is on the wire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.errors import ConfigError
from rsmq.model.clock import epoch_ms, from_epoch_ms, monotonic, now_ms, to_ms

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


@given(st.integers(-(10**12), 10**12))
def test_spans_are_whole_milliseconds(ms: int) -> None:
    """A span of milliseconds is that many."""
    assert to_ms(timedelta(milliseconds=ms)) == ms


@given(MOMENTS)
def test_moments_survive_the_wire(moment: datetime) -> None:
    """A moment comes back in UTC, cut off to its millisecond: never later than it was."""
    back = from_epoch_ms(epoch_ms(moment))
    assert timedelta(0) <= moment - back < timedelta(milliseconds=1)
    assert back.tzinfo is UTC


def test_the_zone_does_not_matter() -> None:
    """The same moment in another zone is the same number."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert epoch_ms(noon) == epoch_ms(noon.astimezone(timezone(timedelta(hours=9)))) == 1_767_268_800_000


def test_a_naive_datetime_is_refused() -> None:
    """A datetime without a zone names no moment."""
    with pytest.raises(ConfigError, match=r"pass an aware datetime, such as datetime.now\(UTC\)"):
        epoch_ms(datetime(2026, 1, 1))


def test_wall_clock_is_in_ms_and_monotonic_does_not_go_back() -> None:
    """The wall clock is in milliseconds, the monotonic one never goes back."""
    assert from_epoch_ms(now_ms()).year >= 2025
    assert monotonic() <= monotonic()
