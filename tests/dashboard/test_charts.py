"""What charts draw: failures from the counts of members, marks where processes have started, and stored minutes."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from rsmq.dashboard.chart import chart
from rsmq.dashboard.handler import failure_series, handlers_of
from rsmq.dashboard.history import read, sample_of
from rsmq.dashboard.html import Live
from rsmq.inspector.state import MemberState, ProcessState
from rsmq.inspector.trend import Board, compare
from rsmq.model.call_counts import CallCounts
from tests.inspector.states import MEMBER, snapshot

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)


def told(failed: int, retried: int = 0, started: datetime | None = None) -> MemberState:
    """The member after so many failures."""
    process = ProcessState(started=started, version="0.1.0", app_version="2.4.1")
    return replace(MEMBER, calls=CallCounts(failed=failed, retried=retried), process=process)


def board(failed: int, retried: int = 0, started: datetime | None = None) -> Board:
    """A board a minute after one without failures."""
    return compare(snapshot(0, member=told(0)), snapshot(60, member=told(failed, retried, started)))


def test_release_is_the_version_of_the_service_or_of_rsmq() -> None:
    """What a process says of itself, as far as it does."""
    known = [ProcessState(version="0.1.0", app_version="2.4.1"), ProcessState(version="0.1.0"), ProcessState()]
    assert [each.release for each in known] == ["2.4.1", "rsmq 0.1.0", ""]


def stored(*parts: object) -> list[bytes]:
    """A minute as the server has it."""
    return [b"z", zlib.compress(json.dumps(parts).encode())]


def test_marks_are_drawn_where_there_are_points() -> None:
    """One before the first point, or after the last one, is left out."""
    line = [(AT, 1.0), (AT + timedelta(minutes=2), 3.0)]
    marks = [(AT + timedelta(minutes=each), f"w{each} started") for each in (-1, 1, 3)]
    drawn = chart(Live(), "c", "title", {"in": line}, timedelta(minutes=5), marks)
    assert drawn.count('class="mark"') == 1
    assert "12:01:00 UTC: w1 started" in drawn


def test_failures_are_rates_over_ten_seconds() -> None:
    """Members tell their counts every few seconds: between two of them nothing seems to happen."""
    boards = [(AT + timedelta(seconds=at), board(10 * (at // 10))) for at in range(0, 31)]
    made = failure_series(boards)["failed"]
    assert {value for at, value in made if at >= AT + timedelta(seconds=11)} == {1.0}


def test_calls_of_a_handler_are_those_of_its_processes() -> None:
    """Since these began, and since an earlier look; a process that was not there then has told all since."""
    before, after = board(4).groups[0], board(9).groups[0]
    (found,) = handlers_of(after, before)
    assert (found.name, found.total.failed, found.recent.failed) == ("bill", 9, 5)
    (alone,) = handlers_of(after, None)
    assert alone.recent.failed == 9


def test_minute_keeps_failures_and_starts() -> None:
    """Those of another version, without them, are read as well, and what is broken is empty."""
    made = sample_of(AT, board(60, 30, AT - timedelta(seconds=20)))
    assert (made.total("failed", {"orders"}), made.total("retried", {"orders"}, "billing")) == (1.0, 0.5)
    assert (made.started({"orders"}), made.started({"orders"}, "other"), made.started({"x"})) == (1, 0, 0)
    assert sample_of(AT, board(0, 0, AT - timedelta(minutes=2))).starts == {}
    assert (made.released({"orders"}), made.released({"x"})) == (["2.4.1"], [])
    again = read(b"1-0", stored(made.topics, made.groups, made.starts, made.releases))
    assert (again.groups, again.starts, again.releases) == (made.groups, made.starts, made.releases)
    before = read(b"1-0", stored(made.topics, made.groups, made.starts))
    assert (before.starts, before.releases) == (made.starts, {})
    older = read(b"1-0", stored({"orders": 1.0}, {"orders/billing": [1, 2, 3, 4, 5, 6]}))
    assert (older.total("settled", {"orders"}), older.total("failed", {"orders"}), older.starts) == (1, None, {})
    assert read(b"1-0", stored({}, {"orders/billing": [1]})).groups == {}
