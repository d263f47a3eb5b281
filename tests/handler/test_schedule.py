"""Schedules are a pure function of time: these tests pass the clock as an argument."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq import Broker, ConfigError, Message, Settings
from rsmq.handler.schedule import Cron, DueTicks, Interval, build_schedule, due_ticks
from rsmq.model.clock import epoch_ms, from_epoch_ms
from tests.patience import until

BERLIN = ZoneInfo("Europe/Berlin")
HOUR = 3_600_000
GRACE = 12_000


def ticks(times: Cron, start: datetime, count: int) -> list[str]:
    """The first ticks after a moment, in local time."""
    found, ms = [], epoch_ms(start)
    for _ in range(count):
        ms = times.after(ms)
        found.append(from_epoch_ms(ms).astimezone(times.zone).isoformat())
    return found


def test_cron_follows_its_time_zone() -> None:
    """The expression means the local time of its zone."""
    times = Cron("30 9 * * MON-FRI", BERLIN)
    assert ticks(times, datetime(2026, 1, 2, 12, tzinfo=UTC), 2) == [
        "2026-01-05T09:30:00+01:00",
        "2026-01-06T09:30:00+01:00",
    ]


def test_cron_ticks_after_the_gap_when_clocks_go_forward() -> None:
    """02:30 does not exist that day and ticks right after the gap; an hourly schedule ticks every hour."""
    start = datetime(2026, 3, 28, 23, tzinfo=UTC)
    assert ticks(Cron("30 2 * * *", BERLIN), start, 2) == ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]
    assert ticks(Cron("0 * * * *", BERLIN), start, 3) == [
        "2026-03-29T01:00:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-29T04:00:00+02:00",
    ]  # fmt: skip


def test_cron_ticks_once_when_clocks_go_back() -> None:
    """02:30 occurs twice that night and ticks once; an hourly schedule ticks every hour."""
    start = datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    assert ticks(Cron("30 2 * * *", BERLIN), start, 2) == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]
    assert ticks(Cron("0 * * * *", BERLIN), start, 3) == [
        "2026-10-25T02:00:00+02:00", "2026-10-25T02:00:00+01:00", "2026-10-25T03:00:00+01:00",
    ]  # fmt: skip


@given(
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "Pacific/Apia"]),
    st.sampled_from(["30 2 * * *", "45 1,2,3 * * *", "30 0-4 * * *", "*/7 * * * *", "0 * * * *", "* 2 * * *"]),
    st.integers(0, 365 * 24 * 60),
    st.integers(0, 59_999),
)
def test_cron_until_and_after_agree_in_each_hour_of_a_year(zone: str, expression: str, minute: int, ms: int) -> None:
    """Also where the clocks change, by half an hour, one or two: `until` and `after` enclose a moment, and nothing lies
    between them."""
    times, moment = Cron(expression, ZoneInfo(zone)), epoch_ms(datetime(2026, 1, 1, tzinfo=UTC)) + minute * 60_000 + ms
    assert times.until(moment) <= moment < times.after(moment) == times.after(times.until(moment))


@pytest.mark.parametrize("minute", range(60))
def test_daily_tick_is_not_due_again_in_the_hour_that_comes_twice(minute: int) -> None:
    """Before, the function of a schedule for 02:30 was called every two seconds from the second 02:00 to 02:30, and
    `rsmq schedule list` showed a next time that was over."""
    times, now = Cron("30 2 * * *", BERLIN), datetime(2026, 10, 25, 1, minute, tzinfo=UTC)
    published, tomorrow = datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    found = due_ticks(times, "latest", epoch_ms(published), epoch_ms(now), GRACE)
    assert (found.ticks, found.next_ms) == ((), epoch_ms(tomorrow))
    missed = due_ticks(times, "skip", epoch_ms(published) - 1, epoch_ms(now), GRACE)
    assert (missed.ticks, missed.skipped, missed.missed) == ((), 1, epoch_ms(published))


@given(st.integers(0, 4_000_000_000_000), st.integers(100, 90_000_000))
def test_interval_is_independent_of_its_start(ms: int, span: int) -> None:
    """Ticks are multiples of the span; `after` is strictly later, `until` is not, and nothing lies between."""
    times = Interval(span)
    assert times.until(ms) <= ms < times.after(ms) == times.until(ms) + span
    assert times.after(ms) % span == 0


@given(st.integers(1_000_000_000_000, 2_000_000_000_000), st.sampled_from(["*/5 * * * *", "0 9 * * *", "15 3 1 * *"]))
def test_cron_until_and_after_agree(ms: int, expression: str) -> None:
    """`until` and `after` enclose a moment, and nothing lies between them."""
    times = Cron(expression, UTC)
    assert times.until(ms) <= ms < times.after(ms) == times.after(times.until(ms))


@given(st.lists(st.integers(0, 40 * HOUR), min_size=1, max_size=30), st.sampled_from([1000, 60_000, HOUR]))
def test_each_tick_is_due_once_at_any_polling_times(polls: list[int], span: int) -> None:
    """Polled often enough, every tick is due once; after a pause only the latest of the missed ones."""
    times, last, seen = Interval(span), 0, list[int]()
    for now in sorted(polls):
        found = due_ticks(times, "latest", last, now, GRACE)
        fresh = [tick for tick in found.ticks if tick > now - GRACE]
        assert fresh == [tick for tick in range(0, now + 1, span) if last < tick <= now and tick > now - GRACE]
        assert len(found.ticks) - len(fresh) == int(times.until(max(0, now - GRACE)) > last)
        assert found.next_ms > now
        seen += found.ticks
        last = max([last, *found.ticks])
    assert seen == sorted(set(seen))


def test_missed_ticks_publish_the_latest_or_none() -> None:
    """After three hours without a worker the latest is published, or none; a takeover within the grace misses none."""
    hourly, now = Interval(HOUR), 10 * HOUR + 1_800_000
    assert due_ticks(hourly, "latest", 7 * HOUR, now, GRACE) == DueTicks((10 * HOUR,), 11 * HOUR, 2, 9 * HOUR)
    assert due_ticks(hourly, "skip", 7 * HOUR, now, GRACE) == DueTicks((), 11 * HOUR, 3, 10 * HOUR)
    assert due_ticks(hourly, "latest", 9 * HOUR, now, GRACE) == DueTicks((10 * HOUR,), 11 * HOUR)
    for missed in ("latest", "skip"):
        found = due_ticks(Interval(1000), missed, 100_000, 106_500, GRACE)  # type: ignore[arg-type]
        assert found == DueTicks((101_000, 102_000, 103_000, 104_000, 105_000, 106_000), 107_000)


def test_long_outage_computes_only_recent_ticks() -> None:
    """Ticks of a year without workers are not computed."""
    found = due_ticks(Interval(100), "latest", 0, 365 * 24 * HOUR, GRACE)
    assert len(found.ticks) == 121


def test_message_id_names_schedule_and_tick() -> None:
    """The same tick has the same id in every process."""
    every = build_schedule(lambda: None, timedelta(minutes=1), "t", name="clock")
    assert build_schedule(lambda: None, "1m", "t", name="clock").trigger == every.trigger
    assert every.message_id(60_000) == "clock@1970-01-01T00:01:00+00:00"


def test_function_gets_the_tick_in_its_time_zone() -> None:
    """A function without parameters gets nothing."""
    given = build_schedule(lambda at: at.isoformat(), "0 9 * * *", "t", name="x", timezone="Europe/Berlin")
    assert given.call(0) == "1970-01-01T01:00:00+01:00"
    assert build_schedule(lambda: "now", "0 9 * * *", "t", name="x").call(0) == "now"


@pytest.mark.parametrize(
    ("schedule", "options", "problem"),
    [
        ("every hour", {}, "'every hour' is not a valid cron expression"),
        ("61 * * * *", {}, "not a valid cron expression .Bad minute."),
        ("*/10 * * * * *", {}, "has six fields: use five .minute hour day month weekday.*'10s'"),
        ("0 9 * * 1 2026", {}, "has six fields: use five"),
        ("@daily", {}, "not a valid cron expression"),
        (timedelta(hours=1), {"timezon": "UTC"}, "schedule clock: unknown option 'timezon'. Did you mean timezone?"),
        (3600, {}, "3600 is neither an interval nor a cron expression: write an interval such as '5m'"),
        ("3600", {}, "'3600' is not a valid cron expression .*: write an interval such as '5m'"),
        (timedelta(0), {}, "every 0 s is too often, use 100 ms at least"),
        ("* * * * *", {"timezone": "Mars"}, "there is no time zone 'Mars'"),
        ("* * * * *", {"timezone": "localtime"}, "'localtime' is another zone on each machine"),
        ("* * * * *", {"missed": "all"}, "use 'latest' or 'skip'"),
        ("* * * * *", {"name": "a b"}, "schedule name 'a b' is not allowed"),
        ("* * * * *", {"headers": {"customer": 7}}, "schedule clock: headers=.'customer': 7.: names and values must"),
        ("* * * * *", {"headers": {"customer": "\ud800"}}, "schedule clock: headers=.* are not valid Unicode"),
    ],
)
def test_impossible_schedule_is_refused(schedule: Any, options: dict[str, Any], problem: str) -> None:
    """The error comes when the schedule is registered."""
    with pytest.raises(ConfigError, match=problem):
        build_schedule(lambda: None, schedule, "t", **{"name": "clock", **options})


def test_function_with_two_parameters_is_refused() -> None:
    """It takes the time of the tick, or nothing."""
    with pytest.raises(ConfigError, match="has 2 parameters"):
        build_schedule(lambda a, b: None, timedelta(hours=1), "t", name="clock")


async def test_a_tick_expires_from_its_scheduled_time(settings: Settings) -> None:
    """Also one that is published late; an expiry that makes no sense is refused where it is written."""
    schedule = build_schedule(lambda: 1, "5m", "t", name="s", expires="1h", on_expiry="dead")
    assert schedule.expiry(1_700_000_000_000) == ("expires", "1700003600000", "on_expiry", "dead")
    assert build_schedule(lambda: 1, "5m", "t", name="s").expiry(5) == ()
    for wrong in ({"expires": "0s"}, {"on_expiry": "dead"}, {"expires": 5}):
        with pytest.raises(ConfigError, match=r"schedule s: .*expires"):
            build_schedule(lambda: 1, "5m", "t", name="s", **wrong)  # type: ignore[arg-type]
    got, broker = list[Message](), Broker(settings)

    @broker.handler("t", group="g")
    async def handle(message: Message) -> None:
        got.append(message)

    broker.every("100ms", "t", name="quick", expires="1h")(lambda: 1)
    async with broker.running():
        await until(lambda: got, "a tick is handled")
    name, _, moment = got[0].id.partition("@")
    assert (name, got[0].expires) == ("quick", datetime.fromisoformat(moment) + timedelta(hours=1))
