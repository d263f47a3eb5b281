"""Running handlers: one message a call.

Nothing here is awaited per message but the handler itself; what failed takes the slow road through the settler.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from rsmq.clock import monotonic
from rsmq.consumer.lane import Lane
from rsmq.consumer.pool import Pool, Slot
from rsmq.consumer.queue import Queue
from rsmq.consumer.settler import Settler
from rsmq.consumer.turnstile import Turnstile
from rsmq.errors import BrokerError, HandlerTimeout
from rsmq.handler import Handler
from rsmq.message import Message
from rsmq.middleware import Call
from rsmq.retry import Ack, Bury, Park, decide, describe

log = logging.getLogger("rsmq.handler")

TURN: Final = 0.01
"""Seconds after which a worker that never suspended lets the loop breathe."""


class Abandoned(Exception):
    """The run was cancelled because the lease is lost or the worker stops: no attempt, no outcome."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Runner(Pool):
    """Runs one message per handler call, up to `concurrency` at once, in key order where asked.

    Invariant: no handler starts past its lease's local deadline, read from the clock at every start.
    """

    def __init__(self, handler: Handler, call: Call, queue: Queue, settler: Settler, stats: Counter[str]) -> None:
        super().__init__(queue, handler.concurrency, handler.timeout)
        self.handler, self._settler, self._stats = handler, settler, stats
        self._call = call
        self.is_starved = False
        self.space = asyncio.Event()
        self.retries = asyncio.Event()  # a lane may have got a time to look for retries at
        self.turnstile: Turnstile | None = None
        self._low = 0

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
            self.retries.set()
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

    def __repr__(self) -> str:
        busy = sum(1 for slot in self._slots if slot.messages)
        return f"<Runner {self.handler.name} busy={busy}/{self.handler.concurrency} {self.queue!r}>"
