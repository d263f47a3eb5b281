"""When a message expires, from what its publisher says and what its entry holds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.errors import ConfigError
from rsmq.model.clock import ServerClock, monotonic, now_ms
from rsmq.model.expiry import expiry_fields, expiry_of

MOMENT = datetime(2040, 1, 1, tzinfo=UTC)
MOMENT_MS = 2_208_988_800_000


def test_a_duration_counts_from_the_storing_of_the_message() -> None:
    """By the server's clock, so the publisher's may be wrong."""
    assert expiry_fields(timedelta(hours=1), None) == ("expires", "+3600000")
    assert expiry_fields("90s", "dead") == ("expires", "+90000", "on_expiry", "dead")
    assert expiry_fields("90s", "drop") == ("expires", "+90000")
    assert expiry_fields(MOMENT, None) == ("expires", str(MOMENT_MS))


def test_the_duration_of_a_delayed_message_becomes_a_moment() -> None:
    """It is stored when it is due, perhaps late: that must not prolong its life. The clock is the server's."""
    assert expiry_fields("1h", None, "+60000", MOMENT_MS) == ("expires", str(MOMENT_MS + 3_600_000))


def test_a_moment_before_1970_has_expired() -> None:
    """The year 1 is what some write for "over long ago". With a sign no reader takes the field for an expiry."""
    (_, moment) = expiry_fields(datetime.min.replace(tzinfo=UTC), None)
    assert expiry_of({b"expires": moment.encode()}, MOMENT_MS) == 1


@pytest.mark.parametrize(
    ("expires", "on_expiry", "due", "text"),
    [
        (None, "dead", "", "needs expires"),
        ("1h", "later", "", "use 'drop' or 'dead'"),
        ("0s", None, "", "above 0"),
        (timedelta(days=9999), None, "", "up to 3650 days"),
        (5, None, "", "expires"),
        (datetime(2040, 1, 1), None, "", "no time zone"),
        ("1h", None, "+3600000", "never be handled"),
        (MOMENT, None, str(MOMENT_MS), "never be handled"),
    ],
)
def test_an_expiry_that_makes_no_sense_is_refused(expires: Any, on_expiry: Any, due: str, text: str) -> None:
    """With the reason, before anything is sent."""
    with pytest.raises(ConfigError, match=text):
        expiry_fields(expires, on_expiry, due)


@pytest.mark.parametrize(
    ("raw", "moment"),
    [(b"5", 5), (b"+5", 1005), (b"tomorrow", None), (b"", None), (b"-5", None), (b"9" * 16, None), (b"++5", None)],
)
def test_an_expiry_is_read_from_its_field(raw: bytes, moment: int | None) -> None:
    """A foreign client may use the name for a header of its own: that is no expiry."""
    assert expiry_of({b"expires": raw}, 1000) == moment


@given(st.binary(max_size=30))
def test_no_field_breaks_the_reader(raw: bytes) -> None:
    """Whatever another client has stored."""
    moment = expiry_of({b"expires": raw}, 1000)
    assert moment is None or moment >= 0


def test_the_server_clock_follows_what_the_server_said() -> None:
    """This machine's clock counts only until then."""
    clock = ServerClock()
    assert abs(clock.now_ms() - now_ms()) < 60_000
    clock.saw(monotonic() - 5, 10**9)
    assert 10**12 <= clock.now_ms() < 10**12 + 60_000
    assert clock.behind >= 5
    before = clock.now_ms()
    clock.moved += 3600
    assert clock.now_ms() >= before + 3_600_000
