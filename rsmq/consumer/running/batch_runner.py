"""Running batch handlers: many messages a call, an outcome for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any, Final

import anyio

from rsmq.consumer.running.conclusion import Abandoned, HandBack, NotDue, Settle
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.running.task_slot import TURN, TaskSlot, has_other_variables
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import CannotDecode, LostBody, Malformed, MessageError
from rsmq.handler.failure import text_of
from rsmq.handler.first_step import first_step
from rsmq.handler.middleware import Payloads
from rsmq.handler.retry import AlreadyHandled, BatchRolledBack, Bury, Outcome, Park, batch_outcomes
from rsmq.handler.returned import completed
from rsmq.model.clock import monotonic
from rsmq.model.message import Message
from rsmq.model.reason import Reason

ORIGIN: Final = attrgetter("origin")


class BatchRunner(Runner):
    """A runner whose tasks gather up to `batch` messages, for at most `linger`.

    With key order a batch may hold several messages of a key, in order; while it runs, its keys wait. If one fails, the
    later ones of its key go back behind it and are handled again: repeated, never reordered.

    With a `payload_call` the function gets the payloads of raw entries. Messages are made and their keys taken only if
    it suspends, fails or returns outcomes: until then no other task could have run. Batches that cannot go this way are
    handled as messages, in the same order.
    """

    async def _work(self, task_slot: TaskSlot) -> None:
        while True:
            while not self.queue.can_take():
                if self.queue.group_limit is not None:
                    self.queue.group_limit.leave()
                await self._sleep()
            await self._work_once(task_slot)
            if task_slot.rest is not None:
                return
            if monotonic() - self._turn > TURN:
                await self._let_others_run()

    async def _work_once(self, task_slot: TaskSlot) -> None:
        """One batch. In a function of its own, so a task that sleeps does not keep its last batch in memory."""
        if raw := self._take_raw():
            await self._handle_raw(task_slot, raw)
            return
        picked, heads = list[Message](), list[Message]()
        is_cancelled = False
        try:
            await self._gather(picked, heads)
        except asyncio.CancelledError:
            if self.is_ending:
                raise
            is_cancelled = True  # by other code: what is gathered does not wait longer
        if not is_cancelled and self._is_plain(picked):
            await self._handle(task_slot, picked, heads)
        else:
            task_slot.follow(partial(self._handle_started, task_slot, picked, heads))

    # -- payloads only --------------------------------------------------------------------------------------------

    def _take_raw(self) -> list[RawEntries]:
        """A batch of raw entries, if one can start now. One that would have to linger is gathered as messages."""
        limit = self.handler.batch or 1
        if self.handler.linger:
            front = takewhile(lambda each: type(each) is RawEntries, self.queue.ready)
            if sum(len(each.entries) for each in front) < limit:
                return []
        return self.queue.take_raw(limit)

    async def _handle_raw(self, task_slot: TaskSlot, raw: list[RawEntries]) -> None:
        payloads = self._payloads(raw)
        if payloads is None:
            task_slot.follow(partial(self._handle_started, task_slot, *self._make_messages(raw)))
            return
        task_slot.start(monotonic())
        assert self._payload_call is not None
        call = first_step(self._payload_call, payloads)
        if call is not None:
            await self._handle(task_slot, *self._make_messages(raw), call)
            return
        self.times.note(monotonic() - task_slot.started)
        for each in raw:
            self._settler.add_done(each.origin, [entry_id for entry_id, _ in each.entries])
            self.queue.leave_raw(len(each.entries))
        self._go_on(task_slot)

    def _payloads(self, raw: list[RawEntries]) -> list[Any] | None:
        """All payloads; None if a lease is over or one of them is unreadable."""
        now, decode, payloads, made = monotonic(), self.reader.plain, list[Any](), list[Message]()
        try:
            for each in raw:
                if now >= each.origin.lease.deadline:
                    return None
                if each.made and any(message.is_encoded for message in each.made.values()):
                    return None
                payloads += [decode(fields[1]) for _, fields in each.entries]
                made += each.made.values()
        except Malformed:
            return None
        return Payloads(payloads, made) if made else payloads

    def _make_messages(self, raw: list[RawEntries]) -> tuple[list[Message], list[Message]]:
        """A message for each entry, with all keys taken before another task runs. The rest of the lanes waits."""
        batch, heads = list[Message](), list[Message]()
        for each in raw:
            messages = each.messages()
            self._running[each.origin] += len(messages)
            batch += messages
            heads += self.queue.take_keys(each.origin, messages)
        for each in raw:
            if each.origin.flows.raw_entries:
                self.queue.unpack(each.origin)
        return batch, heads

    # -- messages -------------------------------------------------------------------------------------------------

    async def _gather(self, batch: list[Message], heads: list[Message]) -> None:
        """At least one ready message; more while there are more, or until `linger` is over.

        `heads` gets the first message of each key: only that one holds the key.
        """
        limit, deadline = self.handler.batch or 1, None
        while True:
            self._pick(batch, heads, limit)
            deadline = deadline or monotonic() + self.handler.linger.total_seconds()
            left = deadline - monotonic()
            if left <= 0 or len(batch) >= limit:
                return
            with anyio.move_on_after(left):
                await self._sleep()

    def _pick(self, batch: list[Message], heads: list[Message], limit: int) -> None:
        queue, ready, is_ordered = self.queue, self.queue.ready, self.queue.is_ordered
        take = queue.taker()
        while ready and len(batch) < limit:
            if type(ready[0]) is RawEntries:
                queue.unpack(ready[0].origin)
                continue
            message = take()
            if message is None:  # a limit is reached
                return
            lane: Lane = message.origin
            batch.append(message)
            heads.append(message)
            self._running[lane] += 1
            key = message.routing_key
            if is_ordered and key is not None and lane.flows.waiting.get(key):
                behind = queue.take_behind(lane, key, limit - len(batch))
                batch += behind
                self._running[lane] += len(behind)

    async def _handle_started(self, task_slot: TaskSlot, picked: list[Message], heads: list[Message]) -> None:
        """Handle what may start of it, in a task that no handler has seen: a cancellation would lose the others."""
        missing = dict[Message, CannotDecode | NotDue]()
        batch = await self._started(picked, missing)
        if any(message in missing for message in batch):
            outcomes: list[Outcome] = [missing.get(message) for message in batch]
            await self._handle_others(task_slot, batch, heads, outcomes)
        else:
            await self._handle(task_slot, batch, heads)
        if task_slot.rest is None:
            await self._work(task_slot)

    async def _started(self, picked: list[Message], missing: dict[Message, CannotDecode | NotDue]) -> list[Message]:
        """Those that may be handled: the lease is held, the attempt charged, the payload readable. `missing` gets those
        whose key is missing, or whose retry is not due: they are among them, and must not reach the handler."""
        unread = await self._fetched([message for message in picked if message.is_outside])
        now, is_late = monotonic(), any(message.is_redelivered for message in picked)
        charged = await asyncio.gather(*[self._charged(message, now) for message in picked]) if is_late else None
        batch, read = list[Message](), self.reader.read
        for at, message in enumerate(picked):
            lane: Lane = message.origin  # type: ignore[assignment]
            if now < lane.lease.deadline and (charged is None or charged[at]):
                try:
                    if charged is not None and isinstance(not_due := charged[at], NotDue):
                        raise not_due
                    if message in unread:
                        raise unread[message]
                    message.payload = read(message)
                    batch.append(message)
                    continue
                except (CannotDecode, NotDue) as error:
                    missing[message] = error
                    batch.append(message)
                    continue
                except Malformed as error:
                    reason = Reason.LOST_BODY if isinstance(error, LostBody) else Reason.MALFORMED
                    await self._bury(message, lane, Bury(reason, text_of(error), cause=error))
            self._leave(message, lane)
        return await self._unexpired(self._still_ours(batch))

    async def _fetched(self, outside: Sequence[Message]) -> dict[Message, MessageError]:
        """Bring the bodies of messages from their store, together. Returns those without, and why."""
        if not outside:
            return {}
        fetched = await asyncio.gather(*map(self.reader.fetch, outside), return_exceptions=True)
        failed = {
            message: error for message, error in zip(outside, fetched, strict=True) if isinstance(error, BaseException)
        }
        found = dict[Message, MessageError]()
        for message, error in failed.items():
            if not isinstance(error, MessageError):
                raise error
            found[message] = error
        return found

    async def _unexpired(self, batch: list[Message]) -> list[Message]:
        """Without those that have expired. To bury one takes a moment, in which another one may expire, or a lease."""
        has_waited = True
        while has_waited:
            has_waited, kept = False, list[Message]()
            for message in batch:
                lane: Lane = message.origin  # type: ignore[assignment]
                if not message.is_plain and message.expires_ms is not None and await self._expires(message, lane):
                    self._leave(message, lane)
                    has_waited = True
                else:
                    kept.append(message)
            batch = self._still_ours(kept)
        return batch

    def _is_plain(self, picked: list[Message]) -> bool:
        """Decode all of them. False if one needs more than that: a lease, a charge, or its own dead letter."""
        now, decode, read, has_more = monotonic(), self.reader.plain, self.reader.read, self.reader.has_more
        try:
            for lane, run in groupby(picked, ORIGIN):
                if now >= lane.lease.deadline:
                    return False
                for message in run:
                    if message.is_redelivered or (not message.is_plain and message.expires_ms is not None):
                        return False
                    is_usual = message.is_plain or not (has_more or message.is_encoded)
                    message.payload = decode(message.data) if is_usual else read(message)
        except (Malformed, CannotDecode):
            return False
        return True

    async def _charged(self, message: Message, now: float) -> bool | NotDue:
        """Whether it may start: a redelivered one when its attempt is charged and its retry is due."""
        lane: Lane = message.origin  # type: ignore[assignment]
        if now >= lane.lease.deadline:
            return False
        if not message.is_redelivered or not (message.is_plain or self.reader.can_undo(message)):
            return True  # one whose key is missing does not start: to read it raises why
        try:
            return await self.start(message, lane)
        except NotDue as error:
            return error

    def _still_ours(self, batch: list[Message]) -> list[Message]:
        """Without those whose lease ended while others were charged, or became dead letters."""
        now = monotonic()
        for message in batch:
            if now >= message.origin.lease.deadline:  # type: ignore[attr-defined]
                self._leave(message, message.origin)  # type: ignore[arg-type]
        return [message for message in batch if now < message.origin.lease.deadline]  # type: ignore[attr-defined]

    async def _handle(
        self, task_slot: TaskSlot, batch: list[Message], heads: list[Message], call: Awaitable[Any] | None = None
    ) -> None:
        """Call the handler, or await a `call` that has begun, and settle each message by its outcome."""
        outcomes, is_rolled_back = await self._run(task_slot, batch, call) if batch else (None, False)
        if outcomes is not None and is_rolled_back:
            task_slot.follow(partial(self._handle_others, task_slot, batch, heads, outcomes))
            return
        if outcomes is not None or any(head.is_suspect for head in heads):
            conclusion = partial(self._end_batch, batch, outcomes or [None] * len(batch), heads)
            task_slot.follow(partial(self._after, task_slot, conclusion))
            return
        self._all_done(batch, heads)
        self._go_on(task_slot)

    async def _run(
        self, task_slot: TaskSlot, messages: list[Message], call: Awaitable[Any] | None = None
    ) -> tuple[list[Outcome] | None, bool]:
        """Call the handler. Returns an outcome for each message, or None if all are done. True: the transaction of the
        batch was rolled back, so those without an error are not done."""
        task_slot.start(monotonic())
        task_slot.run(messages)
        try:
            result = await (self._call(messages) if call is None else call)
            if result is not None:
                result = await completed(result)
        except BaseException as error:
            outcome = self._outcome(task_slot, error)
            if isinstance(outcome, BatchRolledBack):
                return batch_outcomes(outcome.outcomes, messages), True
            return [outcome] * len(messages), False
        self.times.note(monotonic() - task_slot.started)
        task_slot.end()
        outcomes = None if result is None else batch_outcomes(result, messages)
        if self.notes.wants_results:
            self._keep_results(messages, outcomes)
        return outcomes, False

    def _keep_results(self, messages: Sequence[Message], outcomes: Sequence[Outcome] | None) -> None:
        """A batch handler returns outcomes: so what is kept for a message that is done is None."""
        for at, message in enumerate(messages):
            is_done = outcomes is None or outcomes[at] is None
            if is_done and not message.is_plain and message.result_ms is not None:
                self.notes.keep_result(message, message.origin, None)  # type: ignore[arg-type]

    async def _handle_others(
        self, task_slot: TaskSlot, batch: list[Message], heads: list[Message], outcomes: list[Outcome]
    ) -> None:
        """The transaction of a batch was rolled back: call the handler with the messages that were not the reason.

        Ends, because each call has fewer messages. Only then their keys are released, so nothing overtakes.
        """
        self._leave_out(batch, outcomes)
        others = [message for message, outcome in zip(batch, outcomes, strict=True) if outcome is None]
        ended, is_rolled_back = await self._run(task_slot, others) if others else (None, False)
        found = iter(ended or [None] * len(others))
        outcomes = [next(found) if outcome is None else outcome for outcome in outcomes]
        if is_rolled_back:
            task_slot.follow(partial(self._handle_others, task_slot, batch, heads, outcomes))
        else:
            task_slot.follow(partial(self._after, task_slot, partial(self._end_batch, batch, outcomes, heads)))

    def _leave_out(self, batch: list[Message], outcomes: list[Outcome]) -> None:
        """Give an outcome to messages that cannot be handled now: behind an error of their key, or without a lease."""
        now, failed = monotonic(), set[tuple[int, bytes]]()
        for at, message in enumerate(batch):
            key = (message.partition, message.routing_key) if message.routing_key is not None else None
            if not isinstance(outcomes[at], AlreadyHandled | None):
                if self.queue.is_ordered and key is not None:
                    failed.add(key)
            elif key in failed or (outcomes[at] is None and now >= message.origin.lease.deadline):  # type: ignore[attr-defined]
                outcomes[at] = Abandoned("lost")

    def _go_on(self, task_slot: TaskSlot) -> None:
        """After a batch: in a new task if the handler has left something in this one, a cancellation that it has
        survived or a context variable."""
        if self.is_starved:
            self._made_space()
        is_other = has_other_variables(task_slot.context, self._context)
        if task_slot.task is not None and (task_slot.task.cancelling() or is_other):
            task_slot.follow(partial(self._work, task_slot))

    def _all_done(self, batch: list[Message], heads: list[Message]) -> None:
        """The normal case, without another look at each message."""
        for lane, run in groupby(batch, ORIGIN):
            ids = [message.entry_id for message in run]
            self._running[lane] -= len(ids)
            self._settler.add_done(lane, ids)
        self.queue.leave_raw(len(batch))
        if self.queue.is_ordered:
            for message in heads:
                if message.routing_key is not None:
                    self.queue.release(message.origin, message.routing_key)  # type: ignore[arg-type]

    async def _end_batch(self, batch: list[Message], outcomes: list[Outcome], heads: list[Message]) -> None:
        """Settle each message: with key order together with those of its key, otherwise by itself."""
        if any(outcome is not None for outcome in outcomes):
            outcomes = await self.commit_check.outcomes(batch, outcomes)
        by_key: dict[tuple[int, bytes], list[tuple[Message, Outcome]]] = {}
        for message, outcome in zip(batch, outcomes, strict=True):
            if self.queue.is_ordered and message.routing_key is not None:
                by_key.setdefault((message.partition, message.routing_key), []).append((message, outcome))
            else:
                await self._end_key([(message, outcome)])
        waiting = {key for key, ended in by_key.items() if await self._end_key(ended)}
        if self.queue.is_ordered:
            for head in heads:
                if head.routing_key is not None and (head.partition, head.routing_key) not in waiting:
                    self.queue.release(head.origin, head.routing_key)  # type: ignore[arg-type]
        self._made_space()
        self.wake_soon()

    async def _end_key(self, ended: list[tuple[Message, Outcome]]) -> bool:
        """The messages of one key, in order. True: its key waits for a retry, or has been released already.

        What comes after a message that will be retried waits behind it again. What comes after one that is handed on is
        settled, or starts, when the server knows of that.
        """
        lane: Lane = ended[0][0].origin  # type: ignore[assignment]
        is_of_key = self.queue.is_ordered and ended[0][0].routing_key is not None
        last: bytes | None = None  # of those that leave in order
        for at, (message, outcome) in enumerate(ended):
            conclusion = self._conclude(message, lane, outcome)
            is_again = isinstance(conclusion, HandBack) and not conclusion.is_stop and lane.lease.is_held()
            if last is not None and (is_again or isinstance(conclusion, Park)):
                await self._until_stored(lane, last, len(ended) - at)
            if is_again:
                self._restart([each for each, _ in ended[at:]], lane)
                return True
            if isinstance(conclusion, Park) and outcome is not None:
                self._running[lane] -= len(ended) - at
                self._put_back(lane, [later for later, _ in ended[at + 1 :]])
                await self._park(message, lane, conclusion, outcome)
                return True
            if last is not None and conclusion == Settle():
                lane.outgoing.settle_in_order(message)
                last = message.entry_id
            await self._carry_out(message, lane, conclusion)
            if is_of_key and lane.outgoing.is_handing_on(message.entry_id):
                last = message.entry_id
            self._leave(message, lane)
        key = ended[0][0].routing_key
        return last is not None and key is not None and self._release_when_stored(lane, key, last)

    async def _until_stored(self, lane: Lane, entry_id: bytes, count: int) -> None:
        """Wait until a message that is done is settled. A handover does not wait for those behind it meanwhile: there
        may be no room."""
        self._running[lane] -= count
        await self._settler.until_stored(lane, entry_id)
        self._running[lane] += count

    def _restart(self, messages: list[Message], lane: Lane) -> None:
        """The batch was cancelled because another lane in it was lost. These messages are of a lane that is held."""
        self._running[lane] -= len(messages)
        for message in messages:
            message.is_redelivered = True
        head, *later = messages
        self._put_back(lane, later)
        self.queue.restart(head, head.again())

    def _put_back(self, lane: Lane, later: list[Message]) -> None:
        """These will be handled again, so nothing that they have published counts."""
        for message in later:
            lane.outgoing.forget(message.entry_id)
        self.queue.put_back(lane, [message.again() for message in later])

    def _leave(self, message: Message, lane: Lane) -> None:
        """It is not in the batch any more; its key is released with the others, at the end."""
        self._running[lane] -= 1
        if monotonic() >= lane.lease.deadline:
            lane.lease.lose()
        self.queue.leave(message)
