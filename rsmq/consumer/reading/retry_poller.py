"""Brings parked messages back when their retry is due. One that blocks its key has a timer in the runner instead."""

from __future__ import annotations

import logging
from typing import Final

import anyio

from rsmq.consumer.reading.reclaimer import Reclaimer
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.errors import BrokerError
from rsmq.model.clock import monotonic

log = logging.getLogger("rsmq.retry")

SHARED_SECONDS: Final = 0.5
"""Between two polls of a lane in which other members park messages, too."""
IDLE_SECONDS: Final = 2.0
"""Between two polls while no lane knows of a retry."""


class RetryPoller:
    """Asks the server only when a retry is due: the owner of a lane knows what it parked.

    A lane is polled after its recovery: then everything pending there is in flight, so messages that block their key
    are known and skipped.
    """

    def __init__(self, context: ConsumerContext, reclaimer: Reclaimer, runner: Runner) -> None:
        self._settings, self._lanes = context.settings, context.lanes
        self._reclaimer = reclaimer
        self._runner = runner
        self._queue = runner.queue

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Poll until cancelled."""
        task_status.started()
        tick = self._settings.delay_resolution.total_seconds()
        while True:
            self._runner.retries.clear()
            if not any(lane.recovery.retry_at < float("inf") for lane in self._lanes.values()):
                with anyio.move_on_after(IDLE_SECONDS):
                    await self._runner.retries.wait()
            await anyio.sleep(tick)
            try:
                await self._poll()
            except BrokerError as error:
                log.debug("polling for retries failed: %s", error)
                await anyio.sleep(0.5)

    async def _poll(self) -> None:
        now = monotonic()
        for lane in list(self._lanes.values()):
            room = self._settings.prefetch - self._queue.load(self._lanes.values(), lane.band)[0]
            if lane.recovery.retry_at <= now and lane.is_readable and lane.lease.is_held() and room > 0:
                await self._reclaimer.unpark(lane, room)
                if not lane.epoch:
                    lane.recovery.look_for_retries(SHARED_SECONDS)
        await self._runner.wake()

    def __repr__(self) -> str:
        return f"<RetryPoller lanes={sorted(self._lanes)}>"
