"""Quiet hours: when they end, in every zone, also when the clocks change."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo, available_timezones

import pytest

from rsmq import ConfigError, QuietHours

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
YEAR = datetime(2026, 1, 1, tzinfo=UTC)
WINDOWS = [(time(22), time(8)), (time(2), time(3)), (time(1, 30), time(1, 45)), (time(3), time(2, 15))]


def is_quiet(wall: time, start: time, end: time) -> bool:
    """The rule by itself."""
    return start <= wall < end if start < end else wall >= start or wall < end


def changes(zone: ZoneInfo) -> Iterator[datetime]:
    """The days of a year on which the clocks of a zone change."""
    for day in range(365):
        at = YEAR + day * DAY
        if at.astimezone(zone).utcoffset() != (at + DAY).astimezone(zone).utcoffset():
            yield at


@pytest.mark.parametrize(
    "name",
    ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "America/St_Johns", "Asia/Seoul"],
)
def test_quiet_hours_end_at_the_first_minute_of_the_wall_clock_that_is_not_quiet(name: str) -> None:
    """Around both changes of the clocks, for windows over midnight, in the gap and in the hour that comes twice."""
    zone, cases = ZoneInfo(name), 0
    for change in [*changes(zone), YEAR]:
        first = change - 12 * timedelta(hours=1)
        minutes = [first + number * MINUTE for number in range(3 * 1440)]
        walls = [each.astimezone(zone).time() for each in minutes]
        for start, end in WINDOWS:
            quiet, expected = QuietHours(start, end, default=name), minutes[-1]
            ends = {}
            for at in range(len(minutes) - 1, -1, -1):
                expected = expected if is_quiet(walls[at], start, end) else minutes[at]
                ends[at] = expected
            for at in range(0, 2 * 1440, 13):
                assert quiet.next(now=minutes[at]) == ends[at], (name, start, end, minutes[at])
                cases += 1
    assert cases > 800


def test_end_of_quiet_hours_by_the_next_time_on_the_calendar_is_wrong() -> None:
    """The scan is not there for nothing: what leaves out the hour that comes twice differs from it."""
    zone, quiet = ZoneInfo("Europe/Berlin"), QuietHours("02:00", "03:00", default="Europe/Berlin")
    now = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)  # 02:30, the first time
    naive = datetime.combine(now.astimezone(zone).date(), time(3), zone).astimezone(UTC)
    assert quiet.next(now=now) == naive == datetime(2026, 10, 25, 2, tzinfo=UTC)
    quiet = QuietHours("01:00", "02:30", default="Europe/Berlin")
    assert quiet.next(now=now - 40 * MINUTE) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    later = now + 30 * MINUTE  # 02:00, the second time: quiet again, to half past
    assert quiet.next(now=later) == datetime(2026, 10, 25, 1, 30, tzinfo=UTC)
    assert datetime.combine(later.astimezone(zone).date(), time(2, 30), zone).astimezone(UTC) < later


def test_quiet_hours_end_in_every_zone_of_the_database() -> None:
    """At its end, and not before, the wall clock of a zone is not quiet."""
    quiet = QuietHours("22:00", "08:00", default="UTC")
    for name in available_timezones():
        zone = ZoneInfo(name)
        for now in (YEAR, YEAR + 87.5 * DAY, YEAR + 297.6 * DAY):
            end = quiet.next(name, now=now)
            if end == now:
                assert not is_quiet(now.astimezone(zone).time(), time(22), time(8))
                continue
            assert not is_quiet(end.astimezone(zone).time(), time(22), time(8)), name
            assert is_quiet((end - MINUTE).astimezone(zone).time(), time(22), time(8)), name
            assert now < end <= now + 11 * timedelta(hours=1), name


def test_quiet_hours_of_a_message_are_those_of_its_zone() -> None:
    """Of a zone that is unknown or missing they are those of the default."""
    quiet = QuietHours("22:00", "08:00", zone=lambda message: message.headers.get("tz"), default="Asia/Seoul")
    now = datetime(2026, 6, 1, 21, tzinfo=UTC)

    class Sent:
        def __init__(self, **headers: str) -> None:
            self.headers = headers

    ends = [quiet.until(cast(Any, Sent(**each)), now) for each in ({"tz": "Europe/Berlin"}, {}, {"tz": "Mars/Base"})]
    assert ends == [datetime(2026, 6, 2, 6, tzinfo=UTC), datetime(2026, 6, 1, 23, tzinfo=UTC), *ends[1:2]]
    assert quiet.until(cast(Any, Sent(tz="America/New_York")), now) is None
    with pytest.raises(ConfigError, match="'Mars/Base' is no time zone, and the quiet hours have no default"):
        QuietHours("22:00", "08:00", zone=lambda message: message.headers["tz"]).next("Mars/Base")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"start": "25:00"}, "start='25:00' is no time of day in whole minutes: write start='22:00'"),
        ({"end": "08:00:30"}, "end='08:00:30' is no time of day"),
        ({"end": "22:00"}, "would never end"),
        ({"default": None}, "quiet hours need a zone"),
        ({"default": "Mars/Base"}, "default='Mars/Base' is no time zone"),
        ({"default": "localtime"}, "default='localtime' is no time zone"),
        ({"zone": "Europe/Berlin"}, "is no function"),
    ],
)
def test_quiet_hours_that_cannot_be_are_refused(arguments: dict[str, Any], text: str) -> None:
    """The error says what to write."""
    with pytest.raises(ConfigError, match=text):
        QuietHours(**{"start": "22:00", "end": "08:00", "default": "UTC", **arguments})


def test_next_moment_without_quiet_hours_by_the_clock_of_the_machine_is_in_utc() -> None:
    """A naive time is refused."""
    assert QuietHours("22:00", "08:00", default="UTC").next().tzinfo is UTC
    with pytest.raises(ConfigError, match="has no time zone"):
        QuietHours("22:00", "08:00", default="UTC").next(now=datetime(2026, 1, 1))
