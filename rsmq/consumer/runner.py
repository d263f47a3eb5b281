"""Running handlers: a pool of tasks, woken lazily, so that a handler which does not suspend costs no task switch.

Nothing here is awaited per message but the handler itself; what failed takes the slow road through the settler.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import anyio

from rsmq.clock import monotonic
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.settler import Settler
from rsmq.consumer.turnstile import Turnstile
from rsmq.errors import BrokerError, HandlerTimeout
from rsmq.handler import Call, Handler
from rsmq.message import Message
from rsmq.retry import Ack, Bury, Park, decide, describe

log = logging.getLogger("rsmq.handler")

TURN: Final = 0.01
"""Seconds after which a worker that never suspended lets the loop breathe."""


class Abandoned(Exception):
    """The run was cancelled because the lease is lost or the worker stops: no attempt, no outcome."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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


class Runner:
    """Runs one message per handler call, up to `concurrency` at once, in key order where asked.

    Invariant: no handler starts past its lease's local deadline, read from the clock at every start.
    """

    def __init__(self, handler: Handler, call: Call, queue: Queue, settler: Settler, stats: Counter[str]) -> None:
        self.handler, self.queue, self._settler, self._stats = handler, queue, settler, stats
        self._call = call
        self.is_starved = False
        self.space = asyncio.Event()
        self.turnstile: Turnstile | None = None
        self._low = 0
        self._slots: list[Slot] = []
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hold the pool and watch over time-outs until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            if self.handler.timeout is not None:
                self._tasks.start_soon(self._watch, self.handler.timeout.total_seconds())
            await anyio.sleep_forever()

    async def _watch(self, seconds: float) -> None:
        """One sweep over start times for all handlers: a timer for each would cost more than most of them."""
        while True:
            await asyncio.sleep(min(1.0, max(0.02, seconds / 10)))
            self._cancel_late(monotonic() - seconds)

    def _cancel_late(self, limit: float) -> None:
        for slot in self._slots:
            if slot.messages and slot.started < limit:
                slot.cancel("timeout")

    # -- the pool -------------------------------------------------------------------------------------------------

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
        while woken < count and len(self._slots) < self.handler.concurrency and self._tasks is not None:
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

    async def wait_for_space(self, low: int) -> None:
        """Wait until at most `low` messages are in hand."""
        self._low, self.is_starved = low, True
        self.space.clear()
        if self.queue.in_hand > low:
            await self.space.wait()
        self.is_starved = False

    def _made_space(self) -> None:
        if self.queue.in_hand <= self._low:
            self.space.set()

    async def _work(self, slot: Slot) -> None:
        slot.task = asyncio.current_task()
        ready, decode, call = self.queue.ready, self.handler.decode, self._call
        queue, ordered, settler = self.queue, self.queue.is_ordered, self._settler
        turn = monotonic()
        while True:
            while ready:
                message = ready.popleft()
                lane: Lane = message.origin
                slot.started = now = monotonic()
                lane.running += 1  # from here to its settlement: who hands the lane over waits for that
                if now >= lane.lease.deadline or (
                    message.is_redelivered and not await self._charge(slot, message, lane)
                ):
                    lane.running -= 1
                    self._drop(message, lane)
                    continue
                slot.messages = (message,)
                try:
                    message.payload = decode(message)
                    await call(message)
                except BaseException as error:
                    try:
                        await self._end(slot, message, lane, error)
                    finally:
                        lane.running -= 1
                    continue
                if slot.reason is not None:
                    slot.end()
                slot.messages = ()
                if message.is_redelivered:
                    await self._settle(message, lane)
                    queue.finish(message, lane)
                else:
                    done = lane.done
                    if not done:
                        settler.note(lane)
                    done.append(message.entry_id)
                    queue.in_hand -= 1
                    key = message.routing_key
                    if ordered and key is not None:
                        behind = lane.waiting.get(key)
                        if behind:
                            queue.release(lane, key)
                        elif behind is not None:
                            del lane.waiting[key]
                lane.running -= 1
                if self.is_starved:
                    self._made_space()
                if now - turn > TURN:
                    await asyncio.sleep(0)
                    turn = monotonic()
            if self.turnstile is not None:
                self.turnstile.leave()
            await self._sleep()
            turn = monotonic()

    async def _charge(self, slot: Slot, message: Message, lane: Lane) -> bool:
        """Charge the attempt of a redelivered message. False: do not start it; the lease may have gone meanwhile."""
        is_ours = await self._settler.start(message, lane)
        slot.started = monotonic()
        return is_ours and slot.started < lane.lease.deadline

    async def _settle(self, message: Message, lane: Lane) -> None:
        """It is done. A suspect is settled before the next one starts, which may end this process."""
        if message.is_suspect:
            await self._settler.settle(message, lane)
            return
        if not lane.done:
            self._settler.note(lane)
        lane.done.append(message.entry_id)

    def _drop(self, message: Message, lane: Lane) -> None:
        """Do not start it. A lease that has once run out here stays lost: what is behind must not overtake."""
        if monotonic() >= lane.lease.deadline:
            lane.lease.lose()
        self.queue.finish(message, lane)
        self._made_space()

    # -- the slow road --------------------------------------------------------------------------------------------

    async def _end(self, slot: Slot, message: Message, lane: Lane, error: BaseException) -> None:
        """A handler did not return normally."""
        failure = self._failure(slot, error)
        if isinstance(failure, Abandoned):
            await self._give_up(message, lane, failure.reason)
        else:
            await self.settle_failure(message, lane, failure)
        self._made_space()

    def _failure(self, slot: Slot, error: BaseException) -> Exception:
        """What a handler's exception means; what is not the handler's own is raised."""
        ends = slot.task is not None and slot.task.cancelling() > 0
        reason = slot.end()
        if isinstance(error, asyncio.CancelledError):
            if reason == "timeout":
                assert self.handler.timeout is not None
                return HandlerTimeout(self.handler.name, self.handler.timeout.total_seconds())
            if reason is not None:
                return Abandoned(reason)
            if ends:
                raise error  # the pool itself ends
            return RuntimeError("something that the handler awaited was cancelled")
        if isinstance(error, Exception):
            return error
        raise error

    async def _give_up(self, message: Message, lane: Lane, reason: str) -> None:
        await self._return(message, lane, reason)
        self.queue.finish(message, lane)

    async def _return(self, message: Message, lane: Lane, reason: str) -> None:
        """A planned stop hands it back; of a lost lease the new owner takes it over."""
        if reason == "stop":
            try:
                await self._settler.hand_back(lane, [message])
            except BrokerError as error:
                log.warning("%s is redelivered after the lease: %s", message, error)

    async def settle_failure(self, message: Message, lane: Lane, error: Exception) -> None:
        """Carry out the decision for one failed message."""
        decision = decide(error, message.attempt, self.handler.retry)
        if isinstance(decision, Park):
            self._stats["retried"] += 1
            log.info(
                "%s failed, attempt %d, again in %s: %s", message, message.attempt, decision.delay, describe(error)
            )
            await self._park(message, lane, decision)
        elif isinstance(decision, Bury):
            await self._bury(message, lane, decision)
            self.queue.finish(message, lane)
        else:
            assert isinstance(decision, Ack)

    async def _bury(self, message: Message, lane: Lane, decision: Bury) -> None:
        self._stats["buried"] += 1
        log.warning("%s is a dead letter (%s): %s", message, decision.reason, decision.error)
        await self._settler.bury(lane, message.entry_id, message.attempt, decision)

    async def _park(self, message: Message, lane: Lane, decision: Park) -> None:
        has_key = self.queue.is_ordered and message.routing_key is not None
        is_parked = await self._settler.park(message, lane, decision.delay, keep_pending=has_key)
        if not (is_parked and has_key):
            lane.retry_at = min(lane.retry_at, monotonic() + decision.delay.total_seconds())
            self.queue.finish(message, lane)
            return
        self.queue.park(message, lane)
        self.resume_later(message, lane, decision.delay.total_seconds())

    def resume_later(self, message: Message, lane: Lane, seconds: float) -> None:
        """Start a parked message of an ordered lane again when it is due."""
        asyncio.get_running_loop().call_later(seconds, self._resume, message, lane)

    def _resume(self, message: Message, lane: Lane) -> None:
        message.attempt += 1
        message.is_redelivered = True
        self.queue.resume(message, lane)
        self.kick_soon()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The pool as it is now. May be asked from another thread."""
        return tuple(self._slots)

    # -- lanes that go --------------------------------------------------------------------------------------------

    def cancel_lane(self, lane: Lane, reason: str) -> None:
        """Cancel what runs for a lane: its lease is lost, or the grace of a stop is over."""
        for slot in self._slots:
            if any(message.origin is lane for message in slot.messages):
                slot.cancel(reason)

    def __repr__(self) -> str:
        busy = sum(1 for slot in self._slots if slot.messages)
        return f"<Runner {self.handler.name} busy={busy}/{self.handler.concurrency} {self.queue!r}>"
