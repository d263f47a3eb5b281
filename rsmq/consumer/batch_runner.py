"""Running batch handlers: many messages a call, an outcome for each."""

from __future__ import annotations

import asyncio

import anyio

from rsmq.clock import monotonic
from rsmq.consumer.lane import Lane
from rsmq.consumer.runner import TURN, Runner, Slot
from rsmq.errors import HandlerTimeout, Malformed
from rsmq.handler import batch_outcomes
from rsmq.message import Message
from rsmq.retry import Bury, Park, decide


class BatchRunner(Runner):
    """A runner whose workers gather up to `batch` messages, for at most `linger`.

    With key order a batch may hold several messages of a key, in order; while it runs, its keys wait. If one fails, the
    later ones of its key go back behind it and are handled again: repeated, never reordered.
    """

    async def _work(self, slot: Slot) -> None:
        slot.task = asyncio.current_task()
        turn = monotonic()
        while True:
            batch = await self._gather()
            batch = [message for message in batch if await self._may_start(message)]
            batch = [message for message in batch if await self._decoded(message)]
            if batch:
                await self._handle(slot, batch)
            if monotonic() - turn > TURN:
                await asyncio.sleep(0)
                turn = monotonic()

    async def _gather(self) -> list[Message]:
        """At least one message; more while there are more, or until `linger` is over."""
        batch: list[Message] = []
        assert self.handler.batch is not None
        deadline = None
        while len(batch) < self.handler.batch:
            self._pick(batch, self.handler.batch)
            if len(batch) >= self.handler.batch:
                break
            if not batch:
                await self._sleep()
                continue
            deadline = deadline or monotonic() + self.handler.linger.total_seconds()
            left = deadline - monotonic()
            if left <= 0:
                break
            with anyio.move_on_after(left):
                await self._sleep()
        return batch

    def _pick(self, batch: list[Message], limit: int) -> None:
        ready, is_ordered = self.queue.ready, self.queue.is_ordered
        while ready and len(batch) < limit:
            message = ready.popleft()
            batch.append(message)
            message.origin.running += 1  # type: ignore[attr-defined]
            if is_ordered and message.routing_key is not None:
                behind = message.origin.waiting.get(message.routing_key)  # type: ignore[attr-defined]
                while behind and len(batch) < limit and not behind[0].is_suspect:
                    batch.append(behind.popleft())
                    message.origin.running += 1  # type: ignore[attr-defined]

    async def _may_start(self, message: Message) -> bool:
        lane: Lane = message.origin  # type: ignore[assignment]
        if monotonic() < lane.lease.deadline and (
            not message.is_redelivered or await self._settler.start(message, lane)
        ):
            return True
        lane.running -= 1
        self._drop(message, lane)
        return False

    async def _decoded(self, message: Message) -> bool:
        try:
            message.payload = self.handler.decode(message)
        except Malformed as error:
            lane: Lane = message.origin  # type: ignore[assignment]
            lane.running -= 1
            await self.settle_failure(message, lane, error)
            return False
        return True

    async def _handle(self, slot: Slot, batch: list[Message]) -> None:
        slot.messages, slot.started = batch, monotonic()
        try:
            result = await self._call(batch)
            outcomes = batch_outcomes(result, batch)
        except BaseException as error:
            failure = self._failure(slot, error)
            outcomes = [failure] * len(batch)
        else:
            slot.end()
        await self._conclude(batch, outcomes)
        if self.is_starved:
            self._made_space()

    def _failure(self, slot: Slot, error: BaseException) -> BaseException:
        if not isinstance(error, asyncio.CancelledError):
            slot.end()
            if isinstance(error, Exception):
                return error
            raise error
        reason = slot.end()
        if reason is None:
            raise error
        if reason != "timeout":
            return Abandoned(reason)
        assert self.handler.timeout is not None
        return HandlerTimeout(self.handler.name, self.handler.timeout.total_seconds())

    async def _conclude(self, batch: list[Message], outcomes: list[BaseException | None]) -> None:
        """Settle each item; without key order each stands alone, with it the items of a key stand in a row."""
        rows: dict[tuple[int, bytes], list[tuple[Message, BaseException | None]]] = {}
        for message, outcome in zip(batch, outcomes, strict=True):
            lane: Lane = message.origin  # type: ignore[assignment]
            lane.running -= 1
            if self.queue.is_ordered and message.routing_key is not None:
                rows.setdefault((lane.partition, message.routing_key), []).append((message, outcome))
            elif outcome is None:
                self._done(message, lane)
                self.queue.finish(message, lane)
            else:
                await self._fail(message, lane, outcome)
        for row in rows.values():
            await self._conclude_row(row)
        self.kick_soon()

    async def _conclude_row(self, row: list[tuple[Message, BaseException | None]]) -> None:
        """The items of one key: done up to the first failure, everything after it back into the line behind it."""
        lane: Lane = row[0][0].origin  # type: ignore[assignment]
        key = row[0][0].routing_key
        assert key is not None
        for at, (message, outcome) in enumerate(row):
            if isinstance(outcome, Abandoned):
                for later, _ in row[at + 1 :]:
                    self.queue.leave(later)
                    await self._return(later, lane, outcome.reason)
                await self._fail(message, lane, outcome)
                return
            decision = decide(outcome, message.attempt, self.handler.retry)
            if isinstance(decision, Park):
                lane.waiting[key].extendleft(later for later, _ in reversed(row[at + 1 :]))
                assert isinstance(outcome, Exception)
                await self.settle_failure(message, lane, outcome)
                return
            if isinstance(decision, Bury):
                await self._bury(message, lane, decision)
            else:
                self._done(message, lane)
            self.queue.leave(message)
        self.queue.release(lane, key)

    def _done(self, message: Message, lane: Lane) -> None:
        if not lane.done:
            self._settler.note(lane)
        lane.done.append(message.entry_id)

    async def _fail(self, message: Message, lane: Lane, outcome: BaseException) -> None:
        if isinstance(outcome, Abandoned):
            await self._give_up(message, lane, outcome.reason)
        else:
            assert isinstance(outcome, Exception)
            await self.settle_failure(message, lane, outcome)


class Abandoned(Exception):
    """The run was cancelled because the lease is lost or the worker stops: no attempt, no outcome."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
