"""Which partitions are ours: follows the assignment, takes free leases, hands over what is assigned to others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import anyio.lowlevel

from rsmq.consumer.owning.families import Families
from rsmq.consumer.owning.lane_lifecycle import LaneLifecycle
from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.settling.settling_nodes import SettlingNodes
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import call_quotas
from rsmq.consumer.waiting.seam import NOTHING
from rsmq.errors import BrokerError, BrokerUnavailable, NotPermitted
from rsmq.heartbeat.assignment import eligible
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.lease import Leases
from rsmq.heartbeat.membership import Membership
from rsmq.heartbeat.partition_log import PartitionLog
from rsmq.model.clock import monotonic
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.member import RELEASED, news_of
from rsmq.redis.client.connector import retrying
from rsmq.redis.layouts import are_finished, note_unfinished
from rsmq.redis.pubsub import announce

log = logging.getLogger("rsmq.lease")

SETTLED_SECONDS: Final = 2.0
"""Between two checks of a member that has all its partitions: changes are announced."""
TOGETHER: Final = 0.05
"""Seconds in which granted leases gather before the fetcher hears of them: each time it reads all its lanes again."""


class Rebalancer:
    """Hash distribution: one owner per partition. Wrong membership costs fairness here, never correctness.

    A lease that is not held any more is dropped at once and locally. A partition that is assigned to another member is
    handed over: quiet, drain, settle, release, announce. If a handler runs too long for that, it is kept for now.
    A lease whose grant may have been lost with its reply is asked for again, if only to hand it over.
    """

    def __init__(
        self,
        context: ConsumerContext,
        fetchers: Fetchers,
        lifecycle: LaneLifecycle,
        leases: Leases,
        heartbeat: Heartbeat,
        membership: Membership,
        settling: SettlingNodes | None = None,
    ) -> None:
        self._context = context
        self._settling = settling
        self._settings = context.settings
        self._lanes = context.lanes
        self._name = context.topic.name
        self._group = context.handler.group
        self._member = context.member
        self._fetchers, self._lifecycle = fetchers, lifecycle
        self._leases = leases
        self._heartbeat = heartbeat
        self._membership = membership
        self._released = news_of(RELEASED, [self._member])
        self._given: object = None
        self._families = Families(context.topic.layout)
        self._assigned_last = frozenset[int]()  # as computed from `_given`
        self._leaving: set[int] = set()
        self._kept: set[int] = set()  # not handed over, because a handler has run for too long
        self._unsure: set[int] = set()  # asked for, no reply yet: the server may have granted the lease
        self._newer = dict[int, int]()  # epochs that a service's database knows of these partitions
        self._throttled = ThrottledLog(log)
        self._partition_log = PartitionLog(context.name, context.worker_log.partitions)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow the membership until cancelled."""
        task_status.started()
        tick = self._settings.presence_interval.total_seconds()
        async with anyio.create_task_group() as tasks:
            while True:
                seen = self._membership.changes
                self._drop_lost()
                assigned = self._assigned()
                self._fetchers.keep(assigned)
                try:
                    await self._take_missing(assigned)
                    await self._note_families(await self._start_following())
                except BrokerError as error:
                    self._throttled.warn("rebalancing waits for the server", error)
                for partition, lane in self._lanes.items():
                    follow_first = lane.followers and not self._are_gone(lane, assigned)
                    if partition not in assigned and partition not in self._leaving and not follow_first:
                        self._leaving.add(partition)
                        tasks.start_soon(self._hand_over, lane)
                is_settled = assigned == self._lanes.keys() and not any(lane.parents for lane in self._lanes.values())
                self._partition_log.note(self._lanes.keys(), assigned, len(self._context.topic.numbers))
                await self._membership.wait(SETTLED_SECONDS if is_settled else tick, seen)

    def _assigned(self) -> set[int]:
        """The partitions of all bands that belong together have one owner, and so has a family."""
        if not self._membership.is_member:
            return set()
        layout, view = self._context.topic.layout, self._membership
        given = layout, tuple(self._owners()), dict(view.unreadable), view.unfinished
        if self._given != given:  # asked for several times a second, changes only with a join or leave
            self._given, self._families = given, Families(layout, view.unfinished)
            self._assigned_last = self._families.owned_by(self._member, given[1], self._context.name, given[2])
        return set(self._assigned_last)

    def _are_gone(self, lane: Lane, assigned: set[int]) -> bool:
        """Whether no lane that goes on behind this one is to be handed over, too: it would lose its lease with this."""
        return not any(each.follows(lane) and each.partition not in assigned for each in lane.followers)

    async def _start_following(self) -> dict[tuple[int, ...], bool]:
        """Read partitions that follow others in a resize: when these are finished, or behind them if this member has
        them, too. Both is asked under the lease: a reset of the group ends it. Returns which of these are finished."""
        following = [lane for lane in self._lanes.values() if lane.parents]
        if not following:
            return {}
        finished = {parents: await self._are_finished(parents) for parents in {lane.parents for lane in following}}
        has_more = any(finished.values())
        for lane in sorted(following, key=lambda each: len(each.parents)):
            if finished[lane.parents] and self._lifecycle.is_settled(lane):
                log.debug("%r follows: the partitions before it are finished", lane)
                if lane.is_blocked:
                    await self._lifecycle.follow_rate(lane)
                self._lifecycle.follow(lane)
            else:
                has_more = await self._go_on(lane) or has_more
        if has_more:
            await self._fetchers.interrupt()
        return finished

    async def _note_families(self, finished: Mapping[tuple[int, ...], bool]) -> None:
        """Let the members of the group know which sealed partitions are finished, or are not any more, and which stay
        here because a handler runs for too long. `finished`: the answers of the server, now, about those that lanes
        follow."""
        layout, view = self._context.topic.layout, self._membership
        if not layout.is_resized:
            return
        found = {
            number: not lane.parents for number, lane in self._lanes.items()
            if lane.lease.is_held() and (not lane.parents or lane.parents in finished)
        }  # fmt: skip
        self._kept &= self._lanes.keys()
        while True:
            families = Families(layout, view.unfinished)
            now, kept = families.found(found), families.kept_with(self._member, self._kept)
            if families.unfinished == now and families.kept == kept:
                return
            about = self._context.client, self._context.keys, self._name, self._group
            view.noted(await note_unfinished(*about, view.unfinished, families.note(now, kept)))

    async def _go_on(self, lane: Lane) -> bool:
        """Read a partition though those before it are not finished: the keys of all that these have left are known
        here, so it has to wait only for what is taken there. Returns whether it may be read from now on."""
        is_open = not lane.is_blocked
        if is_open:
            self._lifecycle.let_keys_go(lane)
        if is_open and (lane.seam is None or not lane.seam.is_partial):
            return False
        question = self._lifecycle.question(lane)
        if not question.is_worth_asking():
            return False
        is_read = await self._are_finished(lane.parents, is_read=True)
        if is_open and not is_read:
            return False
        left = NOTHING if is_open else await self._lifecycle.left_before(lane, question.before, is_read=is_read)
        if left is None:
            return False
        with anyio.move_on_after(self._settings.presence_interval.total_seconds()) as patience:
            for each in question.before:
                await self._fetchers.exclude(each.partition)  # what was read before the question is here now
        if is_open:
            if not patience.cancelled_caught:
                question.complete()
            return False
        await self._lifecycle.follow_rate(lane)
        if patience.cancelled_caught or not question.answer(left):
            return False
        log.debug("%r goes on behind the partitions before it", lane)
        return True

    async def _are_finished(self, parents: tuple[int, ...], *, is_read: bool = False) -> bool:
        topic, context = self._context.topic, self._context
        return all(map(topic.layout.is_sealed, parents)) and await are_finished(
            context.client, context.keys, topic.name, parents, self._group, is_read=is_read
        )

    def _owners(self) -> Sequence[str]:
        """The live members that may own partitions: with a limit over the group, those that may run calls. Where the
        topic has more than one block, not those that know none: they would read only what the first block has."""
        live, handler = eligible(self._membership.live, self._membership.outdated), self._context.handler
        if handler.most_calls is None:
            return live
        limit = handler.most_calls - handler.bands.reserved
        if limit >= len(live):
            return live
        return [member for member, calls in call_quotas(limit, live, self._context.name).items() if calls]

    def _drop_lost(self) -> None:
        for lane in list(self._lanes.values()):
            if not lane.lease.is_held():
                self._newer[lane.partition] = max(self._newer.get(lane.partition, 0), lane.lease.newer)
                self._lifecycle.drop(lane)
                self._heartbeat.forget(lane.lease)

    async def _take_missing(self, assigned: set[int]) -> None:
        """Ask for the missing leases. Raises the first error at the end: it may concern one partition or one node."""
        failure: BrokerError | None = None
        missing = sorted((assigned | self._unsure) - self._lanes.keys())
        unread = [partition for partition in missing if not self._fetchers.reader(partition)]
        with anyio.move_on_after(self._settings.presence_interval.total_seconds()):
            for partition in unread:
                await self._fetchers.wait_for_reader(partition)
        opened_at = 0.0
        for partition in missing:
            if opened_at and monotonic() - opened_at > TOGETHER:
                await self._fetchers.interrupt()
                opened_at = 0.0
            reader = self._fetchers.reader(partition)
            if not reader:
                continue
            # shielded: a stop here would miss the reply, and a granted lease would not be given back
            with anyio.move_on_after(self._settings.command_timeout.total_seconds(), shield=True):
                try:
                    if await self._take(partition, reader):
                        opened_at = opened_at or monotonic()
                except BrokerError as error:
                    failure = failure or error
                    if self._settling is not None and isinstance(error, BrokerUnavailable | NotPermitted):
                        self._settling.failed(self._context.keys.stream(self._name, partition), error)
            await anyio.lowlevel.checkpoint_if_cancelled()
        if opened_at:
            await self._fetchers.interrupt()
        if failure is not None:
            raise failure

    async def _take(self, partition: int, reader: str) -> bool:
        """Ask for a lease. True: it was granted, and its lane is open."""
        topic, group, absences = self._name, self._group, self._heartbeat.absences
        if self._heartbeat.is_absent:
            return False
        self._unsure.add(partition)
        above, absent = self._newer.get(partition, 0), self._membership.absent
        lease = await self._leases.take(
            topic, partition, group, reader=reader, absent=absent, above=above,
            is_following=bool(self._context.parents_of(partition)),
        )  # fmt: skip
        if lease is not None:
            lane = self._context.lane(partition, lease)
            await self._lifecycle.restore_rate(lane)
        self._unsure.discard(partition)
        if lease is not None:
            self._heartbeat.renew(lease, lambda _: self._lifecycle.drop(lane))
            if self._heartbeat.absences > absences:  # it may have been taken away: ask for it again
                self._unsure.add(partition)
                self._heartbeat.forget(lease)
                return False
            self._lifecycle.open(lane)
        return lease is not None

    async def _hand_over(self, lane: Lane) -> None:
        try:
            if await self._lifecycle.quiesce(lane, self._settings.lease_ttl.total_seconds()):
                await self._lifecycle.leave_rate(lane)
                await self._release(lane)
                await announce(self._context.client, self._context.keys, self._name, self._group, self._released)
            elif lane.lease.is_held():
                self._kept.add(lane.partition)
                await self._lifecycle.resume(lane)
        except BrokerError as error:
            log.warning("cannot hand over %r yet: %s", lane, error)
            if self._membership.can_own(lane.partition):
                await self._lifecycle.resume(lane)
            else:  # it can neither read nor settle: what it has runs elsewhere when its lease ends
                lane.lease.lose()
        finally:
            self._leaving.discard(lane.partition)

    async def _release(self, lane: Lane) -> None:
        """Give back the lease of a drained lane. Retried, because no member may read there until the lease ends."""
        self._lifecycle.drop(lane)
        self._heartbeat.forget(lane.lease)
        async for attempt in retrying(self._settings):
            # shielded: no other role knows of this lease any more
            with attempt, anyio.move_on_after(self._settings.command_timeout.total_seconds(), shield=True):
                await self._leases.release(lane.lease, self._fetchers.late_reader(lane.partition))
