"""The warden of a member's lanes: opens them, quiets them, hands back what is in them, drops them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.consumer.intake import Intake
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.runner import Runner
from rsmq.consumer.settler import Settler
from rsmq.errors import BrokerError
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Leases
from rsmq.script import REMOVE_CONSUMER

log = logging.getLogger("rsmq.consumer")


class Warden:
    """What becomes of lanes when their ownership changes. `lanes` are those that this member has now.

    To drop one needs nobody's answer: when a lease is over, nothing of it may go on. All else is a handover, and waits.
    """

    def __init__(
        self,
        client: Client,
        member: str,
        lanes: dict[int, Lane],
        queue: Queue,
        runner: Runner,
        settler: Settler,
        intake: Intake,
        leases: Leases,
        beat: Beat,
        stats: Counter[str],
    ) -> None:
        self.lanes = lanes
        self._client = client
        self._member, self._queue, self._runner, self._settler = member, queue, runner, settler
        self._intake, self._leases, self._beat, self._stats = intake, leases, beat, stats

    # -- taking ---------------------------------------------------------------------------------------------------

    def reader(self, partition: int) -> str:
        """Which connection reads a partition; empty while there is none."""
        return self._intake.reader(partition)

    async def wait_for_reader(self, partition: int) -> None:
        """Until there is a reading connection: a lease must name it."""
        await self._intake.wait_for_reader(partition)

    async def open_lane(self, lane: Lane) -> None:
        """A lease was granted: take over what is pending there, then read."""
        self.lanes[lane.partition] = lane
        self._stats["taken"] += 1
        log.info("%s takes %s.%d/%s, epoch %s", self._member, lane.topic, lane.partition, lane.group, lane.epoch)
        await self.interrupt()

    async def resume_lane(self, lane: Lane) -> None:
        """Keep a lane after all: what was handed back is taken over again."""
        lane.begin_anew()
        lane.is_quiet = False
        await self.interrupt()

    async def interrupt(self) -> None:
        """Let the readers look at the lanes now; one that cannot be woken does so when its read ends."""
        try:
            await self._intake.interrupt()
        except BrokerError as error:
            log.debug("the reader could not be woken: %s", error)

    def settle_again(self, lane: Lane, ids: Collection[bytes]) -> None:
        """Acknowledge what was settled before, which is harmless: the auditor has made it pending meanwhile."""
        if ids and not lane.done:
            self._settler.note(lane)
        lane.done.extend(ids)

    # -- letting go -----------------------------------------------------------------------------------------------

    def drop_lane(self, lane: Lane) -> None:
        """The lease is lost or given back: forget everything of it, and cancel what runs, without asking anybody."""
        was_held = lane.lease.is_held()
        lane.lease.lose()
        if self.lanes.get(lane.partition) is lane:
            del self.lanes[lane.partition]
            self._stats["released" if was_held else "lost"] += 1
        lane.done.clear()
        self._queue.withdraw(lane)
        if lane.running:
            log.warning("lost %r while %d handlers ran: they are cancelled", lane, lane.running)
            self._runner.cancel_lane(lane, "lost")
        self._runner.space.set()

    async def quiesce(self, lane: Lane, seconds: float) -> bool:
        """Stop reading a lane, hand back what has not started, wait for the rest. False: something still runs."""
        lane.is_quiet = True
        await self._intake.exclude(lane.partition)
        await self._settler.hand_back(lane, self._queue.withdraw(lane))
        deadline = monotonic() + seconds
        while lane.running and monotonic() < deadline:
            await asyncio.sleep(0.01)
        if lane.running:
            return False
        await self._settler.drained([lane])
        return True

    async def hand_back_unstarted(self, lanes: Iterable[Lane]) -> None:
        """What has not started goes back at once; without the server it is redelivered when the lease is over."""
        for lane in lanes:
            unstarted = self._queue.withdraw(lane)
            if unstarted and lane.lease.is_held():
                try:
                    await self._settler.hand_back(lane, unstarted)
                except BrokerError as error:
                    log.warning("%d messages are redelivered after the lease: %s", len(unstarted), error)

    async def release(self, lanes: Iterable[Lane]) -> None:
        """Give back the leases of lanes in which nothing runs; without one our name goes. Raises BrokerError."""
        for lane in lanes:
            if not lane.running:
                self.drop_lane(lane)
                self._beat.forget(lane.lease)
                if lane.epoch:
                    await self._leases.release(lane.lease)
                else:
                    await REMOVE_CONSUMER(self._client, (lane.stream,), (lane.group, self._member))

    def __repr__(self) -> str:
        return f"<Warden {list(self.lanes.values())}>"
