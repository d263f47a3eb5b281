"""Bringing parked messages back when their retry is due. Those that hold a key stay pending, and have a timer here."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio

from rsmq.clock import monotonic
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.reclaimer import Reclaimer
from rsmq.consumer.runner import Runner
from rsmq.errors import BrokerError
from rsmq.settings import Settings

log = logging.getLogger("rsmq.retry")

SHARED_LOOK = 0.5
"""Seconds between looks when other members park messages of the same partition too."""
RARELY = 2.0
"""Seconds between looks at lanes that know of no retry."""
NEVER = float("inf")


class Unparker:
    """Asks the server only when something is due: an owner knows what it parked, sharers look twice a second.

    A lane is looked at when all that is pending there is in hand: what holds a key is then known, and skipped.
    """

    def __init__(
        self, settings: Settings, lanes: Mapping[int, Lane], queue: Queue, reclaimer: Reclaimer, runner: Runner
    ) -> None:
        self._settings, self._lanes, self._queue = settings, lanes, queue
        self._reclaimer, self._runner = reclaimer, runner

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        tick = self._settings.delay_resolution.total_seconds()
        while True:
            await self._wait()
            await anyio.sleep(tick)
            try:
                await self._look()
            except BrokerError as error:
                log.debug("retries wait: %s", error)
                await anyio.sleep(0.5)

    async def _wait(self) -> None:
        """While no lane knows of a retry: until one may, or once in a while all the same."""
        self._runner.retries.clear()
        if not any(lane.retry_at < NEVER for lane in self._lanes.values()):
            with anyio.move_on_after(RARELY):
                await self._runner.retries.wait()

    async def _look(self) -> None:
        now = monotonic()
        for lane in list(self._lanes.values()):
            room = self._settings.prefetch - self._queue.in_hand
            if lane.retry_at <= now and lane.is_readable and lane.lease.is_held() and room > 0:
                await self._reclaimer.unpark(lane, room)
                if not lane.epoch:
                    lane.retry_at = min(lane.retry_at, monotonic() + SHARED_LOOK)
        await self._runner.kick()

    def __repr__(self) -> str:
        return f"<Unparker lanes={sorted(self._lanes)}>"
