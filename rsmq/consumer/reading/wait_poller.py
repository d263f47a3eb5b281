"""Tells the server until when messages wait for a time, and lets go those whose time has come."""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Final

import anyio

from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.flows import PAGE
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError
from rsmq.model.clock import monotonic
from rsmq.redis.scripts import KEEP_WAITS, STALE_EPOCH, Value

log = logging.getLogger("rsmq.wait")

RESCHEDULED: Final = 1
CANCELLED: Final = 2
"""Why a message is due, if not because of its time."""
SOON: Final = 0.05
"""Seconds until the next look while more are due than are read again at a time."""
PAUSE: Final = 0.1
"""Seconds before the next attempt while the server is away."""
LONGEST: Final = 60.0
"""Seconds between two looks: the server's clock may be set meanwhile."""


class WaitPoller:
    """Asks the server when the next message of a lane is due: only the server's clock counts.

    What is due is read again by `ReadAhead`, a page at a time, and then the handler's rule is asked once more.
    """

    def __init__(self, context: ConsumerContext, runner: Runner, settler: Settler, fetchers: Fetchers) -> None:
        self._member = context.member
        self._lanes = context.lanes
        self._queue = runner.queue
        self._settler = settler
        self._fetchers = fetchers
        self.wanted = asyncio.Event()
        """There is something to tell the server."""

    def look(self) -> None:
        """Something may be due earlier than expected: a message was rescheduled, or cancelled."""
        for lane in self._lanes.values():
            if lane.flows.resting:
                lane.flows.resting.look_in(0)
        self.wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with anyio.move_on_after(self._pause()):
                await self.wanted.wait()
            self.wanted.clear()
            for lane in list(self._lanes.values()):
                try:
                    await self._look_at(lane)
                except BrokerError as error:
                    log.debug("what waits for a time in %s waits for the server: %s", lane.stream, error)
                    await asyncio.sleep(PAUSE)
                    self.wanted.set()

    def _pause(self) -> float:
        next_look = min((lane.flows.resting.look_at for lane in self._lanes.values()), default=inf)
        return max(0.001, min(LONGEST, next_look - monotonic()))

    async def _look_at(self, lane: Lane) -> None:
        """Until the server knows all, and has named what is due, or as much as may be read again now."""
        flows, resting = lane.flows, lane.flows.resting
        while resting.has_news or resting.look_at <= monotonic():
            if not lane.lease.is_held() or lane.is_quiet:
                resting.look_in(PAUSE)
                return
            # at the bound no page of a recovery is read until something has started
            is_ready = lane.recovery.is_over or not self._queue.has_room(lane, self._lanes.values())
            may_start = is_ready and not self._fetchers.is_paused
            room = max(0, PAGE - len(flows.dry)) if may_start else 0
            forgotten, notes = resting.news(PAGE)
            filling, args = flows.filling, list[Value]((self._member, lane.epoch, room, len(forgotten), *forgotten))
            args += [part for note in notes for part in note]
            reply = await self._settler.ask(KEEP_WAITS, (lane.lease_key, lane.waits_key), args)
            if reply[0] == STALE_EPOCH:
                lane.lease.lose()
                return
            if filling != flows.filling:  # all was forgotten meanwhile
                return
            resting.told(forgotten, notes)
            _, wait_ms, *named = reply
            for entry_id, why in named:
                self._queue.wake(lane, entry_id, is_rescheduled=why == RESCHEDULED, is_cancelled=why == CANCELLED)
                resting.named(entry_id, is_rescheduled=why == RESCHEDULED)
            is_short = len(named) == room
            resting.look_in(SOON if is_short else min(LONGEST, wait_ms / 1000) if wait_ms >= 0 else inf)

    def __repr__(self) -> str:
        return f"<WaitPoller lanes={sorted(self._lanes)}>"
