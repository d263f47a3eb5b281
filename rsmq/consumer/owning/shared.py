"""Shared distribution: every member reads every partition; liveness is kept per message instead of per partition."""

from __future__ import annotations

import logging
from functools import partial

import anyio

from rsmq.consumer.owning.lane_lifecycle import LaneLifecycle
from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.reading.reclaimer import Reclaimer
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.errors import BrokerError
from rsmq.heartbeat.heartbeat import Heartbeat, InFlightMessages
from rsmq.heartbeat.lease import Lease
from rsmq.heartbeat.membership import Membership
from rsmq.heartbeat.registration import longer_leases
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.settings import lease_margin

log = logging.getLogger("rsmq.share")


class SharedDistribution:
    """Opens a lane for every partition, and adopts what dead members left.

    The heartbeat touches messages in flight, so no member takes them from a slow handler: each waits for the lease of
    the member that has them. A member that could not touch them for its lease drops them, like an owner whose lease ran
    out. One that finds some of them taken over drops these.
    """

    def __init__(
        self,
        context: ConsumerContext,
        runner: Runner,
        reclaimer: Reclaimer,
        fetchers: Fetchers,
        lifecycle: LaneLifecycle,
        heartbeat: Heartbeat,
        membership: Membership,
    ) -> None:
        self._context = context
        self._settings = context.settings
        self._lanes = context.lanes
        self._runner = runner
        self._reclaimer = reclaimer
        self._fetchers = fetchers
        self._lifecycle = lifecycle
        self._heartbeat = heartbeat
        self._membership = membership
        self._lease_seconds = context.settings.lease_ttl.total_seconds()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Adopt until cancelled."""
        task_status.started()
        adopt_at, adopted = 0.0, frozenset[str]()
        while True:
            self._open_lanes()
            if any(not lane.recovery.is_over for lane in self._lanes.values()):
                await self._fetchers.interrupt()
            try:
                adopted &= self._membership.absent
                for member in self._membership.absent - adopted:
                    if await self._adopt(source=member):
                        adopted |= {member}
                if monotonic() >= adopt_at:
                    await self._adopt()
                    adopt_at = monotonic() + self._lease_seconds / 4
            except BrokerError as error:
                log.debug("adopting waits for the server: %s", error)
            await self._membership.wait(self._settings.presence_interval.total_seconds())

    def _open_lanes(self) -> None:
        topic, group = self._context.topic, self._context.handler.group
        for partition in topic.numbers:
            lane = self._lanes.get(partition)
            if lane is not None and lane.lease.is_held():
                continue
            if lane is not None:
                self._heartbeat.stop_touching(lane.stream, lane.group)
                self._lifecycle.drop(lane)
            if self._heartbeat.is_absent:
                continue  # the others would adopt what it reads
            deadline = monotonic() + self._lease_seconds - lease_margin(self._settings).total_seconds()
            lease = Lease.shared(topic.name, group, partition, self._context.member, deadline)
            lane = self._context.lane(partition, lease)
            self._lifecycle.begin(lane)
            self._heartbeat.touch(
                InFlightMessages(
                    lane.stream, group, lease, lane.dlq_key, lambda lane=lane: list(lane.in_flight),  # type: ignore[misc]
                    partial(self._reclaimer.give_up, lane),
                )
            )  # fmt: skip

    async def _adopt(self, source: str = "") -> bool:
        """One page of every partition; True when nothing is left."""
        is_all, leases = True, dict[str, int]()
        if not source:  # a member with a longer lease may not touch its messages for longer than this one
            leases = await longer_leases(
                self._context.client, self._context.keys, self._context.topic.name, self._context.handler.group,
                to_ms(self._settings.lease_ttl),
            )  # fmt: skip
        for lane in list(self._lanes.values()):
            if not source:
                self._lifecycle.begin(lane)  # a dead member may have left outputs in the out-stream
            room = self._settings.prefetch - self._runner.queue.load(self._lanes.values(), lane.band)[0]
            if room <= 0 or lane.is_ahead:
                is_all = False
            elif lane.lease.is_held():
                is_all = await self._reclaimer.adopt(lane, room, source=source, leases=leases) and is_all
        await self._runner.wake()
        return is_all

    def __repr__(self) -> str:
        return f"<SharedDistribution {self._context.name} lanes={len(self._lanes)}>"
