"""States of one topic with one group, as the tests of pure code need them."""

from __future__ import annotations

from datetime import timedelta

from rsmq.inspector.state import GroupPartition, GroupState, MemberState, PartitionState, Snapshot, TopicState
from rsmq.redis.topics import Topic

LIMITS = Topic("orders", 1, 0, "reject", timedelta(days=1), 100_000, 0)
PART = GroupPartition(
    partition=0, owner="w1", epoch=3, lease_left=timedelta(seconds=4), unread=100, is_unread_exact=True, read=50,
    pending=8, waiting_for_retry=2, pending_for_retry=0, dead_letters=1, consumers=1, last_delivered_id="5-0",
    oldest=timedelta(seconds=9), oldest_in_stream=timedelta(seconds=9), overdue=None, pending_of={"w1": 8},
)  # fmt: skip
MEMBER = MemberState(
    topic="orders", group="billing", id="w1", handler="bill", concurrency=64, heard_ago=timedelta(seconds=1),
    loop_lag=timedelta(milliseconds=3), pending=8, partitions=(0,), layout=0,
)  # fmt: skip


def group_of(*shares: GroupPartition) -> GroupState:
    """The group with these partitions."""
    return GroupState(
        topic="orders", name="billing", distribution="hash", is_paused=False, members=("w1",),
        unread=sum(each.unread for each in shares), is_unread_exact=all(each.is_unread_exact for each in shares),
        pending=sum(each.pending for each in shares), waiting_for_retry=sum(each.waiting_for_retry for each in shares),
        pending_for_retry=sum(each.pending_for_retry for each in shares),
        dead_letters=sum(each.dead_letters for each in shares), shares=shares,
    )  # fmt: skip


def snapshot(at: float, *shares: GroupPartition, added: int = 150, member: MemberState = MEMBER) -> Snapshot:
    """One topic, one group, one member."""
    topic = TopicState(LIMITS, 120, 5, ("billing",), (PartitionState(0, 120, "1-0", "9-0", 5, added),))
    return Snapshot(at, (topic,), (group_of(*(shares or (PART,))),), (member,))
