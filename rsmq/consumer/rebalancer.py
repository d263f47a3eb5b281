"""Which partitions are ours: follow the assignment, take free leases, hand over what belongs to others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import anyio.lowlevel

from rsmq.complaint import Complaints
from rsmq.connect import retrying
from rsmq.consumer.lane import Lane
from rsmq.consumer.turnstile import shares
from rsmq.consumer.warden import Warden
from rsmq.errors import BrokerError
from rsmq.handler import Handler
from rsmq.heartbeat.assignment import assign
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.heartbeat.membership import Membership
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.topic import Topic

log = logging.getLogger("rsmq.lease")

SETTLED_LOOK: Final = 2.0
"""Seconds between two looks of a member that has all its partitions: what changes is told."""


class Rebalancer:
    """Hash distribution: one owner per partition. Wrong membership costs fairness here, never correctness.

    A lease that is not held any more is dropped at once and locally. A partition that belongs to somebody else is
    handed over: quiet, drain, settle, release, announce; if a handler runs too long for that, it is kept for now.
    What the server may have granted us in an answer that was lost is asked for once more, also to hand it over.
    """

    def __init__(
        self,
        topic: Topic,
        handler: Handler,
        keys: Keys,
        settings: Settings,
        member: str,
        leases: Leases,
        beat: Beat,
        membership: Membership,
        lanes: dict[int, Lane],
        warden: Warden,
        announce: Callable[[], Awaitable[None]],
    ) -> None:
        self._topic, self._handler, self._keys, self._settings, self._member = topic, handler, keys, settings, member
        self._leases, self._beat, self._membership = leases, beat, membership
        self._lanes, self._warden, self._announce = lanes, warden, announce
        self._leaving: set[int] = set()
        self._unsure: set[int] = set()  # asked for, and no answer yet: the server may have granted it
        self._complaints = Complaints(log)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow the membership until cancelled."""
        task_status.started()
        tick = self._settings.presence_interval.total_seconds()
        async with anyio.create_task_group() as tasks:
            while True:
                seen = self._membership.changes
                self._drop_lost()
                mine = self._assigned()
                try:
                    await self._take(mine)
                except BrokerError as error:
                    self._complaints.say("rebalancing waits", error)
                for partition, lane in self._lanes.items():
                    if partition not in mine and partition not in self._leaving:
                        self._leaving.add(partition)
                        tasks.start_soon(self._hand_over, lane)
                is_settled = mine == self._lanes.keys()
                await self._membership.wait(SETTLED_LOOK if is_settled else tick, seen)

    def _assigned(self) -> set[int]:
        salt = f"{self._topic.name}/{self._handler.group}"
        owners = assign(self._topic.partitions, self._owners(salt), salt)
        return {partition for partition, owner in owners.items() if owner == self._member}

    def _owners(self, salt: str) -> Sequence[str]:
        """Who may own partitions: all that live, but nobody who may not run a single call."""
        live, limit = self._membership.live, self._handler.group_concurrency
        if limit is None or limit >= len(live):
            return live
        return [member for member, calls in shares(limit, live, salt).items() if calls]

    def _drop_lost(self) -> None:
        for lane in list(self._lanes.values()):
            if not lane.lease.is_held():
                self._warden.drop_lane(lane)
                self._beat.forget(lane.lease)

    async def _take(self, mine: set[int]) -> None:
        """Ask for what is missing. Raises the first error at the end: it may be that of one partition, or one node."""
        trouble: BrokerError | None = None
        missing = sorted((mine | self._unsure) - self._lanes.keys())
        unread = [partition for partition in missing if not self._warden.reader(partition)]
        with anyio.move_on_after(self._settings.presence_interval.total_seconds()):
            for partition in unread:
                await self._warden.wait_for_reader(partition)
        for partition in missing:
            reader = self._warden.reader(partition)
            if not reader:
                continue
            # shielded: a stop in between would not hear that the lease was granted, and nobody would give it back
            with anyio.move_on_after(self._settings.command_timeout.total_seconds(), shield=True):
                try:
                    await self._take_one(partition, reader)
                except BrokerError as error:
                    trouble = trouble or error
            await anyio.lowlevel.checkpoint_if_cancelled()
        if trouble is not None:
            raise trouble

    async def _take_one(self, partition: int, reader: str) -> None:
        self._unsure.add(partition)
        lease = await self._leases.take(
            self._topic.name, partition, self._handler.group, reader=reader, absent=self._membership.absent
        )
        self._unsure.discard(partition)
        if lease is not None:
            lane = Lane(self._keys, self._topic.name, partition, self._handler.group, lease)
            self._beat.watch(lease, self._on_lost(lane))
            await self._warden.open_lane(lane)

    def _on_lost(self, lane: Lane) -> Callable[[Lease], None]:
        return lambda _: self._warden.drop_lane(lane)

    async def _hand_over(self, lane: Lane) -> None:
        try:
            patience = self._settings.lease_ttl.total_seconds()
            if await self._warden.quiesce(lane, patience):
                await self.release(lane)
                await self._announce()
            elif lane.lease.is_held():
                await self._warden.resume_lane(lane)
        except BrokerError as error:
            log.warning("handing over %r waits: %s", lane, error)
            await self._warden.resume_lane(lane)
        finally:
            self._leaving.discard(lane.partition)

    async def release(self, lane: Lane) -> None:
        """Give back the lease of a lane that is drained.

        Until the server has heard it: the lane is dropped, and nobody else may read there before the lease runs out.
        """
        self._warden.drop_lane(lane)
        self._beat.forget(lane.lease)
        async for attempt in retrying(self._settings):
            # shielded: nobody knows of it now
            with attempt, anyio.move_on_after(self._settings.command_timeout.total_seconds(), shield=True):
                await self._leases.release(lane.lease)
