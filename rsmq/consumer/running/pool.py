"""A pool of tasks that run handlers, woken lazily: a handler that does not suspend costs no task switch."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from abc import ABC, abstractmethod
from asyncio import Task
from collections import defaultdict
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextvars import Context, copy_context
from datetime import timedelta
from typing import Any

import anyio

from rsmq.consumer.running.task_slot import Rest, TaskSlot
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.queue import Queue
from rsmq.model.clock import monotonic
from rsmq.model.message import Message

log = logging.getLogger("rsmq.handler")


class Pool(ABC):
    """Up to `concurrency` tasks that handle what is ready in a queue. A task is made when it is first needed.

    Handlers run in these tasks, so they can cancel them, and can leave cancellations and open cancel scopes behind. Two
    rules keep that from other messages. Only `is_ending` says that the pool ends: no scope and no task group cancels
    these tasks, so any cancellation that is not the pool's comes from a handler. And a task in which a call failed or
    was cancelled ends: the next task of its slot settles the messages and goes on.
    """

    def __init__(
        self, queue: Queue, concurrency: int, timeout: timedelta | None = None, soft_timeout: timedelta | None = None
    ) -> None:
        self.queue = queue
        self.is_ending = False
        self._concurrency, self._timeout = concurrency, timeout
        self._soft_timeout = soft_timeout
        self._task_slots: list[TaskSlot] = []
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: set[Task[None]] = set()
        self._context: Context = copy_context()
        self._failure: asyncio.Future[None] | None = None  # while the pool runs
        self._running = defaultdict[Lane, int](int)
        self._turn = 0.0  # since when no task has let the event loop run others
        self._close: Callable[[], Awaitable[None]] | None = None

    def end_with(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close something at the end, when no handler runs any more."""
        self._close = close

    @abstractmethod
    async def _work(self, task_slot: TaskSlot) -> None:
        """Handle what is ready, `_sleep` when nothing is. Returns when another task must go on."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tasks and cancel handlers that time out, until cancelled."""
        self._context, self._failure = copy_context(), asyncio.get_running_loop().create_future()
        async with anyio.create_task_group() as upkeep:
            if self._timeout is not None:
                soft = self._timeout if self._soft_timeout is None else self._soft_timeout
                upkeep.start_soon(self._watch_timeouts, soft.total_seconds(), self._timeout.total_seconds())
            task_status.started()
            try:
                await self._failure
            finally:
                self.is_ending = True
                with anyio.CancelScope(shield=True):
                    await self._end_tasks()
                    if self._close is not None:
                        await self._close()
                upkeep.cancel_scope.cancel()

    async def _end_tasks(self) -> None:
        """Cancel all tasks until they have ended: a handler may swallow a cancellation."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.02)

    @property
    def task_slots(self) -> tuple[TaskSlot, ...]:
        """The tasks of the pool. May be called from any thread."""
        return tuple(self._task_slots)

    @property
    def trouble(self) -> str | None:
        """Why the pool cannot go on; None while it can. May be called from any thread."""
        if self.is_ending:
            return "its pool has ended"
        tasks = [task_slot.task for task_slot in self.task_slots]
        ended = sum(1 for task in tasks if task is not None and task.done())
        return f"{ended} of the {len(tasks)} tasks of its pool have ended" if ended else None

    @property
    def unclaimed(self) -> object:
        """The first ready message if a task is free to take it, else None. May be called from any thread."""
        is_free = bool(self._idle) or len(self._task_slots) < self._concurrency
        try:
            return self.queue.ready[0] if is_free and not self.queue.is_limited else None
        except IndexError:
            return None

    def running_of(self, lane: Lane) -> int:
        """How many messages of a lane have started and are not concluded: a handover waits for them."""
        return self._running.get(lane, 0)

    @property
    def begun(self) -> int:
        """How many messages of all lanes have started and are not concluded, with those whose start a task is
        charging at the server."""
        return sum(self._running.values())

    def forget_running(self, lane: Lane) -> None:
        """The pool has ended: what ran there is not waited for."""
        self._running.pop(lane, None)

    def forget_idle(self) -> None:
        """Keep nothing of lanes in which nothing runs: some of them are over."""
        for lane in [lane for lane, count in self._running.items() if not count]:
            del self._running[lane]

    def runs(self, message: Message) -> bool:
        """Whether a handler runs with this very message now."""
        return any(message in task_slot.messages for task_slot in self._task_slots)

    async def wake(self) -> None:
        """Let the pool handle what is ready: one task first, more only if that one leaves some."""
        if self.queue.startable():
            self._wake(1)
            await asyncio.sleep(0)
            while self._wake(self.queue.startable()):
                await asyncio.sleep(0)
            if not self.queue.in_flight:
                collect_young()

    def wake_soon(self) -> None:
        """The same from a callback."""
        self._wake(self.queue.startable())

    def _wake(self, count: int) -> int:
        woken = 0
        while woken < count and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        while woken < count and len(self._task_slots) < self._concurrency and self._is_running:
            task_slot = TaskSlot()
            self._task_slots.append(task_slot)
            self._start(task_slot)
            woken += 1
        return woken

    @property
    def _is_running(self) -> bool:
        return self._failure is not None and not self.is_ending

    def _start(self, task_slot: TaskSlot) -> None:
        """Give a slot a new task, with the context variables of the pool and not those of a handler."""
        loop, context = asyncio.get_running_loop(), self._context.copy()
        # not by the task factory of the loop: an eager one would run it before its slot has it, and an old one takes no
        # context
        task = task_slot.renew(Task(self._live(task_slot), loop=loop, context=context), context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: Task[None]) -> None:
        """A task has ended. One that failed ends the pool: that is a defect, and no handler's error."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _live(self, task_slot: TaskSlot) -> None:
        """One task of a slot, to its end."""
        self._turn = monotonic()
        rest = task_slot.take_rest()
        try:
            await (self._work(task_slot) if rest is None else rest())
        except asyncio.CancelledError:
            if self.is_ending:
                raise
            log.warning("other code has cancelled a task of the pool between two messages: a new one goes on")
        except GeneratorExit:  # a future that a handler awaited threw it through every coroutine; `rest` is left
            if not is_running_in(task_slot.task):
                raise
        if not self.is_ending:
            self._start(task_slot)
        if self.queue.group_limit is not None:
            self.queue.group_limit.leave(task_slot.task if task_slot.rest is not None else None)

    async def _after(self, task_slot: TaskSlot, conclusion: Rest) -> None:
        """Settle what the last task of the slot has run, then go on. No handler has seen this task yet."""
        if self.queue.group_limit is not None:
            self.queue.group_limit.leave()
        await conclusion()
        await self._work(task_slot)

    async def _sleep(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        try:
            await waiter
            self._turn = monotonic()
        except BaseException:  # cancelled when a batch's linger is over. A waiter that was woken is out of the list
            if waiter in self._idle:
                self._idle.remove(waiter)
            raise

    async def _let_others_run(self) -> None:
        """After `TURN`. One task does it for all: handlers that suspend let others run by themselves."""
        self._turn = monotonic()
        await asyncio.sleep(0)
        self._turn = monotonic()

    # -- cancelling -----------------------------------------------------------------------------------------------

    async def _watch_timeouts(self, soft: float, hard: float) -> None:
        """Compare start times in one sweep: a timer for each call would cost more than most handlers."""
        while True:
            await asyncio.sleep(min(1.0, max(0.02, soft / 10)))
            now = monotonic()
            self._cancel_late(now - hard)
            if soft < hard:
                self._ask_to_end(now - soft)

    def _cancel_late(self, limit: float) -> None:
        for task_slot in self._task_slots:
            if task_slot.messages and task_slot.started < limit:
                task_slot.cancel("timeout")

    def _ask_to_end(self, limit: float) -> None:
        """Once: what a handler does to clean up goes on until the timeout."""
        for task_slot in self._task_slots:
            if task_slot.messages and task_slot.started < limit and not task_slot.is_cancelled:
                task_slot.cancel("timeout")

    def cancel_lane(self, lane: Lane, reason: str, only: AbstractSet[bytes] | None = None) -> None:
        """Cancel a lane's running handlers, or those of some messages: the lease is lost, or the grace of a stop is
        over."""
        for task_slot in self._task_slots:
            running = [message.entry_id for message in task_slot.messages if message.origin is lane]
            if running and (only is None or not only.isdisjoint(running)):
                task_slot.cancel(reason)


def collect_young() -> None:
    """Run Python's garbage collector over new objects, if it will do so soon: now no message is in memory.

    Later it would find a thousand of them alive and count them as old. After some of that it walks over all objects of
    the application, at a microsecond for each message. Python 3.14 counts in another way.
    """
    if gc.isenabled() and 2 * gc.get_count()[1] > gc.get_threshold()[1] and sys.version_info < (3, 14):
        gc.collect(1)


def is_running_in(task: Task[Any] | None) -> bool:
    """Whether this code runs in the task. It does not when its coroutine is closed, at the end of an event loop."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False
