"""Running batch handlers that ask for payloads only: the payloads of raw entries, without a message for each."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import Any

from rsmq.consumer.batch_runner import BatchRunner
from rsmq.consumer.pool import TaskSlot
from rsmq.consumer.raw_entries import RawEntries
from rsmq.errors import Malformed
from rsmq.handler.first_step import first_step
from rsmq.handler.middleware import Payloads
from rsmq.model.clock import monotonic
from rsmq.model.message import Message


class PayloadBatchRunner(BatchRunner):
    """A batch runner that calls the function with the payloads of raw entries.

    Messages are made and their keys taken only if the function suspends, fails or returns outcomes: until then no other
    task could have run. Batches that cannot go this way are handled as messages, in the same order.
    """

    async def _work_once(self, task_slot: TaskSlot) -> None:
        raw = self._take_raw()
        await (self._handle_raw(task_slot, raw) if raw else super()._work_once(task_slot))

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
            task_slot.rest = partial(self._handle_started, task_slot, *self._make_messages(raw))
            return
        task_slot.started = monotonic()
        assert self._payload_call is not None
        call = first_step(self._payload_call, payloads)
        if call is not None:
            await self._handle(task_slot, *self._make_messages(raw), call)
        else:
            self._raw_done(raw)
            self._go_on(task_slot)

    def _payloads(self, raw: list[RawEntries]) -> list[Any] | None:
        """All payloads; None if a lease is over or one of them is unreadable."""
        now, decode, payloads, made = monotonic(), self.handler.decode, list[Any](), list[Message]()
        try:
            for each in raw:
                if now >= each.origin.lease.deadline:
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
            each.origin.running += len(messages)
            batch += messages
            heads += self.queue.take_keys(each.origin, messages)
        for each in raw:
            if each.origin.raw_entries:
                self.queue.unpack(each.origin)
        return batch, heads

    def _raw_done(self, raw: list[RawEntries]) -> None:
        for each in raw:
            self._settler.add_done(each.origin, [entry_id for entry_id, _ in each.entries])
            self.queue.in_flight -= len(each.entries)
