"""When a partition may go on behind those that it follows, and what it waits for there: decisions without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.left_keys import LeftKeys
from rsmq.consumer.waiting.limits import key_rate_of
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.seam import NOTHING, Left, has_unknown_keys, is_known
from rsmq.model.layout import Layout


class SeamQuestion:
    """Whether a lane may go on behind those before it. The server is asked meanwhile whether anything is left to read
    there; its answer counts only if all stands as it stood when it was asked."""

    def __init__(self, queue: Queue, lanes: Mapping[int, Lane], lane: Lane) -> None:
        self._queue = queue
        self._lanes = lanes
        self._lane = lane
        self.before = [lanes[each] for each in lane.parents if each in lanes]
        self._numbers = self._now()
        self._raw = [each for each in self.before if each.flows.raw_entries]

    def is_worth_asking(self) -> bool:
        """Whether this member has all of the partitions before, and knows all that it was given of them."""
        for each in self._raw:
            self._queue.unpack(each)
        return self._stands()

    def answer(self, left: Left = NOTHING) -> bool:
        """The server has nothing more to read there but what is `left`, and what it had given before is here. Returns
        whether the lane may be read now."""
        lane = self._lane
        is_searched = all(each.partition in left.searched for each in self.before if each.flows.named)
        if not (is_searched and self._stands()):
            return False
        seam = lane.seam or lane.go_on(self.before, left)
        if not seam.covers(left):  # a key came back: what runs here ends, and is taken over again behind it
            lane.lease.lose()
            return False
        seam.open(lane.recovery, left)
        return not lane.is_blocked

    def complete(self) -> None:
        """The server has nothing more to read there, and all that was not read when the lane went on is here."""
        seam = self._lane.seam
        if seam is None or not self._stands():
            return
        if seam.covers():
            seam.complete()
        else:
            self._lane.lease.lose()

    def _stands(self) -> bool:
        lane, queue = self._lane, self._queue
        if self._lanes.get(lane.partition) is not lane or not lane.lease.is_held() or lane.is_quiet:
            return False
        if [self._lanes.get(each) for each in lane.parents] != self.before or self._now() != self._numbers:
            return False
        return all(map(is_known, self.before)) and not (queue.takes_raw and any(map(has_unknown_keys, self.before)))

    def _now(self) -> list[int]:
        return [each.recovery.number for each in (self._lane, *self.before)]


def left_before(
    lane: Lane, before: Sequence[Lane], found: Iterable[LeftKeys], layout: Layout, *, is_read: bool
) -> Left | None:
    """What those before a lane have left for it, by what was `found` about them. None: of one of them it is not known.
    `is_read`: the server has nothing more to read there."""
    about = {each.lane: each for each in found if each.is_known}
    needed = [each for each in before if not is_read or each.flows.named]
    if any(each not in about for each in needed):
        return None
    keys, unread = set[bytes](), set[bytes]()
    for each in needed:
        named, may_come = each.flows.named, layout.keys_after(each.partition, lane.partition)
        all_unread = about[each].unread
        keys.update(key for key in filter(may_come, all_unread | about[each].waiting) if named.flow_of(key))
        if not is_read:
            unread.update(filter(may_come, all_unread))
    given = {} if is_read else {each.partition: about[each].given for each in needed}
    return Left(frozenset(each.partition for each in needed), frozenset(keys | unread), frozenset(unread), given)


def let_keys_go(queue: Queue, lanes: Mapping[int, Lane], lane: Lane) -> int:
    """Start what waits for keys that are free in the partitions before. Returns how many."""
    keys = () if lane.seam is None or lane.is_blocked else lane.seam.free()
    return _release(queue, lanes, lane, lane.parents, keys)


def is_settled(lanes: Mapping[int, Lane], lane: Lane) -> bool:
    """Whether nothing of the partitions before it is left in this member: the server may have lost that it is pending,
    if a consumer was deleted, and its audit gives it back."""
    return not any(before.in_flight or before.flows.far for each in lane.parents if (before := lanes.get(each)))


def follow(queue: Queue, lanes: Mapping[int, Lane], lane: Lane) -> int:
    """The partitions before it are finished. Returns how many keys have waited for them."""
    return _release(queue, lanes, lane, lane.parents, lane.follow())


def _release(queue: Queue, lanes: Mapping[int, Lane], lane: Lane, before: Sequence[int], keys: Iterable[bytes]) -> int:
    """The rate of a key counts what has started before since the lane has gone on."""
    released, limit = list(keys), key_rate_of(queue.message_rate)
    if released and limit is not None:
        for number in reversed(before):
            if number in lanes:
                limit.follow(lane, lanes[number], released)
    for key in released:
        queue.let_key_go(lane, key)
    return len(released)
