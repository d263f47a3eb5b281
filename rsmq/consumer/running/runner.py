"""Running handlers: one message a call.

Per message nothing is awaited but the handler itself. Only failures and redelivered messages await the settler.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from rsmq.consumer.running.commit_check import CommitCheck
from rsmq.consumer.running.conclusion import Abandoned, Conclusion, HandBack, NotDue, Settle, conclude
from rsmq.consumer.running.missing_keys import MissingKeys
from rsmq.consumer.running.pool import Pool, is_running_in
from rsmq.consumer.running.task_slot import TURN, RawCalls, TaskSlot, has_other_variables
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.holds import Holds
from rsmq.consumer.waiting.lane import Lane, MessageLimits
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import BrokerError, CannotDecode, ConfigError, HandlerTimeout, StoreUnavailable
from rsmq.handler.apart import apart
from rsmq.handler.dead_hook import Burial, DeadFunction, call_hook
from rsmq.handler.error_hook import ErrorHook, report
from rsmq.handler.failure import describe, exc_info
from rsmq.handler.handler import Handler
from rsmq.handler.middleware import Call
from rsmq.handler.reader import PayloadReader
from rsmq.handler.retry import Bury, Outcome, Park, readable_error
from rsmq.handler.returned import completed
from rsmq.model.call_counts import SHORT, CallTimes
from rsmq.model.clock import monotonic
from rsmq.model.interrupt import is_from_signal
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message, becomes_dead, remaining_ms, stored_ms
from rsmq.model.message_ref import MessageRef
from rsmq.model.reason import Reason
from rsmq.model.settings import Settings
from rsmq.model.words import pause
from rsmq.redis.scripts import CANCELLED, NOT_DUE, OK

log = logging.getLogger("rsmq.handler")

STORE_PAUSE: Final = 0.5
"""Seconds between two calls of `on_dead` while the store of what it publishes is away."""


class Runner(Pool):
    """Runs one message per handler call, up to `concurrency` at once, in key order where the handler asks for it.

    Invariant: no handler starts past its lease's local deadline, read from the clock at every start. With a
    `payload_call` raw entries are handled without messages, as long as the function returns at once.
    """

    def __init__(
        self,
        handler: Handler,
        call: Call,
        queue: Queue,
        settler: Settler,
        stats: Counter[str],
        payload_call: Call | None = None,
        error_hooks: Sequence[ErrorHook] = (),
        reader: PayloadReader | None = None,
        patience: timedelta = Settings.key_patience,
    ) -> None:
        super().__init__(queue, handler.concurrency, handler.timeout, handler.soft_timeout)
        self._error_hooks, self._name = error_hooks, f"{handler.topic}/{handler.group}"
        self.handler = handler
        self._settler = settler
        self._stats = stats
        self._call, self._payload_call = call, payload_call
        self.commit_check = CommitCheck(handler)
        self.reader = PayloadReader(handler.decode) if reader is None else reader
        self.times = CallTimes()
        self._raw_calls = payload_call and RawCalls(queue, self.reader, payload_call, call, self.times)
        if payload_call is not None:
            queue.serve_raw()
        self.is_starved = False
        self.space = asyncio.Event()
        self.retries = asyncio.Event()  # set when a lane may have to look for due retries earlier
        self._low = 0
        self._holds: Holds | None = None
        self.limits: MessageLimits | None = None
        self.missing_keys = MissingKeys(self._name, patience)
        self._throttled = ThrottledLog(log)
        self.notes = settler.notes
        self.notes.check_by(self.runs)
        self._dying = set[Message]()  # those with which `on_dead` runs: ids of two partitions may be the same

    def limit_by(self, limits: MessageLimits) -> None:
        """What a handler may ask of its limits."""
        self.limits = limits

    def hold_by(self, holds: Holds) -> None:
        """These hear of what fails, or asks for a hold."""
        self._holds = holds

    async def collect(
        self,
        message: Message,
        lane: Lane,
        topic: str,
        payload: Any,
        options: Mapping[str, Any],
        *,
        is_member: bool = False,
    ) -> MessageRef:
        """Keep an output of a running message until it is settled."""
        check = partial(self._check_runs, message)
        collect = self._settler.outputs.collect
        return await collect(message, lane, topic, payload, options, check, is_member=is_member)

    def _check_runs(self, message: Message) -> None:
        if not self.runs(message) and message not in self._dying:
            raise ConfigError(
                f"the handler of {message} has ended, so nothing can be published with it: await "
                f"message.publish(...) inside the handler, or use broker.publish"
            )

    def cancel_lane(self, lane: Lane, reason: str, only: AbstractSet[bytes] | None = None) -> None:
        """Cancel its calls. When the worker stops, nothing waits for a database any more."""
        if reason == "stop":
            self.commit_check.end()
        super().cancel_lane(lane, reason, only)

    async def wait_for_space(self, low: int) -> None:
        """Wait until at most `low` messages are in flight, or what is in flight waits behind keys."""
        self._low, self.is_starved = low, True
        self.space.clear()
        if self.queue.in_flight > low:
            await self.space.wait()
        self.is_starved = False

    def _made_space(self) -> None:
        if self.queue.in_flight <= self._low or self.queue.is_thirsty:
            self.space.set()

    async def _work(self, task_slot: TaskSlot) -> None:
        assert task_slot.task is not None
        queue, ready, settler = self.queue, self.queue.ready, self._settler
        take = queue.taker()
        reader, call, cancelling = self.reader, self._call, task_slot.task.cancelling
        decode, has_more = reader.plain, reader.has_more
        context, current = self._context, task_slot.context  # the latter has what handlers have set
        running, note, counts = self._running, self.times.note, self.times.counts
        ended = 0.0  # when the last call ended, which is when the next one begins; 0: other code has run since
        while True:
            while ready:
                message, rest = take(), None
                if message is None:  # a limit is reached
                    break
                if type(message) is RawEntries:
                    ended = 0.0
                    message, rest = self._run_raw(task_slot, message)
                    if message is None and (cancelling() or has_other_variables(current, context)):
                        task_slot.follow(partial(self._work, task_slot))
                        return
                    if message is None:
                        if monotonic() - self._turn > TURN:
                            await self._let_others_run()
                        continue
                lane: Lane = message.origin
                task_slot.started = now = ended or monotonic()  # written without a call: twice a message
                running[lane] += 1  # until it is settled: a handover waits for that
                try:
                    if rest is None:
                        if (
                            now >= lane.lease.deadline
                            or (message.is_redelivered and not await self._charge(task_slot, message, lane))
                            or (
                                not message.is_plain
                                and message.expires_ms is not None
                                and await self._expires(message, lane)
                            )
                            or (
                                not message.is_plain
                                and message.is_outside
                                and not await self._fetch_first(task_slot, message, lane)
                            )
                        ):
                            running[lane] -= 1
                            self._drop(message, lane)
                            ended = 0.0
                            continue
                        task_slot.messages = (message,)
                        if message.is_plain:
                            message.payload = decode(message.data)
                            rest = call(message)
                        else:
                            if message.is_encoded or has_more:
                                message.payload = reader.read(message)
                            else:
                                message.payload = decode(message.data)
                            rest = call(message) if message.result_ms is None else self._keeping(message, lane)
                    else:
                        task_slot.messages = (message,)
                    result = await rest
                    if result is not None:
                        await completed(result)
                except BaseException as error:
                    self._leave_to_next(task_slot, message, lane, self._outcome(task_slot, error))
                    return
                ended = monotonic()
                if ended - now <= SHORT:
                    counts[0] += 1
                else:
                    note(ended - task_slot.started)  # a redelivered one has started later
                if cancelling():  # it was cancelled, and returned all the same
                    self._leave_to_next(task_slot, message, lane, None)
                    return
                task_slot.messages = ()
                try:  # without a call for each message
                    is_other = current != context  # it has set a variable, which the next may not see
                except BaseException as error:  # of an `__eq__` of the user
                    if is_from_signal(error):
                        raise
                    is_other = True
                if message.is_suspect or is_other:
                    self._leave_to_next(task_slot, message, lane, None)
                    return
                if lane.done:
                    lane.done.append(message.entry_id)
                else:
                    settler.add_done(lane, (message.entry_id,))
                queue.finish(message, lane)
                running[lane] -= 1
                if self.is_starved:
                    self._made_space()
                if now - self._turn > TURN:
                    await self._let_others_run()
                    ended = 0.0
            if queue.group_limit is not None:
                queue.group_limit.leave()
            if ready is queue.ready:
                await self._sleep()
            ended = 0.0
            ready, take = queue.ready, queue.taker()  # the topic may have got bands

    async def _keeping(self, message: Message, lane: Lane) -> None:
        """Call the handler, and keep what it returns with the settlement of the message."""
        self.notes.keep_result(message, lane, await completed(await self._call(message)))

    def _run_raw(self, task_slot: TaskSlot, raw: RawEntries) -> tuple[Message | None, Awaitable[Any] | None]:
        """Handle raw entries. Returns the message whose call suspends or fails, with the rest of that call, or a
        message that may not start, because its lease is over. What was not handled is ready again.
        """
        assert self._raw_calls is not None
        queue, lane, done = self.queue, raw.origin, raw.done
        lane.flows.count_raw(-1)
        rest, is_held = self._raw_calls.run(task_slot, raw, self._context)
        self._settler.add_done(lane, done)
        queue.leave_raw(len(done))
        if self.is_starved:
            self._made_space()
        if rest is not None or (task_slot.started >= lane.lease.deadline and len(done) < len(raw.entries)):
            return queue.split_raw(raw), rest
        queue.put_back_raw(raw, is_held=is_held)
        return None, None

    async def _charge(self, task_slot: TaskSlot, message: Message, lane: Lane) -> bool:
        """Charge the attempt of a redelivered message. False: do not start it; the lease may have ended meanwhile."""
        rate = self.queue.message_rate
        if message.is_outside:
            await self._fetch(message)
        if not message.is_plain and message.is_encoded and not self.reader.can_undo(message):
            if rate is not None:
                rate.forget(message)
            return monotonic() < lane.lease.deadline  # it does not start: to read it raises why
        try:
            is_ours = await self.start(message, lane)
        except BaseException:
            if rate is not None:
                rate.forget(message)
            raise
        if rate is not None:
            await rate.starts_late(message, lane)
        task_slot.start(monotonic())
        return is_ours and task_slot.started < lane.lease.deadline

    async def _fetch(self, message: Message) -> None:
        """Bring the body of a message from its store. What raises then has not started."""
        try:
            await self.reader.fetch(message)
        except BaseException:
            if self.queue.message_rate is not None:
                self.queue.message_rate.forget(message)
            raise

    async def _fetch_first(self, task_slot: TaskSlot, message: Message, lane: Lane) -> bool:
        """The same for one that is not redelivered: it starts when its body is there, for its rate, too. False: it has
        expired meanwhile. Raises Abandoned if the lease has ended meanwhile."""
        task_slot.messages = (message,)
        await self._fetch(message)
        task_slot.messages = ()
        if message.expires_ms is not None and await self._expires(message, lane):
            return False
        if self.queue.message_rate is not None:
            await self.queue.message_rate.starts_late(message, lane)
        task_slot.start(monotonic())
        if task_slot.started >= lane.lease.deadline:
            lane.lease.lose()  # or later messages would overtake this one
            if self.queue.message_rate is not None:
                self.queue.message_rate.forget(message)
            raise Abandoned("lost")
        return True

    async def start(self, message: Message, lane: Lane) -> bool:
        """Charge a redelivered message. False: it does not start. One that is to be cancelled is settled so. Raises
        NotDue."""
        word, wait = await self._settler.charge(message, lane)
        if word == NOT_DUE:
            raise NotDue(wait)
        if word == CANCELLED and not await self.is_concluded(message, lane):
            await self._settler.settle_cancelled(lane, message.entry_id)
        return word == OK

    async def is_concluded(self, message: Message, lane: Lane) -> bool:
        """Before a redelivered message ends without another attempt. True: it has ended. An earlier attempt has
        committed its effects, so it is settled as handled; or it is the next owner's."""
        (answer,) = await self.commit_check.ask(lane, [message])
        if answer is None:
            await self._settle(message, lane)
        elif answer is not False:
            await self._carry_out(message, lane, self._conclude(message, lane, answer))
        return answer is not False

    async def _expires(self, message: Message, lane: Lane) -> bool:
        """Whether a message has expired: then it is settled, and its handler does not start."""
        left = remaining_ms(message, self._settler.clock.now_ms())
        if left is None or left > 0:
            return False
        if message.is_redelivered and await self.is_concluded(message, lane):
            return True
        self._stats["expired"] += 1
        if becomes_dead(message):
            decision = Bury(Reason.EXPIRED, f"it expired {pause(timedelta(milliseconds=-left))} ago")
            log.warning("%s: expired, moved to dead letters: %s", self._name, message)
            await self.bury(message, lane, decision, message.attempt - 1)
        else:
            log.debug("%s: expired, dropped: %s", self._name, message)
            lane.outgoing.end_as(message, "expired")
            self.notes.keep_failure(message, lane, "expired", "it expired before its handler could start")
            await self._settle(message, lane)
        return True

    async def _settle(self, message: Message, lane: Lane) -> None:
        """A redelivered message is done. A suspect is settled at once: the next one may end this process."""
        if message.is_suspect:
            await self._settler.settle(message, lane)
        else:
            self._settler.add_done(lane, [message.entry_id])

    def _drop(self, message: Message, lane: Lane) -> None:
        """Do not start it. Once a lease has run out it stays lost, or later messages would overtake this one."""
        if monotonic() >= lane.lease.deadline:
            lane.lease.lose()
        if self.queue.message_rate is not None:
            self.queue.message_rate.forget(message)
        self.queue.finish(message, lane)
        self._made_space()

    # -- failures -------------------------------------------------------------------------------------------------

    def _leave_to_next(self, task_slot: TaskSlot, message: Message, lane: Lane, outcome: Outcome) -> None:
        """The next task of the slot settles this message."""
        task_slot.end()
        task_slot.follow(partial(self._after, task_slot, partial(self._end_call, message, lane, outcome)))

    async def _end_call(self, message: Message, lane: Lane, outcome: Outcome) -> None:
        """Carry out what follows from the end of a call for its message."""
        try:
            if outcome is not None:
                (outcome,) = await self.commit_check.outcomes([message], [outcome])
            conclusion = self._conclude(message, lane, outcome)
            if self._holds is not None and outcome is not None:
                conclusion = self._tell(self._holds, message, outcome, conclusion)
            if isinstance(conclusion, Park) and outcome is not None:
                await self._park(message, lane, conclusion, outcome)
            else:
                await self._carry_out(message, lane, conclusion)
                self._finish(message, lane)
        finally:
            self._running[lane] -= 1
            self._made_space()

    def _finish(self, message: Message, lane: Lane) -> None:
        """The next message of its key may start. One that is handed on keeps its key until the server knows of it: it
        is not done, so it would start again after later ones if this process died before."""
        entry_id, key = message.entry_id, message.routing_key
        is_handing_on = lane.outgoing.is_handing_on(entry_id)
        if is_handing_on and key is not None and self.queue.is_ordered:
            self.queue.leave(message)
            self._release_when_stored(lane, key, entry_id)
        else:
            self.queue.finish(message, lane)

    def _release_when_stored(self, lane: Lane, key: bytes, entry_id: bytes) -> bool:
        """Release a key when a message of it is settled. False: it is."""
        return lane.outgoing.when_stored(entry_id, partial(self._release, lane, key))

    def _release(self, lane: Lane, key: bytes) -> None:
        self.queue.release(lane, key)
        self._made_space()
        self.wake_soon()

    def _tell(self, holds: Holds, message: Message, outcome: BaseException, conclusion: Conclusion) -> Conclusion:
        """Its error may hold its name."""
        if isinstance(outcome, Abandoned | NotDue):
            holds.forget(message)
        elif isinstance(conclusion, Park) and conclusion.hold is not None:
            return holds.raised(message, conclusion)
        else:
            holds.failed(message, outcome)
        return conclusion

    def _conclude(self, message: Message, lane: Lane, outcome: Outcome) -> Conclusion:
        """What becomes of a message now. What a failed attempt has published does not count."""
        if outcome is not None:
            lane.outgoing.forget(message.entry_id)
        now = self._settler.clock.now_ms()
        age, left = timedelta(milliseconds=now - stored_ms(message)), remaining_ms(message, now)
        lifetime = None if left is None else timedelta(milliseconds=left)
        is_marked = message.entry_id in lane.cancels
        if isinstance(outcome, CannotDecode) and not is_marked and (wait := self._wait_for_key(message, outcome)):
            return wait if lifetime is None else replace(wait, delay=min(wait.delay, max(timedelta(0), lifetime)))
        conclusion = conclude(outcome, message.attempt, self.handler.retry, age, lifetime, is_marked=is_marked)
        if isinstance(conclusion, Bury) or (isinstance(conclusion, Park) and conclusion.is_counted):
            self._stats["failed"] += 1
        return conclusion

    def _wait_for_key(self, message: Message, error: CannotDecode | NotDue) -> Park | None:
        """How long a message waits that could not be decoded. None: no longer, or its handler has raised the error."""
        if isinstance(error, NotDue):
            return None
        return self.missing_keys.wait(error) if error.subject is message else None

    async def _carry_out(self, message: Message, lane: Lane, conclusion: Conclusion) -> None:
        """All but a retry."""
        match conclusion:
            case Settle(is_cancelled=True):
                await self._settler.settle_cancelled(lane, message.entry_id)
            case Settle():
                await self._settle(message, lane)
            case Bury():
                await self._bury(message, lane, conclusion)
            case HandBack(is_stop=True):
                await self._hand_back(message, lane)
                if conclusion.newer:
                    log.warning("%s has a newer owner, as its database says: it is given up", lane.stream)
                    lane.lease.give_up(conclusion.newer)

    def _outcome(self, task_slot: TaskSlot, error: BaseException) -> BaseException:
        """What an exception out of a handler's call means. Raises it again if it ends more than this call.

        All that a handler raises is a failed attempt, also SystemExit or a cancellation that is not the pool's.
        """
        if is_from_signal(error) or not is_running_in(task_slot.task):
            raise error
        error = readable_error(error)
        self.times.note(monotonic() - task_slot.started)
        reason = task_slot.end()
        if isinstance(error, asyncio.CancelledError):
            if reason == "timeout":
                limit = self.handler.soft_timeout or self.handler.timeout
                assert limit is not None
                late = HandlerTimeout(self.handler.name, limit.total_seconds())
                return late.with_traceback(error.__traceback__)  # where it waited
            if reason is not None:
                return Abandoned(reason)
            if self.is_ending:
                raise error
        return error

    async def _hand_back(self, message: Message, lane: Lane) -> None:
        """At a planned stop give the message back."""
        try:
            await self._settler.hand_back(lane, [message])
        except BrokerError as error:
            log.warning("cannot hand back %s, it is redelivered when the lease ends: %s", message, error)

    async def _bury(self, message: Message, lane: Lane, decision: Bury) -> None:
        if decision.cause is not None:
            await report(self._error_hooks, message, decision.cause)
        dead = await self.hand_on(message, lane, decision, message.attempt)
        if dead is None:
            return
        decision = dead
        log.warning(
            "%s: failed (attempt %d of %d), moved to dead letters (%s): %s: %s", self._name, message.attempt,
            self.handler.retry.max_attempts, decision.reason, decision.error, message,
            exc_info=exc_info(decision.cause),
        )  # fmt: skip
        await self.bury(message, lane, decision, message.attempt)

    async def hand_on(self, message: Message, lane: Lane, decision: Bury, attempts: int) -> Bury | None:
        """Settle a message that has failed for good and store it in the fallback topic, in one step. Otherwise it is to
        become a dead letter, by what is returned."""
        dead = await self._settler.fallbacks.keep(message, lane, decision, attempts)
        if dead is not None:
            return dead
        if message.entry_id in lane.outgoing.kept:
            log.info(
                "%s: failed (attempt %d of %d), goes to its fallback topic (%s): %s: %s", self._name, attempts,
                self.handler.retry.max_attempts, decision.reason, decision.error, message,
                exc_info=exc_info(decision.cause),
            )  # fmt: skip
            to = self.handler.fallback.target if self.handler.fallback is not None else ""
            error = f"{decision.error} (it went on to the fallback topic {to!r})"
            self.notes.keep_failure(message, lane, str(decision.reason), error)
            await self._settle(message, lane)
        return None

    async def bury(self, message: Message, lane: Lane, decision: Bury, attempts: int) -> None:
        """Move a message to the dead letters, together with what `on_dead` publishes by it. A request is answered."""
        burial = Burial(str(decision.reason), decision.error, attempts)
        if self.handler.refuse is not None:
            await apart(self.handler.refuse, message, burial)
        hook = self.handler.on_dead
        if hook is None:
            await self._settler.bury(lane, message.entry_id, attempts, decision)
            return
        self._dying.add(message)
        await self.reader.open(message)
        try:
            is_done = await self._call_hook(hook, message, lane, burial)
        finally:
            self._dying.discard(message)
        if is_done is None:
            return
        if is_done and message.entry_id in lane.outgoing.kept:
            await self._settler.bury_with_outputs(lane, message, attempts, decision)
        else:
            lane.outgoing.forget(message.entry_id)
            await self._settler.bury(lane, message.entry_id, attempts, decision)

    async def _call_hook(self, hook: DeadFunction, message: Message, lane: Lane, burial: Burial) -> bool | None:
        """Whether `on_dead` has succeeded. While the store of what it publishes is away it is called again. None: the
        lease has ended meanwhile, and the next owner does it."""
        while lane.lease.is_held():
            try:
                return await call_hook(hook, message, burial)
            except StoreUnavailable as error:
                self._throttled.warn(f"{self._name}: what on_dead publishes waits for the store of its body", error)
                lane.outgoing.forget(message.entry_id)
                await asyncio.sleep(STORE_PAUSE)
        return None

    async def _park(self, message: Message, lane: Lane, decision: Park, error: BaseException) -> None:
        """Park a failed message for its next attempt.

        One that blocks its key stays pending and gets a timer here. Any other goes to the retry poller. One that is not
        due is parked at the server already.
        """
        if isinstance(error, NotDue):
            self.resume_later(self.queue.park(message, lane), lane, error.wait.total_seconds(), 0)
            return
        if not isinstance(error, CannotDecode):  # its handler has not run, and `MissingKeys` has logged it
            await self._report_retry(message, decision, error)
        seconds = decision.delay.total_seconds()
        has_key = self.queue.is_ordered and message.routing_key is not None
        is_parked = await self._settler.park(message, lane, decision, describe(error), keep_pending=has_key)
        if is_parked and has_key:
            parked = self.queue.park(message, lane)
            self.resume_later(parked, lane, seconds, int(decision.is_counted))
        else:
            lane.recovery.look_for_retries(seconds)
            self.retries.set()
            self.queue.finish(message, lane)

    async def _report_retry(self, message: Message, decision: Park, error: BaseException) -> None:
        """An attempt has failed, or does not count."""
        await report(self._error_hooks, message, error)
        self._stats["retried"] += 1
        what = "failed" if decision.is_counted else "asks for a retry that does not count"
        log.info(
            "%s: %s (attempt %d of %d), retry in %s: %s: %s", self._name, what, message.attempt,
            self.handler.retry.max_attempts, pause(decision.delay), describe(error), message,
        )  # fmt: skip
        if log.isEnabledFor(logging.DEBUG):
            log.debug("traceback of %s, attempt %d", message, message.attempt, exc_info=exc_info(error))

    def resume_later(self, message: Message, lane: Lane, seconds: float, charge: int = 1) -> None:
        """Start a message that is parked behind its key again when it is due, as an attempt that is `charge` later."""
        asyncio.get_running_loop().call_later(seconds, self._resume, message, lane, charge)

    def _resume(self, message: Message, lane: Lane, charge: int) -> None:
        following = message.again()
        following.attempt += charge
        following.is_redelivered = True
        self.queue.resume(message, lane, following)
        self.wake_soon()

    def __repr__(self) -> str:
        busy = sum(1 for task_slot in self._task_slots if task_slot.messages)
        return f"<Runner {self.handler.name} busy={busy}/{self.handler.concurrency} {self.queue!r}>"
