"""Running batch handlers: many messages a call, an outcome for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import anyio

from rsmq.clock import monotonic
from rsmq.consumer.lane import Lane
from rsmq.consumer.pool import Slot
from rsmq.consumer.runner import TURN, Abandoned, Runner
from rsmq.consumer.stretch import Stretch
from rsmq.errors import Malformed
from rsmq.message import Message
from rsmq.retry import Bury, Outcome, Park, Reason, batch_outcomes, decide

ORIGIN: Final = attrgetter("origin")


class BatchRunner(Runner):
    """A runner whose workers gather up to `batch` messages, for at most `linger`.

    With key order a batch may hold several messages of a key, in order; while it runs, its keys wait. If one fails, the
    later ones of its key go back behind it and are handled again: repeated, never reordered.
    """

    async def _work(self, slot: Slot) -> None:
        slot.task = asyncio.current_task()
        turn = monotonic()
        while True:
            while not self.queue.ready:
                if self.turnstile is not None:
                    self.turnstile.leave()
                await self._sleep()
            await self._work_once(slot)
            if monotonic() - turn > TURN:
                await asyncio.sleep(0)
                turn = monotonic()

    async def _work_once(self, slot: Slot) -> None:
        """One batch. In a frame of its own: whoever sleeps with its last batch at hand keeps it in memory."""
        heads: list[Message] = []
        batch = await self._started(await self._gather(heads))
        await self._handle(slot, batch, heads)

    async def _gather(self, heads: list[Message]) -> list[Message]:
        """Of what is ready at least one message; more while there are more, or until `linger` is over.

        `heads` gets the first message of each key: only that one holds the key.
        """
        batch: list[Message] = []
        limit, deadline = self.handler.batch or 1, None
        while True:
            self._pick(batch, heads, limit)
            deadline = deadline or monotonic() + self.handler.linger.total_seconds()
            left = deadline - monotonic()
            if left <= 0 or len(batch) >= limit:
                return batch
            with anyio.move_on_after(left):
                await self._sleep()

    def _pick(self, batch: list[Message], heads: list[Message], limit: int) -> None:
        ready, is_ordered = self.queue.ready, self.queue.is_ordered
        while ready and len(batch) < limit:
            if type(ready[0]) is Stretch:
                self.queue.unfold(ready[0].origin)
                continue
            message = ready.popleft()
            lane: Lane = message.origin
            batch.append(message)
            heads.append(message)
            lane.running += 1
            if is_ordered and message.routing_key is not None:
                behind = lane.waiting.get(message.routing_key)
                while behind and len(batch) < limit and not behind[0].is_suspect:
                    batch.append(behind.popleft())
                    lane.running += 1

    async def _started(self, picked: list[Message]) -> list[Message]:
        """Those that may be handled: the lease is held, the attempt charged, the payload readable."""
        return picked if self._is_plain(picked) else await self._start_each(picked)

    def _is_plain(self, picked: list[Message]) -> bool:
        """Decode all of them, if that is all there is to it: leases held, first deliveries, everything readable."""
        now, decode = monotonic(), self.handler.decode
        try:
            for lane, run in groupby(picked, ORIGIN):
                if now >= lane.lease.deadline:
                    return False
                for message in run:
                    if message.is_redelivered:
                        return False
                    message.payload = decode(message)
        except Malformed:
            return False
        return True

    async def _start_each(self, picked: list[Message]) -> list[Message]:
        """The same, each for itself. The attempts of a batch are charged together."""
        now, is_late = monotonic(), any(message.is_redelivered for message in picked)
        charged = await asyncio.gather(*[self._charged(message, now) for message in picked]) if is_late else None
        batch, decode = list[Message](), self.handler.decode
        for at, message in enumerate(picked):
            lane: Lane = message.origin  # type: ignore[assignment]
            if now >= lane.lease.deadline or not (charged is None or charged[at]):
                self._leave(message, lane)
                continue
            try:
                message.payload = decode(message)
            except Malformed as error:
                await self._bury(message, lane, Bury(Reason.MALFORMED, str(error)))
                self._leave(message, lane)
                continue
            batch.append(message)
        return self._still_ours(batch) if is_late else batch

    async def _charged(self, message: Message, now: float) -> bool:
        """Whether it may start: a redelivered one when its attempt is charged."""
        lane: Lane = message.origin  # type: ignore[assignment]
        return now < lane.lease.deadline and (not message.is_redelivered or await self._settler.start(message, lane))

    def _still_ours(self, batch: list[Message]) -> list[Message]:
        """Without those whose lease has gone while the others were being charged."""
        now = monotonic()
        for message in batch:
            if now >= message.origin.lease.deadline:  # type: ignore[attr-defined]
                self._leave(message, message.origin)  # type: ignore[arg-type]
        return [message for message in batch if now < message.origin.lease.deadline]  # type: ignore[attr-defined]

    async def _handle(
        self, slot: Slot, batch: list[Message], heads: list[Message], rest: Awaitable[Any] | None = None
    ) -> None:
        """Call the handler, or wait for the `rest` of a call, and settle what came of it."""
        slot.messages, slot.started = batch, monotonic()
        outcomes: list[Outcome] | None = None
        if batch:
            try:
                result = await (self._call(batch) if rest is None else rest)
            except BaseException as error:
                outcomes = [self._failure(slot, error)] * len(batch)
            else:
                slot.end()
                outcomes = None if result is None else batch_outcomes(result, batch)
        if outcomes is None and not any(head.is_suspect for head in heads):
            self._all_done(batch, heads)
        else:
            await self._conclude(batch, outcomes or [None] * len(batch), heads)
        if self.is_starved:
            self._made_space()

    def _all_done(self, batch: list[Message], heads: list[Message]) -> None:
        """The normal case, without a second look at each message."""
        for lane, run in groupby(batch, ORIGIN):
            ids = [message.entry_id for message in run]
            lane.running -= len(ids)
            if not lane.done:
                self._settler.note(lane)
            lane.done += ids
        self.queue.in_hand -= len(batch)
        if self.queue.is_ordered:
            for message in heads:
                if message.routing_key is not None:
                    self.queue.release(message.origin, message.routing_key)  # type: ignore[arg-type]

    async def _conclude(self, batch: list[Message], outcomes: list[Outcome], heads: list[Message]) -> None:
        """Settle each item; without key order each stands alone, with it the items of a key stand in a row."""
        rows: dict[tuple[int, bytes], list[tuple[Message, Outcome]]] = {}
        for message, outcome in zip(batch, outcomes, strict=True):
            if self.queue.is_ordered and message.routing_key is not None:
                rows.setdefault((message.partition, message.routing_key), []).append((message, outcome))
            else:
                await self._conclude_row([(message, outcome)])
        waiting = {place for place, row in rows.items() if await self._conclude_row(row)}
        if self.queue.is_ordered:
            for head in heads:
                if head.routing_key is not None and (head.partition, head.routing_key) not in waiting:
                    self.queue.release(head.origin, head.routing_key)  # type: ignore[arg-type]
        self.kick_soon()

    async def _conclude_row(self, row: list[tuple[Message, Outcome]]) -> bool:
        """The items of one key, in order. True: its key waits for a retry, or has been released already.

        What comes after a message that will be tried again goes back into the line behind it.
        """
        lane: Lane = row[0][0].origin  # type: ignore[assignment]
        for at, (message, outcome) in enumerate(row):
            if isinstance(outcome, Abandoned) and outcome.reason == "lost" and lane.lease.is_held():
                self._again([each for each, _ in row[at:]], lane)
                return True
            if isinstance(outcome, Abandoned):
                self._leave(message, lane)
                await self._return(message, lane, outcome.reason)
                continue
            decision = decide(outcome, message.attempt, self.handler.retry)
            if isinstance(decision, Park):
                assert isinstance(outcome, Exception)
                lane.running -= len(row) - at
                self.queue.put_behind(lane, [later for later, _ in row[at + 1 :]])
                await self.settle_failure(message, lane, outcome)
                return True
            if isinstance(decision, Bury):
                await self._bury(message, lane, decision)
            else:
                await self._settle(message, lane)
            self._leave(message, lane)
        return False

    def _again(self, row: list[Message], lane: Lane) -> None:
        """The batch was cancelled because it had messages of another lane, one that is lost: these are still ours."""
        lane.running -= len(row)
        for message in row:
            message.is_redelivered = True
        head, *later = row
        self.queue.put_behind(lane, later)
        self.queue.again(head)

    def _leave(self, message: Message, lane: Lane) -> None:
        """It is not in the batch any more; its key is released with the others, at the end."""
        lane.running -= 1
        if monotonic() >= lane.lease.deadline:
            lane.lease.lose()
        self.queue.leave(message)
