"""The life of lanes: opens them, makes them quiet, hands back what is in them, drops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from rsmq.consumer.owning.key_search import KeySearch
from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.following import SeamQuestion, follow, is_settled, left_before, let_keys_go
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import KeyRate, key_rate_of
from rsmq.consumer.waiting.seam import NOTHING, Left
from rsmq.errors import BrokerError
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.lease import Leases
from rsmq.model.clock import monotonic
from rsmq.model.message import Message
from rsmq.model.words import count
from rsmq.redis.scripts import KEEP_STARTS, REMOVE_CONSUMER

log = logging.getLogger("rsmq.consumer")


class LaneLifecycle:
    """What happens to lanes when their ownership changes.

    Dropping a lane is local and at once: when a lease is over, its messages must not go on. Everything else is a
    handover, and waits for the server and for running handlers.
    """

    def __init__(
        self,
        context: ConsumerContext,
        runner: Runner,
        settler: Settler,
        fetchers: Fetchers,
        leases: Leases,
        heartbeat: Heartbeat,
    ) -> None:
        self._context = context
        self._client, self._keys = context.client, context.keys
        self._member = context.member
        self._lanes, self._stats = context.lanes, context.stats
        self._runner = runner
        self._queue = runner.queue
        self._settler = settler
        self._fetchers = fetchers
        self._key_search = KeySearch(context, runner.queue, fetchers)
        self._leases = leases
        self._heartbeat = heartbeat

    # -- taking ---------------------------------------------------------------------------------------------------

    def open(self, lane: Lane) -> None:
        """A lease was granted: take over what is pending there, then read. The caller interrupts the fetchers."""
        self.begin(lane)
        self._stats["taken"] += 1
        log.debug("%s takes %s.%d/%s, epoch %s", self._member, lane.topic, lane.partition, lane.group, lane.epoch)

    def begin(self, lane: Lane) -> None:
        """Use a lane. Outputs that its last owner has left in the out-stream are relayed."""
        self._lanes[lane.partition] = lane
        lane.serve(
            self._runner.collect, self._runner.handler.retry.max_attempts, self._runner.limits, self._runner.notes
        )  # fmt: skip
        self._settler.outputs.relay.wake(lane)

    # -- behind partitions that are sealed ------------------------------------------------------------------------

    def question(self, lane: Lane) -> SeamQuestion:
        """Whether a lane may go on behind those that it follows."""
        return SeamQuestion(self._queue, self._lanes, lane)

    async def left_before(self, lane: Lane, before: Sequence[Lane], *, is_read: bool) -> Left | None:
        """What the partitions before a lane have left for it. None: that is not known yet. `is_read`: the server has
        nothing more to read there."""
        if is_read and not any(each.flows.named for each in before):
            return NOTHING
        found = await self._key_search.find(before, is_read=is_read)
        return left_before(lane, before, found, self._context.topic.layout, is_read=is_read)

    def let_keys_go(self, lane: Lane) -> None:
        """Start what waits for keys that are free in the lanes before this one."""
        if let_keys_go(self._queue, self._lanes, lane):
            self._runner.wake_soon()

    def is_settled(self, lane: Lane) -> bool:
        """Whether nothing of the partitions before it is left in this member."""
        return is_settled(self._lanes, lane)

    def follow(self, lane: Lane) -> None:
        """The partitions before it are finished."""
        self._key_search.forget()
        if follow(self._queue, self._lanes, lane):
            self._runner.wake_soon()

    async def restore_rate(self, lane: Lane) -> None:
        """Before `open`: take over when the last owner has started messages of the lane's keys, if they have a rate."""
        limit = key_rate_of(self._queue.message_rate)
        if limit is not None:
            await self._restore_from(lane.lease_key, lane, limit)

    async def _restore_from(self, lease_key: str, lane: Lane, limit: KeyRate) -> None:
        """Take over what the owner of a partition has left in its lease."""
        try:
            found = await self._client.execute_command("HGET", lease_key, "starts")
            if found:
                limit.unpack(lane, found)
        except BrokerError as error:
            log.warning("the rate of the keys in %s.%d begins anew: %s", lane.topic, lane.partition, error)

    async def follow_rate(self, lane: Lane) -> None:
        """Before a lane is read that follows others: take over when messages of its keys have started there."""
        limit = key_rate_of(self._queue.message_rate)
        if limit is None:
            return
        for number in reversed(lane.parents):
            before = self._lanes.get(number)
            if before is not None:
                limit.follow(lane, before)
            else:
                await self._restore_from(self._keys.lease(lane.topic, number, lane.group), lane, limit)
        await self._restore_from(lane.lease_key, lane, limit)

    async def leave_rate(self, lane: Lane) -> None:
        """Before the lease of a drained lane is given back: leave to the next owner when messages have started."""
        limit = key_rate_of(self._queue.message_rate)
        if limit is None:
            return
        with suppress(BrokerError):  # then the next owner begins anew
            await KEEP_STARTS(self._client, (lane.lease_key,), (self._member, lane.epoch, limit.pack(lane)))

    async def resume(self, lane: Lane) -> None:
        """Cancel a handover: what was handed back is taken over again."""
        lane.wake()
        await self._fetchers.interrupt()

    # -- letting go -----------------------------------------------------------------------------------------------

    def drop(self, lane: Lane) -> None:
        """The lease is lost or given back: forget the lane's messages and cancel its handlers, without the server."""
        was_held = lane.lease.is_held()
        lane.lease.lose()
        if self._lanes.get(lane.partition) is lane:
            del self._lanes[lane.partition]
            self._stats["released" if was_held else "lost"] += 1
        lane.drop_done()
        self._queue.withdraw(lane)
        if running := self._runner.running_of(lane):
            log.warning("lost %r: cancelling its %d running handlers", lane, running)
            self._runner.cancel_lane(lane, "lost")
        self._runner.forget_idle()
        self._runner.space.set()

    async def quiesce(self, lane: Lane, seconds: float) -> bool:
        """Stop reading a lane, hand back what has not started, wait for the rest. False: a handler still runs, or its
        outputs wait for room."""
        lane.quiet()
        await self._fetchers.exclude(lane.partition)
        await self._settler.end_numbered(lane)
        unsure = lane.flows.unsure()
        await self._settler.hand_back(lane, self._queue.withdraw(lane), unsure)
        deadline = monotonic() + seconds
        while (is_busy := self._runner.running_of(lane) or lane.recovery.claims) and monotonic() < deadline:
            await asyncio.sleep(0.01)
        if is_busy:
            return False
        # retries that have come meanwhile, or have a timer here, must not start in a lane that is given back
        await self._settler.hand_back(lane, self._queue.withdraw(lane))
        await self._settler.wait_until_settled([lane])
        return not lane.outgoing.waiting

    async def hand_back_unstarted(self, lanes: Iterable[Lane]) -> None:
        """Hand back at once what has not started. Without the server it is redelivered when the lease ends."""
        for lane in lanes:
            with suppress(BrokerError):
                await self._settler.end_numbered(lane)
            unsure = lane.flows.unsure()
            await self._hand_back(lane, self._queue.withdraw(lane), unsure)

    async def hand_back_held(self, lanes: Iterable[Lane]) -> None:
        """Hand back handled messages whose outputs have no room in a full target. Their handlers run again elsewhere.

        A call that is on its way may settle one of them: then it is not handed back.
        """
        for lane in lanes:
            await self._hand_back(lane, lane.outgoing.take_all())

    async def _hand_back(
        self, lane: Lane, messages: Sequence[Message], unsure: Collection[tuple[bytes, int]] = ()
    ) -> None:
        if (messages or unsure) and lane.lease.is_held():
            try:
                await self._settler.hand_back(lane, messages, unsure)
            except BrokerError as error:
                log.warning(
                    "cannot hand back %s: redelivered when the lease ends: %s", count(len(messages), "message"), error
                )

    async def release(self, lanes: Iterable[Lane]) -> None:
        """Give back the leases of lanes in which nothing runs; without a lease remove our consumer.

        The fetchers have ended. A read that may still be on its way is ended first, or named in its lease.
        """
        await self._fetchers.end_late_reads()
        for lane in sorted(lanes, key=lambda each: -len(each.parents)):  # those that follow others go first
            if not self._runner.running_of(lane):
                self.drop(lane)
                self._heartbeat.forget(lane.lease)
                if lane.epoch:
                    await self.leave_rate(lane)
                    await self._leases.release(lane.lease, self._fetchers.late_reader(lane.partition))
                else:
                    await REMOVE_CONSUMER(self._client, (lane.stream,), (lane.group, self._member))
