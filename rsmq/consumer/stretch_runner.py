"""Running batch handlers that ask for payloads only: they get those of whole stretches, which nobody has looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from types import CoroutineType
from typing import Any

from rsmq.clock import monotonic
from rsmq.consumer.batch_runner import BatchRunner
from rsmq.consumer.pool import Slot
from rsmq.consumer.queue import Queue
from rsmq.consumer.settler import Settler
from rsmq.consumer.stretch import Part, Rest, Stretch, ended, failed
from rsmq.errors import Malformed
from rsmq.handler import Handler
from rsmq.message import Message
from rsmq.middleware import Call, plain_call


def asks_payloads_only(handler: Handler, call: Call) -> bool:
    """Whether the function wants nothing else of a batch, and nothing around it sees messages."""
    is_direct = plain_call(call) is handler.invoke_batch and handler.execution == "inline"
    return is_direct and handler.signature.payload_call() is not None


class StretchRunner(BatchRunner):
    """A batch runner that calls the function with the payloads of stretches.

    Only if it suspends, fails or says what became of each there is a message for each and its key is taken: until then
    nobody else could have run. What does not go this way goes message by message, in the same order.
    """

    def __init__(self, handler: Handler, call: Call, queue: Queue, settler: Settler, stats: Counter[str]) -> None:
        super().__init__(handler, call, queue, settler, stats)
        self._payload_call = handler.signature.payload_call()
        queue.takes_stretches = True

    async def _work_once(self, slot: Slot) -> None:
        parts = self._take_parts()
        if parts:
            await self._handle_parts(slot, parts)
        else:
            await super()._work_once(slot)

    def _take_parts(self) -> list[Part]:
        """A batch of stretches, if one can start now; what would have to linger is gathered message by message."""
        limit = self.handler.batch or 1
        if self.handler.linger and self._in_stretches(limit) < limit:
            return []
        return self.queue.take_stretches(limit)

    def _in_stretches(self, limit: int) -> int:
        count = 0
        for each in self.queue.ready:
            if count >= limit or type(each) is not Stretch:
                break
            count += len(each.rows)
        return count

    async def _handle_parts(self, slot: Slot, parts: list[Part]) -> None:
        payloads = self._payloads(parts)
        if payloads is None:
            batch, heads = self._unfold(parts)
            await self._handle(slot, await self._started(batch), heads)
            return
        slot.started = monotonic()
        rest = self._first_step(payloads)
        if rest is None:
            self._parts_done(parts)
        else:
            batch, heads = self._unfold(parts)
            await self._handle(slot, batch, heads, rest)

    def _payloads(self, parts: list[Part]) -> list[Any] | None:
        """All payloads; None if a lease is over or one of them is unreadable."""
        now, decode, payloads = monotonic(), self.handler.decode, list[Any]()
        try:
            for lane, rows in parts:
                if now >= lane.lease.deadline:
                    return None
                message = Message(lane, *rows[0])  # one for all: of a plain entry a decoder sees nothing but the data
                for _, entry in rows:
                    message.data = entry[1]
                    payloads.append(decode(message))
        except Malformed:
            return None
        return payloads

    def _first_step(self, payloads: list[Any]) -> Awaitable[Any] | None:
        """Call the handler and let it run to where it suspends. None: it never did, and all is done."""
        assert self._payload_call is not None
        try:
            work = self._payload_call(payloads)
            if type(work) is not CoroutineType:
                return work  # type: ignore[no-any-return]
            return Rest(work, work.send(None))
        except StopIteration as end:
            return None if end.value is None else ended(end.value)
        except BaseException as error:
            return failed(error)

    def _unfold(self, parts: list[Part]) -> tuple[list[Message], list[Message]]:
        """A message for each, and their keys taken before anybody else runs; what is behind them waits."""
        batch, heads = list[Message](), list[Message]()
        for lane, rows in parts:
            messages = Stretch(lane, rows).messages()
            lane.running += len(messages)
            batch += messages
            heads += self.queue.hold(lane, messages)
        for lane, _ in parts:
            if lane.stretches:
                self.queue.unfold(lane)
        return batch, heads

    def _parts_done(self, parts: list[Part]) -> None:
        for lane, rows in parts:
            if not lane.done:
                self._settler.note(lane)
            lane.done += [entry_id for entry_id, _ in rows]
            self.queue.in_hand -= len(rows)
        if self.is_starved:
            self._made_space()
