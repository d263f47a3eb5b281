"""Begins calls whose messages are of one key: the server marks all of them in one step, and sends their bodies."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.reading.read_ahead import ReadAhead
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.gathering_queue import GatheringQueue
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.open_calls import CallPlan
from rsmq.handler.retry import is_suspect
from rsmq.model.message import Message
from rsmq.model.reason import lost_body
from rsmq.redis.scripts import BEHIND, NOT_DUE, OK, STALE_EPOCH, START_CALL, UNDELIVERED, Value

log = logging.getLogger("rsmq.fetch")

SETTLING: Final = 0.005
"""Seconds between two looks whether the call before it is settled: that is on its way."""


class CallStarter(ReadAhead):
    """A call begins when its window is over, a slot is free, and all that was stored before the end of the window was
    received. Otherwise it is asked for again after the next read, or after a pause."""

    def __init__(
        self, context: ConsumerContext, runner: Runner, settler: Settler, fetchers: Fetchers, queue: GatheringQueue
    ) -> None:
        super().__init__(context, runner, settler, fetchers)
        self._calls_at_once = context.handler.concurrency
        self._gathering = queue

    async def _read_more(self, lane: Lane) -> bool:
        lanes, is_behind = self._lanes.values(), False
        while self._has_slot():
            plan = self._gathering.next_call(lane, lanes, is_behind=is_behind)
            if plan is None:
                if not self._gathering.awaits_settlement(lane):
                    return False
                await asyncio.sleep(SETTLING)
                return True
            if await self._begin(lane, plan):
                return True
            is_behind = True
        return False

    def _has_slot(self) -> bool:
        running = sum(1 for task_slot in self._runner.task_slots if task_slot.messages)
        return running + len(self._queue.ready) < self._calls_at_once

    async def _begin(self, lane: Lane, plan: CallPlan) -> bool:
        """False: messages that belong to it are not received yet."""
        flows = lane.flows
        asked, records, number = flows.ask(plan), flows.calls.to_forget(lane.in_flight), flows.number()
        keys = (
            lane.stream, lane.lease_key, lane.retry_key, lane.dlq_key, lane.cancels_key, lane.cancelled_key,
            lane.calls_key,
        )  # fmt: skip
        budget = 0 if plan.attempts or flows.calls.of(plan.key) else int(self._settings.prefetch_bytes) // 4
        args: list[Value] = [self._member, lane.epoch, lane.group, number, self._page_limit.of(budget) if budget else 0]
        args += (self._trims, self._settings.dlq_length, *lost_body(lane.group, self._member))
        starts = 0 if not plan.starts else 1 if lane.recovery.untimed.isdisjoint(plan.ids) else 2
        args += (plan.attempts + 1, plan.key, plan.window_end, starts, flows.calls.newest, len(records))
        args += [part for pair in records.items() for part in pair]
        with lane.recovery.claiming():
            with self._page_limit.asking():
                reply = await self._settler.ask(START_CALL, keys, (*args, *asked))
            flows.note_answer(number)
            if reply[0] == STALE_EPOCH:
                lane.lease.lose()
            if reply[0] == NOT_DUE:
                self._wait(lane, plan, reply[1] / 1000)
            if reply[0] != OK:
                return bool(reply[0] != BEHIND)
            flows.answered(plan)
            lane.recovery.end_untimed(plan.ids)
            flows.calls.forgotten(records)
            await self._fill_call(lane, plan, {row[0]: row[1] for row in reply[1:]})
        return True

    def _wait(self, lane: Lane, plan: CallPlan, seconds: float) -> None:
        lane.flows.answered(plan)
        parked = self._gathering.wait_for_call(lane, plan)
        if parked is not None:
            self._runner.resume_later(parked, lane, seconds, charge=0)

    async def _fill_call(self, lane: Lane, plan: CallPlan, rows: dict[bytes, Any]) -> None:
        if UNDELIVERED in rows.values():
            log.warning("the server has lost writes: what waits in %s is read again from what it has kept", lane.stream)
            lane.lease.lose()
            return
        found, messages = list[bytes](), list[Message]()
        for entry_id in plan.ids:
            if entry_id in rows and isinstance(rows[entry_id], list):
                messages.append(self._member_of(lane, plan, entry_id, rows[entry_id], is_head=not messages))
            elif entry_id not in rows and entry_id not in lane.flows.gone:
                break  # the budget ends the call before it
            found.append(entry_id)
        if not self._gathering.begin_call(lane, plan, found, messages) and messages and lane.lease.is_held():
            await self._settler.hand_back(lane, messages)  # the lane was made quiet meanwhile
        self._note(lane, {entry_id: [row] for entry_id, row in rows.items() if isinstance(row, bytes)})

    def _member_of(self, lane: Lane, plan: CallPlan, entry_id: bytes, fields: list[bytes], *, is_head: bool) -> Message:
        message = Message(lane, entry_id, fields, plan.attempts + 1)
        message.is_redelivered = plan.attempts > 0 or not lane.flows.is_first(entry_id)
        message.is_suspect = is_head and is_suspect(plan.attempts, self._policy)
        return message

    def __repr__(self) -> str:
        return f"<CallStarter {self._queue!r}>"
