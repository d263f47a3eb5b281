"""Calling a handler with one raw entry after the other, as long as its calls end in their first step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from rsmq.consumer.running.pool import TURN, TaskSlot
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import Malformed
from rsmq.handler.first_step import Returned, first_step, raised
from rsmq.handler.middleware import Call
from rsmq.model.clock import monotonic

MOST_ADMITTED: Final = 1024
"""Entries for which a rate of keys or names is asked at once."""


class RawCalls:
    """Handles entries without making messages. The rates are asked before the calls, so limits need no other way.

    No other task can run before one of the calls suspends. What is not plain goes through the whole `call`, as a
    message.
    """

    def __init__(self, queue: Queue, decode: Callable[[bytes], Any], payload_call: Call, call: Call) -> None:
        self._queue, self._decode, self._payload_call, self._call = queue, decode, payload_call, call
        self._most = 8  # entries, about as many as start within the lag of the rate

    def run(self, task_slot: TaskSlot, raw: RawEntries) -> tuple[Awaitable[Any] | None, bool]:
        """Handle entries, which are then `done`, until one may not start or a call suspends or fails.

        Returns the rest of that call, and whether the next entry has to wait for its rate.
        """
        assert task_slot.task is not None
        lease, done, made, limit = raw.origin.lease, raw.done, raw.made, self._queue.rate_limit
        decode, function, call, cancelling = self._decode, self._payload_call, self._call, task_slot.task.cancelling
        rate, entries, admitted, is_held = self._queue.message_rate, raw.entries, list[Any](), False
        rest: Awaitable[Any] | None = None
        task_slot.messages = raw
        began = monotonic()
        end = began + TURN
        if limit is not None:
            entries = entries[: limit.room()]
        if rate is not None:
            end = began + min(TURN, rate.lag)
            admitted, is_held = rate.admit(raw, min(self._most, len(entries)), began, end)
            entries = entries[: len(admitted)]
        places = iter(made)
        made_place = next(places, -1)
        for place, (entry_id, fields) in enumerate(entries):
            task_slot.started = now = monotonic()
            if now >= lease.deadline or now > end or cancelling():
                break
            try:
                payload = decode(fields[1])
            except Malformed as error:
                rest = raised(error)
                break
            if place == made_place:
                made[place].payload = payload
                rest = first_step(call, made[place])
                made_place = next(places, -1)
            else:
                rest = first_step(function, payload)
            if rest is not None and type(rest) is not Returned:
                break
            done.append(entry_id)
            rest = None
        task_slot.messages = ()
        number = len(done) + (rest is not None)
        if limit is not None:
            limit.start(number)
        if rate is not None:
            rate.started(raw, admitted, number)
            is_held = is_held and len(done) == len(admitted)
            if number < len(admitted):
                self._most = number + number // 8 + 1
            elif number == self._most:
                self._most = min(MOST_ADMITTED, 2 * number)
        return rest, is_held

    def __repr__(self) -> str:
        return f"<RawCalls {self._queue!r}>"
