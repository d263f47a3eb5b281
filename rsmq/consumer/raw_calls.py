"""Calling a handler with one raw entry after the other, as long as its calls end in their first step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from rsmq.consumer.pool import TaskSlot
from rsmq.consumer.queue import Queue
from rsmq.consumer.raw_entries import RawEntries
from rsmq.errors import Malformed
from rsmq.handler.first_step import Returned, first_step, raised
from rsmq.handler.middleware import Call
from rsmq.model.clock import monotonic
from rsmq.model.message import Message

TURN: Final = 0.01
"""Seconds after which a task that never suspended lets the event loop run others."""


class RawCalls:
    """Handles entries without making messages. The rates are asked before each call, so limits need no other way.

    No other task can run before one of the calls suspends. What is not plain goes through the whole `call`, as a
    message.
    """

    def __init__(self, queue: Queue, decode: Callable[[bytes], Any], payload_call: Call, call: Call) -> None:
        self._queue, self._decode, self._payload_call, self._call = queue, decode, payload_call, call

    def run(self, task_slot: TaskSlot, raw: RawEntries) -> tuple[Awaitable[Any] | None, bool]:
        """Handle entries, which are then `done`, until one may not start or a call suspends or fails.

        Returns the rest of that call, and whether the next entry has to wait for its rate.
        """
        assert task_slot.task is not None
        lease, done, made, limit = raw.origin.lease, raw.done, raw.made, self._queue.rate_limit
        decode, function, cancelling = self._decode, self._payload_call, task_slot.task.cancelling
        rate = self._queue.message_rate
        admits = None if rate is None else rate.admits(raw.origin)
        is_special, is_held = bool(made) or admits is not None, False
        rest: Awaitable[Any] | None = None
        task_slot.messages = raw
        end = monotonic() + TURN
        for entry_id, fields in raw.entries if limit is None else raw.entries[: limit.room()]:
            task_slot.started = now = monotonic()
            if now >= lease.deadline or now > end or cancelling():
                break
            if is_special:
                message = made.get(entry_id) if made else None
                if admits is not None and not admits(entry_id, fields, message, now):
                    is_held = True
                    break
                if message is not None:
                    rest = self._call_with(message)
                    if rest is not None and type(rest) is not Returned:
                        break
                    done.append(entry_id)
                    rest = None
                    continue
            try:
                payload = decode(fields[1])
            except Malformed as error:
                rest = raised(error)
                break
            rest = first_step(function, payload)
            if rest is not None and type(rest) is not Returned:
                break
            done.append(entry_id)
            rest = None
        task_slot.messages = ()
        if limit is not None:
            limit.start(len(done) + (rest is not None))
        return rest, is_held

    def _call_with(self, message: Message) -> Awaitable[Any] | None:
        try:
            message.payload = self._decode(message.data)
        except Malformed as error:
            return raised(error)
        return first_step(self._call, message)

    def __repr__(self) -> str:
        return f"<RawCalls {self._queue!r}>"
