"""A slot of the pool, and its fast way: a handler that is called with one raw entry after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, Final

from rsmq.consumer.running.conclusion import Abandoned
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import CannotDecode, Malformed
from rsmq.handler.first_step import Returned, first_step, raised
from rsmq.handler.middleware import Call
from rsmq.handler.reader import PayloadReader
from rsmq.handler.returned import is_unfinished
from rsmq.heartbeat.lease import Lease
from rsmq.model.call_counts import CallTimes
from rsmq.model.clock import monotonic
from rsmq.model.interrupt import is_from_signal
from rsmq.model.message import Message

MOST_ADMITTED: Final = 1024
"""Entries for which a rate of keys or names is asked at once."""


TURN: Final = 0.01
"""Seconds after which a task that never suspended lets the event loop run others."""
Rest = Callable[[], Coroutine[Any, Any, None]]
"""What the next task of a slot begins with."""


class TaskSlot:
    """One of the tasks of the pool: what it runs, since when, and why that was cancelled (`timeout`, `lost`, `stop`,
    `cancelled`).

    `task` is the one that it has now, and `context` has the context variables of that task, as they are. It gets
    another one when a handler may have left something behind in it: that one begins with `rest`, if there is something
    to do first.
    """

    __slots__ = ("_cancelled", "_reason", "context", "messages", "rest", "started", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.context = Context()
        self.rest: Rest | None = None
        self.messages: tuple[Message, ...] | list[Message] | RawEntries = ()
        self.started = 0.0
        self._reason: str | None = None
        self._cancelled: tuple[Message, ...] | list[Message] | RawEntries = ()

    @property
    def named(self) -> str:
        """The first message that it runs, as `3/1718000000000-0`; empty if it runs none. From any thread."""
        first = next(iter(self.messages), None)
        return "" if first is None else f"{first.partition}/{first.stream_id}"

    def renew(self, task: asyncio.Task[None], context: Context) -> asyncio.Task[None]:
        """It has another task now, which runs in a context of its own."""
        self.task = task
        self.context = context
        return task

    def follow(self, rest: Rest) -> None:
        """Its next task begins with `rest`, and this one ends."""
        self.rest = rest

    def take_rest(self) -> Rest | None:
        """What its new task begins with."""
        rest, self.rest = self.rest, None
        return rest

    def start(self, now: float) -> None:
        """It begins a message now, which may still have to wait for the server."""
        self.started = now

    def run(self, messages: tuple[Message, ...] | list[Message]) -> None:
        """Its handler runs with these, or with none."""
        self.messages = messages

    @property
    def is_cancelled(self) -> bool:
        """Whether the handler that runs in it was cancelled already."""
        return self._reason is not None and self._cancelled is self.messages

    def cancel(self, reason: str) -> None:
        """Cancel the handler that runs in it. A handler may swallow a cancellation, so it can be called again."""
        self._reason, self._cancelled = reason, self.messages
        if self.task is not None:
            self.task.cancel()

    def end(self) -> str | None:
        """Forget what it ran. Returns why the pool cancelled that, if it did."""
        reason = self._reason if self._cancelled is self.messages else None  # an earlier call may have swallowed it
        self._reason = None
        self._cancelled = ()
        self.messages = ()
        return reason


class RawCalls:
    """Handles entries without making messages. The rates are asked before the calls, so limits need no other way.

    No other task can run before one of the calls suspends. What is not plain goes through the whole `call`, as a
    message.
    """

    def __init__(self, queue: Queue, reader: PayloadReader, payload_call: Call, call: Call, times: CallTimes) -> None:
        self._queue = queue
        self._times = times
        self._reader = reader
        self._payload_call = payload_call
        self._call = call
        self._most = 8  # entries, about as many as start within the lag of the rate

    def run(self, task_slot: TaskSlot, raw: RawEntries, context: Context) -> tuple[Awaitable[Any] | None, bool]:
        """Handle entries, which are then `done`, until one may not start, a call suspends or fails, or one has changed
        the context: each of them begins in one that is equal to `context`.

        Returns the rest of that call, and whether the next entry has to wait for its rate.
        """
        assert task_slot.task is not None
        lease, done, made, limit = raw.origin.lease, raw.done, raw.made, self._queue.rate_limit
        decode, function, call, cancelling = (
            self._reader.plain,
            self._payload_call,
            self._call,
            task_slot.task.cancelling,
        )
        rate, entries, admitted, is_held = self._queue.message_rate, raw.entries, list[Any](), False
        rest: Awaitable[Any] | None = None
        current = task_slot.context
        task_slot.messages = raw
        began = monotonic()
        end = began + TURN
        if limit is not None:
            entries = entries[: limit.room()]
        if rate is not None:
            end = began + min(TURN, rate.lag)
            admitted, is_held = rate.admit(raw, min(self._most, len(entries)), began, end)
            entries = entries[: len(admitted)]
        positions = iter(made)
        next_made = next(positions, -1)
        for position, (entry_id, fields) in enumerate(entries):
            task_slot.started = now = monotonic()
            if now >= lease.deadline or now > end or cancelling():
                break
            try:
                if position != next_made:
                    called = function
                    argument = decode(fields[1])
                else:
                    called = call
                    argument = made[position]
                    next_made = next(positions, -1)
                    if argument.is_outside:
                        rest = self._fetch_and(argument, lease)
                        break
                    argument.payload = self._reader.read(argument)
            except (Malformed, CannotDecode) as error:
                rest = raised(error)
                break
            rest = first_step(called, argument)
            if rest is not None and (type(rest) is not Returned or is_unfinished(rest.value)):
                break
            done.append(entry_id)
            rest = None
            try:  # without a call for each entry
                if current != context:
                    break
            except BaseException as error:  # of an `__eq__` of the user
                if is_from_signal(error):
                    raise
                break
        task_slot.messages = ()
        if done:
            self._times.note_burst(monotonic() - began, len(done), TURN)
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

    async def _fetch_and(self, message: Message, lease: Lease) -> Any:
        """The call of a message whose body lies in a store."""
        await self._reader.fetch(message)
        if monotonic() >= lease.deadline:
            lease.lose()
            raise Abandoned("lost")
        message.payload = self._reader.read(message)
        return await self._call(message)

    def __repr__(self) -> str:
        return f"<RawCalls {self._queue!r}>"


def has_other_variables(current: Context, before: Context) -> bool:
    """Whether a handler has set a context variable. What `==` cannot compare, such as an array, is another value."""
    try:
        return current != before
    except BaseException as error:  # of an `__eq__` of the user
        if is_from_signal(error):
            raise
        return True
