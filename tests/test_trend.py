"""Rates and trends out of two snapshots: pure, so made by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from rsmq.snapshot import GroupPoint, MemberPoint, SharePoint, Snapshot, StreamPoint, TopicPoint
from rsmq.trend import GroupRow, compare

SHARE = SharePoint(
    partition=0, owner="w1", epoch=3, lease_left=timedelta(seconds=4), lag=100, read=50, oldest=timedelta(seconds=9),
    parked=2, dead_letters=1, in_hand={"w1": 8},
)  # fmt: skip
MEMBER = MemberPoint("w1", "bill", 64, timedelta(seconds=1), timedelta(milliseconds=3))


def look(at: float, *shares: SharePoint, added: int = 150) -> Snapshot:
    """One topic, one group."""
    group = GroupPoint("orders", "billing", "hash", False, (MEMBER,), shares or (SHARE,))
    return Snapshot(at, (TopicPoint("orders", (StreamPoint(0, added, 120, 5),), (group,)),))


def row(before: Snapshot | None, after: Snapshot) -> GroupRow:
    """The only group."""
    (group,) = compare(before, after).groups
    return group


def test_a_single_look_has_no_rates() -> None:
    """What needs two looks is not known; the rest is."""
    board = compare(None, look(10.0))
    assert (board.span, board.topics[0].rate_in) == (None, None)
    group = board.groups[0]
    assert (group.rate_out, group.growth, group.trend, group.empty_in) == (None, None, "", None)
    assert (group.lag, group.in_hand, group.parked, group.dead_letters, group.owned) == (100, 8, 2, 1, 1)
    assert group.oldest == timedelta(seconds=9)


def test_rates() -> None:
    """In: what was added. Out: what was read and is neither in hand nor parked."""
    later = replace(SHARE, lag=60, read=130, parked=0, in_hand={"w1": 10}, dead_letters=4)
    board = compare(look(10.0), look(12.0, later, added=190))
    group = board.groups[0]
    assert board.span == timedelta(seconds=2)
    assert board.topics[0].rate_in == 20.0
    assert group.rate_out == ((130 - 10) - (50 - 8 - 2)) / 2
    assert group.growth == (70 - 110) / 2
    assert (group.trend, group.empty_in) == ("shrinking", timedelta(seconds=3.5))
    assert group.new_dead_letters == 3


def test_what_waits_for_a_retry_is_not_settled() -> None:
    """Parking acknowledges, and must not look like work that was done."""
    parked = replace(SHARE, parked=10, in_hand={})
    assert row(look(0.0), look(1.0, parked)).rate_out == 0.0


def test_growing_and_steady() -> None:
    """The trend is of the whole backlog; a change of nearly nothing is none."""
    assert row(look(0.0), look(1.0, replace(SHARE, lag=300))).trend == "growing"
    assert row(look(0.0), look(1.0)).trend == "steady"
    assert row(look(0.0), look(1.0)).empty_in is None


def test_a_reset_or_new_topic_has_no_rate() -> None:
    """Counters that went back, or are not known, make no negative rate."""
    reset = replace(SHARE, read=0, lag=150, in_hand={}, parked=0)
    assert row(look(0.0), look(1.0, reset)).rate_out is None
    unknown = replace(SHARE, read=None, lag=None)
    group = row(look(0.0), look(1.0, unknown))
    assert (group.rate_out, group.lag, group.growth) == (None, None, None)
    assert compare(look(0.0, added=9), look(1.0, added=2)).topics[0].rate_in is None
    assert compare(Snapshot(0.0, ()), look(1.0)).topics[0].rate_in is None


def test_an_owner_whose_lease_ran_out_is_nobody() -> None:
    """A share without a running lease is not owned."""
    group = row(None, look(0.0, replace(SHARE, lease_left=timedelta(seconds=-1)), replace(SHARE, lease_left=None)))
    assert [share.owner for share in group.shares] == ["", ""]


def test_members() -> None:
    """A member has in hand what its shares say; without a heartbeat nobody serves."""
    board = compare(None, look(0.0, SHARE, replace(SHARE, partition=1, in_hand={"w1": 1, "w2": 5})))
    (member,) = board.members
    assert (member.in_hand, member.partitions, member.loop_lag) == (9, (0, 1), timedelta(milliseconds=3))
    assert not board.groups[0].is_unserved
    dead = GroupPoint("orders", "billing", "hash", False, (replace(MEMBER, heard_ago=None),), ())
    assert row(None, Snapshot(0.0, (TopicPoint("orders", (), (dead,)),))).is_unserved
