"""Rates and trends of two snapshots: pure code, so the snapshots are made by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from rsmq.inspector import text, trend
from rsmq.inspector.state import Snapshot
from rsmq.inspector.trend import GroupTrend, compare
from rsmq.model.held_name import HeldName
from rsmq.model.work import Work
from tests.inspector.states import MEMBER, PART, group_of, snapshot


def row(before: Snapshot | None, after: Snapshot) -> GroupTrend:
    """The only group."""
    (group,) = compare(before, after).groups
    return group


def test_single_snapshot_has_no_rates() -> None:
    """Rates need two snapshots; everything else is known."""
    board = compare(None, snapshot(10.0))
    assert (board.span, board.topics[0].rate_in) == (None, None)
    group = board.groups[0]
    assert (group.rate_out, group.growth, group.trend, group.empty_in) == (None, None, "", None)
    assert (group.unread, group.work, group.dead_letters, group.owned) == (
        100,
        Work(ready=8, waiting_for_retry=2),
        1,
        1,
    )
    assert group.oldest == timedelta(seconds=9)


def test_two_snapshots_make_rates() -> None:
    """In: what was added. Out: what was read, is not pending and waits for no retry."""
    later = replace(PART, unread=60, read=130, waiting_for_retry=0, pending=10, dead_letters=4)
    board = compare(snapshot(10.0), snapshot(12.0, later, added=190))
    group = board.groups[0]
    assert board.span == timedelta(seconds=2)
    assert board.topics[0].rate_in == 20.0
    assert group.rate_out == ((130 - 10) - (50 - 8 - 2)) / 2
    assert group.growth == (70 - 110) / 2
    assert (group.trend, group.empty_in) == ("shrinking", timedelta(seconds=3.5))
    assert group.new_dead_letters == 3


def test_backlog_is_the_sum_of_what_is_unread_ready_running_and_waiting() -> None:
    """What members said at a heartbeat, within what the server counts now: with key order a retry is pending, too."""
    said, part = Work(running=3, ready=1, waiting_for_key=2, waiting_for_retry=2), replace(PART, pending_for_retry=2)
    group = row(None, snapshot(0.0, part, member=replace(MEMBER, work=said)))
    assert group.work == Work(running=3, ready=1, waiting_for_key=2, waiting_for_retry=2)
    assert group.backlog == 100 + 8
    late = row(None, snapshot(0.0, replace(PART, pending=1), member=replace(MEMBER, work=said)))
    assert late.work == Work(running=1, waiting_for_retry=2), "the rest was settled since the heartbeat"
    dead = row(None, snapshot(0.0, part, member=replace(MEMBER, work=said, heard_ago=None)))
    assert dead.work == Work(ready=6, waiting_for_retry=2), "the next owner takes them over"


def test_message_whose_retry_is_due_and_that_waits_for_a_hold_counts_once() -> None:
    """It is parked and pending until it starts; its member says that it waits for a rate or a hold."""
    held = replace(PART, unread=0, pending_for_retry=2)
    group = row(None, snapshot(0.0, held, member=replace(MEMBER, work=Work(waiting_for_rate=8))))
    assert group.work == Work(waiting_for_rate=8)
    assert group.backlog == 8


def test_what_waits_for_a_time_is_waiting_and_no_backlog() -> None:
    """More workers would not do it sooner, so autoscalers do not count it; it is not ready either."""
    group = row(None, snapshot(0.0, member=replace(MEMBER, work=Work(running=1, waiting_for_time=6))))
    assert group.work == Work(running=1, ready=1, waiting_for_retry=2, waiting_for_time=6)
    assert group.backlog == 100 + 1 + 1 + 2


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("seconds", "work", "stalled"),
    [
        ((60,), Work(ready=1), 60),
        ((59,), Work(ready=1), None),
        ((60,), Work(waiting_for_key=9, waiting_for_retry=1), 60),  # behind a parked key
        ((360,), Work(running=1, ready=9), None),  # handlers may run for minutes
        ((600,), Work(running=1, ready=9), 600),
        ((60,), Work(waiting_for_rate=9, waiting_for_retry=9, waiting_for_time=9), None),  # these wait for a time
        ((600, 3), Work(ready=1), None),  # another member settles
        ((600, None), Work(ready=1), 600),  # another member never had anything
        ((None,), Work(ready=1), None),  # an older version does not say
    ],
)
def test_group_is_stalled_that_settles_nothing_though_it_could(
    seconds: tuple[int | None, ...], work: Work, stalled: int | None
) -> None:
    """From a minute on; a paused, held or unserved group has another name."""
    told = [replace(MEMBER, work=work, settled_nothing_for=each and timedelta(seconds=each)) for each in seconds]
    state = group_of(PART)
    found = trend.stalled(state, told)
    assert found == (None if stalled is None else timedelta(seconds=stalled))
    assert trend.stalled(replace(state, is_paused=True), told) is None
    assert trend.stalled(replace(state, holds=(HeldName("", 2, 1, "command"),)), told) is None
    assert trend.stalled(state, [replace(each, heard_ago=None) for each in told]) is None


def test_stalled_group_is_not_running() -> None:
    """The word beside its name."""
    told = replace(MEMBER, work=Work(ready=8), settled_nothing_for=MINUTE)
    assert text.state(row(None, snapshot(0.0, member=told))) == "stalled"
    assert text.state(row(None, snapshot(0.0))) == "running"


def test_member_that_has_not_told_for_two_beats_is_named() -> None:
    """Its messages count as ready, and the numbers say that this is a bound. One without messages hides nothing."""
    late = row(None, snapshot(0.0, member=replace(MEMBER, has_told=False)))
    assert late.untold == ("w1",)
    assert text.ready(late) == "<= 8"
    assert text.untold(late) == "w1 has not told lately what becomes of its messages: they count as ready"
    for member in (MEMBER, replace(MEMBER, has_told=False, pending=0), replace(MEMBER, has_told=False, heard_ago=None)):
        group = row(None, snapshot(0.0, member=member))
        assert (group.untold, text.ready(group), text.untold(group)) == ((), "8", "")


def test_parked_message_is_not_counted_as_settled() -> None:
    """Parking acknowledges a message, but it is not settled."""
    parked = replace(PART, waiting_for_retry=10, pending=0)
    assert row(snapshot(0.0), snapshot(1.0, parked)).rate_out == 0.0


def test_trend_says_growing_or_steady() -> None:
    """The trend is of the whole backlog; a change of nearly nothing is none."""
    assert row(snapshot(0.0), snapshot(1.0, replace(PART, unread=300))).trend == "growing"
    assert row(snapshot(0.0), snapshot(1.0)).trend == "steady"
    assert row(snapshot(0.0), snapshot(1.0)).empty_in is None


def test_reset_or_new_topic_has_no_rate() -> None:
    """Counters that went back, or are not known, make no negative rate."""
    reset = replace(PART, read=0, unread=150, pending=0, waiting_for_retry=0)
    assert row(snapshot(0.0), snapshot(1.0, reset)).rate_out is None
    unknown = replace(PART, read=None, is_unread_exact=False)
    group = row(snapshot(0.0), snapshot(1.0, unknown))
    assert (group.rate_out, group.unread, group.growth) == (None, None, None)
    assert compare(snapshot(0.0, added=9), snapshot(1.0, added=2)).topics[0].rate_in is None
    assert compare(Snapshot(0.0, (), (), ()), snapshot(1.0)).topics[0].rate_in is None


def test_partition_with_expired_lease_is_not_owned() -> None:
    """Without a running lease a partition has no owner."""
    expired, free = replace(PART, lease_left=timedelta(seconds=-1)), replace(PART, lease_left=None)
    group = row(None, snapshot(0.0, PART, expired, free))
    assert [share.is_owned for share in group.shares] == [True, False, False]
    assert group.owned == 1


def test_group_without_live_member_is_unserved() -> None:
    """A member whose heartbeat has expired serves nothing."""
    board = compare(None, snapshot(0.0))
    assert board.members == (MEMBER,)
    assert not board.groups[0].is_unserved
    assert row(None, snapshot(0.0, member=replace(MEMBER, heard_ago=None))).is_unserved
