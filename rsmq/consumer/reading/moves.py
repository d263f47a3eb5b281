"""Parked messages that get another due time, as the owner of their partition meets them.

A message that keeps its key has a timer in its owner. `control/rescheduling.py` sets a mark beside those of cancelled
messages, and waits. The owner stops the timer, lets the server take the new due time, and sets the timer by the reply.
So a message that was moved does not start at the old time, and one that starts was not moved. One without a timer waits
behind an earlier message of its key: the server takes the new due time, and is asked before it starts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import timedelta

from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.model.words import pause
from rsmq.redis.scripts import MOVE_PARKED, STALE_EPOCH

log = logging.getLogger("rsmq.retry")

MARK = b"|due"
"""Behind a stream id: the field of a mark."""


class Moves:
    """Moves the timers of parked messages. A call that fails is repeated with the next look."""

    def __init__(self, context: ConsumerContext, runner: Runner, settler: Settler) -> None:
        self._client = context.client
        self._member = context.member
        self._group = context.handler.group
        self._runner, self._settler = runner, settler

    async def look_at(self, lane: Lane) -> None:
        """Move what is asked for in a lane. There are marks, or a call that has no reply yet."""
        ids = list((lane.in_flight | lane.recovery.untimed) - lane.asking)  # what is being parked is asked for again
        marks = [entry_id + MARK for entry_id in ids]
        values = await self._client.execute_command("HMGET", lane.cancels_key, *marks) if ids else []
        wanted = {entry_id for entry_id, value in zip(ids, values, strict=True) if value is not None}
        await self._move(lane, wanted)
        untimed = wanted & lane.recovery.untimed
        if await self._ask(lane, untimed):
            self._runner.queue.ask_again(lane, untimed)
        late = wanted - untimed - {message.entry_id for message in lane.flows.parked.values()} - lane.asking
        if late:  # they start now: the caller finds that out by the next question
            await self._client.execute_command("HDEL", lane.cancels_key, *[entry_id + MARK for entry_id in late])

    async def _move(self, lane: Lane, wanted: Collection[bytes]) -> None:
        waiting = lane.flows.stop_timers(wanted)
        times = await self._ask(lane, [message.entry_id for message in waiting])
        if not times:
            return
        for message, (attempts, wait_ms) in zip(waiting, times, strict=True):
            lane.flows.timed(message.entry_id)
            if attempts >= 0:
                message.attempt = attempts
            self._runner.resume_later(message, lane, wait_ms / 1000)
            log.info("%s was rescheduled: its next attempt is in %s", message, pause(timedelta(milliseconds=wait_ms)))

    async def _ask(self, lane: Lane, ids: Collection[bytes]) -> list[list[int]]:
        """Let the server take the new due times. Returns attempts and wait of each; nothing without the lease."""
        if not ids or not lane.lease.is_held():
            return []
        keys = (lane.stream, lane.lease_key, lane.retry_key, lane.cancels_key, lane.errors_key)
        times: list[list[int]]
        word, *times = await self._settler.ask(MOVE_PARKED, keys, (self._member, lane.epoch, self._group, *ids))
        if word == STALE_EPOCH:
            lane.lease.lose()
            return []
        return times

    def __repr__(self) -> str:
        return f"<Moves of {self._group}>"
