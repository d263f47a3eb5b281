"""Running handlers whose calls have messages of one key: they are settled as one, and fail as one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rsmq.consumer.running.batch_runner import BatchRunner
from rsmq.consumer.running.conclusion import HandBack, NotDue, Settle
from rsmq.consumer.running.task_slot import TaskSlot
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import CannotDecode
from rsmq.handler.retry import Outcome, Park
from rsmq.model.message import Message
from rsmq.model.message_ref import MessageRef


class GatheredRunner(BatchRunner):
    """The server has charged the attempt of all messages when their call began. One without a key is charged here."""

    def _take_raw(self) -> list[RawEntries]:
        return []  # a call is a message and those behind it

    async def _gather(self, batch: list[Message], heads: list[Message]) -> None:
        """The call that has waited longest."""
        while True:
            message = self.queue.taker()() if self.queue.ready else None
            if message is not None:
                break
            await self._sleep()
        assert isinstance(message, Message)
        lane: Lane = message.origin  # type: ignore[assignment]
        batch.append(message)
        heads.append(message)
        if message.routing_key is not None:
            batch += self.queue.take_behind(lane, message.routing_key, self.handler.batch or 1)
        self._running[lane] += len(batch)

    async def _charged(self, message: Message, now: float) -> bool | NotDue:
        if message.routing_key is None:
            return await super()._charged(message, now)
        return now < message.origin.lease.deadline  # type: ignore[attr-defined, no-any-return]

    async def collect(
        self,
        message: Message,
        lane: Lane,
        topic: str,
        payload: Any,
        options: Mapping[str, Any],
        *,
        is_member: bool = False,
    ) -> MessageRef:
        """Keep an output of a running message until its call is settled."""
        running = next((each.messages for each in self.task_slots if message in each.messages), ())
        together = [each for each in running if isinstance(each, Message)]
        check = partial(self._check_runs, message)
        about = (message, lane, topic, payload, options, check, together)
        return await self._settler.outputs.collect(*about, is_member=is_member)

    async def _handle_started(self, task_slot: TaskSlot, picked: list[Message], heads: list[Message]) -> None:
        """A member whose key is missing lets the whole call wait, as long as it waits itself."""
        missing = dict[Message, CannotDecode | NotDue]()
        batch = await self._started(picked, missing)
        lacking = next((message for message in batch if message in missing), None)
        wait = None if lacking is None else self._wait_for_key(lacking, missing[lacking])
        if lacking is not None and wait is not None:
            await self._park_call(batch, wait, missing[lacking])
        elif lacking is not None:
            await self._handle_others(task_slot, batch, heads, [missing.get(message) for message in batch])
        else:
            await self._handle(task_slot, batch, heads)
        if task_slot.rest is None:
            await self._work(task_slot)

    async def _park_call(self, messages: list[Message], decision: Park, error: BaseException) -> None:
        """The first one is parked, and the others wait behind it: the retry has the same messages."""
        first, *later = messages
        lane: Lane = first.origin  # type: ignore[assignment]
        self._running[lane] -= len(messages)
        self._put_back(lane, later)
        await self._park(first, lane, decision, error)
        self._made_space()

    def _all_done(self, batch: list[Message], heads: list[Message]) -> None:
        if batch:
            lane: Lane = batch[0].origin  # type: ignore[assignment]
            self._running[lane] -= len(batch)
            self._settler.add_together(lane, batch)
            self.queue.leave_raw(len(batch))
        for head in heads:
            if head.routing_key is not None:
                self.queue.release(head.origin, head.routing_key)  # type: ignore[arg-type]

    async def _end_key(self, ended: list[tuple[Message, Outcome]]) -> bool:
        """In order: what is done is settled in one call, and all from the first one that is tried again on are tried
        again together."""
        lane: Lane = ended[0][0].origin  # type: ignore[assignment]
        if ended[0][0].routing_key is None:
            return await super()._end_key(ended)
        done = list[Message]()
        for at, (message, outcome) in enumerate(ended):
            conclusion = self._conclude(message, lane, outcome)
            is_again = isinstance(conclusion, HandBack) and not conclusion.is_stop and lane.lease.is_held()
            if is_again or (isinstance(conclusion, Park) and outcome is not None):
                await self._settle_call(lane, done)
                rest = [each for each, _ in ended[at:]]
                if isinstance(conclusion, Park) and outcome is not None:
                    await self._park_call(rest, conclusion, outcome)
                else:
                    self._restart(rest, lane)
                return True
            if conclusion == Settle():
                done.append(message)
                continue
            await self._carry_out(message, lane, conclusion)
            self._leave(message, lane)
        await self._settle_call(lane, done)
        return False

    async def _settle_call(self, lane: Lane, messages: list[Message]) -> None:
        if any(message.is_suspect for message in messages):  # the next suspect may end this process
            await self._settler.settle_together(lane, messages)
        elif messages:
            self._settler.add_together(lane, messages)
        for message in messages:
            self._leave(message, lane)
