"""Shared distribution: every member reads every partition; liveness is kept per message instead of per partition."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from rsmq.clock import monotonic
from rsmq.consumer.intake import Intake
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.reclaimer import Reclaimer
from rsmq.errors import BrokerError
from rsmq.handler import Handler
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Lease
from rsmq.heartbeat.membership import Membership
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.topic import Topic

log = logging.getLogger("rsmq.share")


class Sharer:
    """Opens a lane for every partition, and adopts what dead members left.

    What is in hand is touched with the heartbeat, so that nobody takes it from a slow handler. A member that could not
    touch for a lease stops believing in all it has, like an owner whose lease ran out.
    """

    def __init__(
        self,
        topic: Topic,
        handler: Handler,
        keys: Keys,
        settings: Settings,
        member: str,
        beat: Beat,
        membership: Membership,
        lanes: dict[int, Lane],
        queue: Queue,
        reclaimer: Reclaimer,
        intake: Intake,
        drop: Callable[[Lane], None],
    ) -> None:
        self._topic, self._handler, self._keys, self._settings, self._member = topic, handler, keys, settings, member
        self._beat, self._membership, self._lanes, self._queue = beat, membership, lanes, queue
        self._reclaimer, self._intake, self._drop = reclaimer, intake, drop
        self._patience = settings.lease_ttl.total_seconds()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        look_again, adopted = 0.0, frozenset[str]()
        while True:
            self._open()
            try:
                await self._intake.interrupt() if self._fresh() else None
                adopted &= self._membership.absent
                for member in self._membership.absent - adopted:
                    if await self._adopt(source=member):
                        adopted |= {member}
                if monotonic() >= look_again:
                    await self._adopt()
                    look_again = monotonic() + self._patience / 4
            except BrokerError as error:
                log.debug("adopting waits: %s", error)
            await self._membership.wait(self._settings.presence_interval.total_seconds())

    def _open(self) -> None:
        for partition in range(self._topic.partitions):
            lane = self._lanes.get(partition)
            if lane is not None and lane.lease.is_held():
                continue
            if lane is not None:
                self._beat.untouch(lane.stream, lane.group)
                self._drop(lane)
            deadline = monotonic() + self._patience - self._settings.lease_margin.total_seconds()
            lease = Lease.shared(self._topic.name, self._handler.group, partition, self._member, deadline)
            self._lanes[partition] = lane = Lane(self._keys, self._topic.name, partition, self._handler.group, lease)
            self._beat.touch(lane.stream, lane.group, lane.lease, lambda lane=lane: list(lane.held))  # type: ignore[misc]

    def _fresh(self) -> bool:
        return any(lane.cursor is not None for lane in self._lanes.values())

    async def _adopt(self, source: str = "") -> bool:
        """One page of every partition; True when nothing is left."""
        is_all = True
        for lane in list(self._lanes.values()):
            room = self._settings.prefetch - self._queue.in_hand
            if room <= 0:
                is_all = False
            elif lane.lease.is_held():
                is_all = await self._reclaimer.adopt(lane, room, source=source) and is_all
        await self._intake.kick()
        return is_all

    def __repr__(self) -> str:
        return f"<Sharer {self._topic.name}/{self._handler.group} lanes={len(self._lanes)}>"
