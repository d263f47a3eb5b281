"""A pool of worker tasks, woken lazily, so that a handler which does not suspend costs no task switch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from datetime import timedelta

import anyio

from rsmq.clock import monotonic
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.message import Message


class Slot:
    """One worker task: what it runs, since when, and why it was cancelled (`timeout`, `lost` or `stop`)."""

    __slots__ = ("messages", "reason", "started", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.messages: tuple[Message, ...] | list[Message] = ()
        self.started = 0.0
        self.reason: str | None = None

    def cancel(self, reason: str) -> None:
        """Cancel the handler that runs in it; asked again, it cancels again (a handler may swallow the first)."""
        self.reason = reason
        assert self.task is not None
        self.task.cancel()

    def end(self) -> str | None:
        """Forget the run; returns why it was cancelled. The task itself lives on."""
        reason, self.reason, self.messages = self.reason, None, ()
        if reason is not None and self.task is not None:
            while self.task.cancelling():
                self.task.uncancel()
        return reason


class Pool(ABC):
    """Up to `concurrency` tasks that work on what is ready in a queue. They are made when they are first needed."""

    def __init__(self, queue: Queue, concurrency: int, timeout: timedelta | None = None) -> None:
        self.queue = queue
        self._concurrency, self._timeout = concurrency, timeout
        self._slots: list[Slot] = []
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: anyio.abc.TaskGroup | None = None

    @abstractmethod
    async def _work(self, slot: Slot) -> None:
        """What a task does: handle what is ready, `_sleep` when nothing is, for ever."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hold the tasks, and watch over time-outs, until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            if self._timeout is not None:
                self._tasks.start_soon(self._watch, self._timeout.total_seconds())
            await anyio.sleep_forever()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The pool as it is now. May be asked from another thread."""
        return tuple(self._slots)

    async def kick(self) -> None:
        """Let the pool work on what is ready: one worker first, more only if that one was not enough."""
        if self.queue.ready:
            self._wake(1)
            await asyncio.sleep(0)
            while self.queue.ready and self._wake(len(self.queue.ready)):
                await asyncio.sleep(0)

    def kick_soon(self) -> None:
        """The same from a callback."""
        self._wake(len(self.queue.ready))

    def _wake(self, count: int) -> int:
        woken = 0
        while woken < count and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        while woken < count and len(self._slots) < self._concurrency and self._tasks is not None:
            slot = Slot()
            self._slots.append(slot)
            self._tasks.start_soon(self._work, slot)
            woken += 1
        return woken

    async def _sleep(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        try:
            await waiter
        except BaseException:  # cancelled: the end of a batch's linger. Whoever wakes a waiter has taken it out
            if waiter in self._idle:
                self._idle.remove(waiter)
            raise

    # -- cancelling -----------------------------------------------------------------------------------------------

    async def _watch(self, seconds: float) -> None:
        """One sweep over start times for all handlers: a timer for each would cost more than most of them."""
        while True:
            await asyncio.sleep(min(1.0, max(0.02, seconds / 10)))
            self._cancel_late(monotonic() - seconds)

    def _cancel_late(self, limit: float) -> None:
        for slot in self._slots:
            if slot.messages and slot.started < limit:
                slot.cancel("timeout")

    def cancel_lane(self, lane: Lane, reason: str) -> None:
        """Cancel what runs for a lane: its lease is lost, or the grace of a stop is over."""
        for slot in self._slots:
            if any(message.origin is lane for message in slot.messages):
                slot.cancel(reason)
