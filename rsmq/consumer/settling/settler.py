"""Settling: writes back what became of messages, fenced by the lease's epoch, many in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import anyio
from redis.exceptions import NoScriptError

from rsmq.consumer.settling.fallbacks import Fallbacks
from rsmq.consumer.settling.notes import Notes
from rsmq.consumer.settling.outputs import Outputs
from rsmq.consumer.settling.settling_nodes import SettlingNodes
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError, BrokerUnavailable, GroupMissing, Malformed, NotPermitted, Oversized
from rsmq.handler.failure import traceback_of
from rsmq.handler.retry import Bury, Park
from rsmq.model.batch_member import Outcome
from rsmq.model.clock import awake, now_ms, to_ms
from rsmq.model.failed_attempt import PAST, FailedAttempt, failed_attempts, to_field
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message
from rsmq.model.reason import Reason, lost_body
from rsmq.model.words import count
from rsmq.redis.client.raw_connection import ShardedConnection, pack
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import (
    BURY_MESSAGE,
    HAND_BACK,
    LOST_BODY,
    NOT_DUE,
    NOT_PENDING,
    PARK_MESSAGE,
    PUT_ASIDE,
    SETTLE_CANCELLED,
    SETTLE_MEMBERS,
    SETTLE_MESSAGES,
    STALE_EPOCH,
    START_MESSAGE,
    PlainCommand,
    Script,
    Value,
)

log = logging.getLogger("rsmq.settle")

LATE: Final = 0.004
"""Seconds that an acknowledgement waits for the next read, in whose write it can leave."""

PING: Final = PlainCommand("PING")
NO_EPOCH: Final = 0
"""No lease has it."""
LOST: Final = Bury(Reason.LOST_BODY, "the entry was deleted before it was settled")

AckBatch = list[tuple[Lane, list[bytes]]]
"""Lanes with their done ids, settled in one call: all lanes on a single server, on a cluster one lane a batch."""
Command = tuple[Sequence[str], Sequence[Value]]
"""Keys and arguments of a script."""


class Settler:
    """Writes acknowledgements in batches, and everything rarer by message.

    A batch leaves with the next read, on the fetcher's connection. If no read leaves in time (the fetcher is blocked,
    the queue is empty) it leaves on a second connection. It counts as settled only when the server has confirmed it.
    `on_stale` is called with a lane whose lease another member has.
    """

    def __init__(self, context: ConsumerContext, on_stale: Callable[[Lane], None]) -> None:
        self._context = context
        self._client = context.client
        self._member = context.member
        self._group = context.handler.group
        self._dlq_length = context.settings.dlq_length
        self._stats = context.stats
        self._on_stale = on_stale
        self.clock = context.clock
        self._throttled = ThrottledLog(log)
        self._dirty: list[Lane] = []
        self._batcher = ScriptBatcher(context.client)
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self.failing_since: float | None = None
        """`awake` when the first call failed since the last one that was answered."""
        self.trouble = ""
        """What has failed last."""
        self.nodes = SettlingNodes(context, self.check_at) if context.client.is_cluster else None
        """On a cluster: those at which nothing can be settled."""
        self.outputs = Outputs(context, self.ask, on_stale)
        self.notes = Notes(context, self.ask, on_stale)
        self.fallbacks = Fallbacks(context)

    def schedule(self, lane: Lane) -> None:
        """Settle a lane soon: its first message since the last batch is done."""
        self._dirty.append(lane)
        self._due.set()

    def add_done(self, lane: Lane, entry_ids: Collection[bytes]) -> None:
        """Acknowledge these with the next batch."""
        if entry_ids and not lane.done:
            self.schedule(lane)
        lane.done.extend(entry_ids)

    def add_together(self, lane: Lane, messages: Sequence[Message]) -> None:
        """Acknowledge these in one call, which stores the outputs of all of them with the first."""
        lane.outgoing.join(messages)
        self.add_done(lane, [message.entry_id for message in messages])

    async def settle_together(self, lane: Lane, messages: Sequence[Message]) -> None:
        """The same, and return when the server has confirmed it."""
        self.add_together(lane, messages)
        last = messages[-1].entry_id
        if last in lane.outgoing.kept:
            await self.until_stored(lane, last)
        while last in lane.in_flight and lane.lease.is_held():
            self._due.set()
            await asyncio.sleep(0.005)

    # -- in batches -----------------------------------------------------------------------------------------------

    def take(self, lanes: Collection[Lane] | None = None) -> list[AckBatch]:
        """Everything that is done, or what is done in some lanes. `confirm` or `put_back` must follow for each."""
        taken, left = AckBatch(), []
        for lane in self._dirty:
            if lanes is not None and lane not in lanes:
                left.append(lane)
                continue
            if lane.lease.is_lost:  # a new grant may have the same epoch, if the server has lost the last one
                lane.drop_done()
            elif lane.outgoing.kept:
                self.outputs.divert(lane)
            if lane.done:
                taken.append((lane, lane.take_done()))
        self._dirty = left
        # on a cluster each lane is in a slot of its own, and a script takes keys of one slot only
        return [[each] for each in taken] if self._client.is_cluster else [taken] if taken else []

    def packed(self, batch: AckBatch) -> bytes:
        """The batch as one packed command."""
        script, keys, args = self._settling(batch)
        return pack(script.command(keys, args))

    def _settling(self, batch: AckBatch) -> tuple[Script, Sequence[str], Sequence[Value]]:
        keys, args = list[str](), list[Value]((self._member, self._group))
        if any(lane.outgoing.members for lane, _ in batch):
            return SETTLE_MEMBERS, *self._settling_members(batch)
        for lane, ids in batch:
            parked = lane.parked_members(ids) if lane.retried else ()
            keys += (lane.stream, lane.lease_key, lane.retry_key)
            args += (lane.epoch, len(ids), len(parked))
            args += ids
            args += parked
        return SETTLE_MESSAGES, keys, args

    def _settling_members(self, batch: AckBatch) -> Command:
        keys, args = list[str](), list[Value]((self._member, self._group))
        for lane, ids in batch:
            parked = lane.parked_members(ids) if lane.retried else ()
            outgoing = lane.outgoing
            members = () if not outgoing.members else (outgoing.blocks_of if lane.epoch else outgoing.fields_of)(ids)
            keys += (lane.stream, lane.lease_key, lane.retry_key)
            args += (lane.epoch, len(ids), len(parked), len(members), *ids, *parked, *members)
        return keys, args

    async def confirm(self, batch: AckBatch, reply: Any) -> None:
        """Take the server's reply to a batch."""
        if isinstance(reply, NoScriptError):
            reply = await self._send_again(batch)
        if isinstance(reply, BrokerUnavailable):
            self.put_back([batch])
            return
        if isinstance(reply, BrokerError) and len(batch) > 1:  # the keys of one lane are at fault: settle one by one
            while batch:
                answer = await self._send_again(batch[:1])
                await self.confirm([batch.pop(0)], answer)
            return
        answers = [reply] if isinstance(reply, BrokerError) else reply
        for (lane, ids), answer in zip(batch, answers, strict=True):
            self._confirm(lane, ids, answer)

    async def _send_again(self, batch: AckBatch) -> Any:
        """The reply to a batch that is sent again in a call of its own. To acknowledge twice is harmless."""
        try:
            script, keys, args = self._settling(batch)
            return await script(self._client, keys, args)
        except BrokerError as error:
            return error

    def _confirm(self, lane: Lane, ids: list[bytes], answer: Any) -> None:
        lane.confirmed(ids)
        if isinstance(answer, BrokerError) or answer[0] == STALE_EPOCH:
            self._stats["refused"] += len(ids)
            self._on_stale(lane)
            return
        lane.forget(ids)
        if lane.outgoing.members and lane.outgoing.leave_all(ids):
            self.outputs.relay.wake(lane)
        self._stats["settled"] += answer[1]
        if answer[1] < len(ids):
            self._stats["not_pending"] += len(ids) - answer[1]

    def put_back(self, batches: list[AckBatch]) -> None:
        """The connection broke: settle these again later. To acknowledge twice is harmless."""
        for batch in batches:
            for lane, ids in batch:
                lane.put_back_done(ids)
                self.schedule(lane)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Settle on a second connection what no read took along, and run the batcher, which has a third."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._batcher.run)
            self._use(tasks)
            task_status.started()
            connection = ShardedConnection(self._client, is_bound=True)
            try:
                while True:
                    await self._due.wait()
                    await asyncio.sleep(LATE)  # a read that starts meanwhile takes them along
                    self._due.clear()
                    if await self._flush(connection) and not self._dirty:
                        self._idle.set()
            finally:
                self._use(None)
                await connection.close()

    def _use(self, tasks: anyio.abc.TaskGroup | None) -> None:
        self.outputs.use(tasks)
        self.notes.use(tasks)
        if self.nodes is not None:
            self.nodes.use(tasks)

    async def _flush(self, connection: ShardedConnection) -> bool:
        batches = self.take()
        replies = await connection.exchange([(batch[0][0].stream, self.packed(batch)) for batch in batches])
        for batch, reply in zip(batches, replies, strict=True):
            if self.nodes is not None and isinstance(reply, BrokerUnavailable):
                self.nodes.failed(batch[0][0].stream, reply)
            await self.confirm(batch, reply)
        failure = next((reply for reply in replies if isinstance(reply, BrokerUnavailable)), None)
        if failure is not None:
            self._throttled.warn("settling waits for the server", failure)
            await asyncio.sleep(0.1)
        return failure is None

    async def flush(self, lanes: Sequence[Lane]) -> None:
        """Settle what is done in these lanes now, on connections of its own."""
        await self.outputs.flush(lanes)
        connection = ShardedConnection(self._client, is_bound=True)
        try:
            await self._flush(connection)
        finally:
            await connection.close()

    async def wait_until_settled(self, lanes: Iterable[Lane]) -> None:
        """Wait until everything done in these lanes is confirmed, or their lease is gone.

        Outputs for which a target has no room are not waited for.
        """
        while any(
            lane.done or lane.settling or (lane.outgoing.waiting and not lane.outgoing.is_full)
            for lane in lanes if lane.lease.is_held()
        ):  # fmt: skip
            self._idle.clear()
            self._due.set()
            with anyio.move_on_after(0.1):
                await self._idle.wait()

    # -- by message -----------------------------------------------------------------------------------------------

    async def ask(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """Run a script on the connection of the batcher. After a lost reply the next call first ends what is late."""
        try:
            reply = await self._batcher.ask(script, keys, args)
        except (BrokerUnavailable, NotPermitted) as error:
            self._note_failure(error)
            if self.nodes is not None:
                self.nodes.failed(keys[0], error)
            raise
        self.failing_since = None
        if self.nodes is not None:
            self.nodes.answered(keys[0])
        return reply

    def _note_failure(self, error: BrokerError) -> None:
        self.trouble = str(error)
        if self.failing_since is None:
            self.failing_since = awake()

    async def check_at(self, partition: int) -> None:
        """Settle nothing in a partition, as if its lease were lost: on a cluster its node answers, and this user may do
        it there. Raises BrokerError."""
        keys, at = self._context.keys, (self._context.topic.name, partition)
        names = (keys.stream(*at), keys.lease(*at, self._group), keys.retry(*at, self._group))
        await self.ask(SETTLE_MESSAGES, names, (self._member, self._group, NO_EPOCH, 0, 0))

    async def check(self) -> None:
        """Ask for an answer on the connection of the batcher, which opens it. Raises BrokerError. On a cluster each
        node has a connection of its own: see `nodes`."""
        if self._client.is_cluster:
            return
        try:
            await self._batcher.submit(PING, (), ())
        except BrokerUnavailable as error:
            self._note_failure(error)
            raise
        self.failing_since = None

    async def disconnect(self) -> None:
        """Close the connection of the batcher. The next call opens it again."""
        await self._batcher.disconnect()

    async def charge(self, message: Message, lane: Lane) -> tuple[bytes | None, timedelta]:
        """Charge the attempt of a redelivered message. CANCELLED: it is to be settled so. NOT_DUE: its retry waits for
        so long. None: it is not ours any more, do not start it."""
        entry_id = message.entry_id
        keys, args = self._fenced(lane, entry_id, message.attempt - 1, int(entry_id in lane.recovery.untimed))
        command = ((*keys, lane.cancels_key, lane.cancelled_key), args)
        reply = await self._call(START_MESSAGE, lane, entry_id, command)
        if reply is None:
            return None, timedelta(0)
        lane.recovery.end_untimed([entry_id])
        if reply[0] == NOT_DUE:
            return NOT_DUE, timedelta(milliseconds=reply[1])
        if lane.epoch and message.attempt > 1:
            lane.note_retry(entry_id, message.attempt - 1)
        return bytes(reply[0]), timedelta(0)

    async def settle_cancelled(self, lane: Lane, entry_id: bytes) -> None:
        """Settle a message that is cancelled and does not run."""
        keys, args = self._fenced(lane, entry_id)
        command = ((*keys, lane.cancels_key, lane.cancelled_key), args)
        if await self._call(SETTLE_CANCELLED, lane, entry_id, command) is not None:
            lane.in_flight.discard(entry_id)
            self.left_batch(lane, entry_id)
            self._stats["cancelled"] += 1

    def left_batch(self, lane: Lane, entry_id: bytes) -> None:
        """A script has ended a message. On a cluster its batch is in another slot: what the script has noted leaves."""
        if lane.outgoing.leave(entry_id):
            self.outputs.relay.wake(lane)

    async def settle(self, message: Message, lane: Lane) -> None:
        """Acknowledge one message now, and return when the server has confirmed it."""
        entry_id = message.entry_id
        if entry_id in lane.outgoing.kept:
            self.add_done(lane, [entry_id])
            await self.until_stored(lane, entry_id)
            return
        script, keys, args = self._settling([(lane, [entry_id])])
        if await self._call(script, lane, entry_id, (keys, args)) is not None:
            lane.in_flight.discard(entry_id)
            self.left_batch(lane, entry_id)
            self._stats["settled"] += 1

    async def until_stored(self, lane: Lane, entry_id: bytes) -> None:
        """Return when a message with outputs that is done is settled, or its lease is over."""
        self.outputs.divert(lane)
        await self.outputs.wait(lane, entry_id)

    async def park(self, message: Message, lane: Lane, decision: Park, error: str, *, keep_pending: bool) -> bool:
        """Put a failed message aside for its next attempt. False: it is not ours any more."""
        entry_id, rules = message.entry_id, (to_ms(decision.delay), int(keep_pending), int(decision.is_counted))
        keys, args = self._fenced(lane, entry_id, message.attempt, *rules, error)
        command = ((*keys, lane.errors_key), args)
        is_parked = await self._call(PARK_MESSAGE, lane, entry_id, command) is not None
        if is_parked and not keep_pending:
            lane.in_flight.discard(entry_id)
        return is_parked

    async def bury(
        self, lane: Lane, entry_id: bytes, attempts: int, decision: Bury, *, was_pending: bool = False
    ) -> None:
        """Move a message to the dead letters. `was_pending`: if it is not pending any more, it has been moved."""
        self._stats["buried"] += 1
        fields: tuple[Value, ...] = () if decision.is_copied else ("dlq.body", "stream")
        fields += await self._notes(lane, entry_id, attempts, decision)
        # after a lost reply "not pending" means that the first call has moved it; the first time it means another owner
        first, again = (self._fenced(lane, entry_id, attempts, self._dlq_length, flag, *fields) for flag in (0, 1))
        keys, first = (*first[0], lane.dlq_key), again if was_pending else first
        reply = await self._call(BURY_MESSAGE, lane, entry_id, (keys, first[1]), (keys, again[1]))
        lane.in_flight.discard(entry_id)
        self.left_batch(lane, entry_id)
        if reply is not None and reply[2]:
            self.report_lost(lane, [entry_id])

    async def _notes(self, lane: Lane, entry_id: bytes, attempts: int, decision: Bury) -> tuple[Value, ...]:
        """The `dlq.*` fields of a dead letter."""
        notes: tuple[Value, ...] = (
            "dlq.reason", decision.reason, "dlq.error", decision.error, "dlq.attempts", attempts,
            "dlq.group", self._group, "dlq.origin", entry_id, "dlq.at_ms", now_ms(), "dlq.member", self._member,
        )  # fmt: skip
        if decision.cause is not None and (trace := traceback_of(decision.cause)):
            notes += ("dlq.traceback", trace)
        if failed := await self._failed_attempts(lane, entry_id):
            notes += ("dlq.history", to_field(failed))
        return notes

    async def _failed_attempts(self, lane: Lane, entry_id: bytes) -> tuple[FailedAttempt, ...]:
        """What the server has noted of the attempts before the last."""
        while lane.lease.is_held():
            try:
                return failed_attempts(
                    *await self._client.execute_command("HMGET", lane.errors_key, entry_id, entry_id + PAST)
                )
            except BrokerUnavailable as error:
                self._throttled.warn("moving to dead letters waits for the server", error)
                await asyncio.sleep(0.1)
            except BrokerError:  # another client has overwritten the key: the dead letter has no history then
                break
        return ()

    async def bury_with_outputs(self, lane: Lane, message: Message, attempts: int, decision: Bury) -> None:
        """Move a message to the dead letters and store what was published with it, in one step or not at all."""
        self._stats["buried"] += 1
        notes = await self._notes(lane, message.entry_id, attempts, decision)
        outcome: Outcome = "expired" if decision.reason == Reason.EXPIRED else "failed"
        lane.outgoing.add_letter(message.entry_id, self.outputs.letter(message, lane.dlq_key, notes), outcome)
        self.notes.keep_failure(message, lane, str(decision.reason), decision.error)
        await self.settle(message, lane)

    async def _bury_lost(self, lane: Lane, entry_id: bytes, attempts: int, *, is_pending: bool) -> None:
        """The entry is deleted. A claim on its way may be writing its dead letter, which its reply reports then."""
        while lane.recovery.claims and lane.lease.is_held():
            await asyncio.sleep(0.002)
        if entry_id in lane.in_flight:
            await self.bury(lane, entry_id, attempts, LOST, was_pending=is_pending)

    async def bury_unreadable(self, lane: Lane, entry_id: bytes, attempts: int, error: Malformed) -> None:
        """Move an entry that cannot be read to the dead letters, with its body unless that is too large."""
        decision = Bury(Reason.MALFORMED, str(error), is_copied=not isinstance(error, Oversized))
        await self.bury(lane, entry_id, attempts, decision)

    async def hand_back(
        self, lane: Lane, messages: Sequence[Message], unsure: Collection[tuple[bytes, int]] = ()
    ) -> None:
        """Return messages that did not run to the end: a planned stop is no attempt. `unsure` are others that have not
        started, with the attempts that are charged to them."""
        charged = [(message.entry_id, message.attempt - 1) for message in messages]
        charged += unsure
        # also if the call below fails: the next to take the lane over, perhaps this member, must find them again
        lane.forget([entry_id for entry_id, _ in charged])
        for at in range(0, len(charged), 500):
            args = [value for pair in charged[at : at + 500] for value in pair]
            keys, fenced = (lane.stream, lane.lease_key, lane.dlq_key), (self._member, lane.epoch, self._group)
            fields = (self._dlq_length, *lost_body(self._group, self._member))
            reply = await HAND_BACK(self._client, keys, (*fenced, *fields, *args))
            self.report_lost(lane, reply[2:])
        self._stats["handed_back"] += len(charged)

    async def end_numbered(self, lane: Lane) -> None:
        """Numbered calls that have no answer (`put_aside`, `read_again`) do nothing from now on, wherever they are:
        before what they name is handed back."""
        if lane.flows.is_asking and lane.lease.is_held():
            number = lane.flows.number()
            keys, fenced = (lane.stream, lane.lease_key, lane.dlq_key), (self._member, lane.epoch, self._group)
            fields = (0, self._dlq_length, *lost_body(self._group, self._member))
            await PUT_ASIDE(self._client, keys, (*fenced, number, *fields))
            lane.flows.note_answer(number)

    def report_lost(self, lane: Lane, ids: Iterable[bytes]) -> None:
        """Entries that were deleted while they were pending. The script that found them has made them dead letters."""
        for entry_id in ids:
            lane.in_flight.discard(entry_id)  # it may be running, or wait for its retry: it needs no other dead letter
            self._stats["lost_body"] += 1
            at = (lane.partition, entry_id.decode(), lane.topic)
            log.error(
                "entry %d/%s of topic %s was deleted by another client before %s had settled it, and its message id "
                "with it: its dead letter is found by `rsmq trace %d/%s --topic %s`", *at, lane.group, *at,
            )  # fmt: skip

    def report_trimmed(self, lane: Lane, ids: Collection[bytes]) -> None:
        """Their topic was full and has removed them before their turn came: it was told to do so."""
        if ids:
            lane.in_flight.difference_update(ids)
            self._stats["trimmed"] += len(ids)
            log.warning("%s trimmed from %s before their turn came", count(len(ids), "message"), lane.stream)

    def _fenced(self, lane: Lane, *args: Value) -> Command:
        return (lane.stream, lane.lease_key, lane.retry_key), (self._member, lane.epoch, self._group, *args)

    async def _call(
        self, script: Script, lane: Lane, entry_id: bytes, command: Command, again: Command | None = None
    ) -> Any:
        """`_run`, and meanwhile the message is one whose state in the server is not known."""
        lane.asking.add(entry_id)
        try:
            return await self._run(script, lane, entry_id, command, again)
        finally:
            lane.asking.discard(entry_id)

    async def _run(
        self, script: Script, lane: Lane, entry_id: bytes, command: Command, again: Command | None = None
    ) -> Any:
        """Run a script on one message until the server answers or the lease is over. None: it is not ours any more.

        Each of these scripts may run twice without harm, if need be with the arguments of `again`. A message that was
        deleted by another client becomes a dead letter.
        """
        while lane.lease.is_held() and entry_id in lane.in_flight:
            if entry_id in lane.recovery.undelivered:  # it comes again, and so do those after it
                lane.in_flight.discard(entry_id)
                if script in (START_MESSAGE, PARK_MESSAGE, BURY_MESSAGE):  # it is not done, so no later one may start
                    lane.lease.lose()
                return None
            try:
                reply = await self.ask(script, *command)
            except BrokerUnavailable as error:
                self._throttled.warn(f"{script.name} waits for the server", error)
                command = again or command
                await asyncio.sleep(0.1)
                continue
            except GroupMissing:  # it is made again from the start: all of it comes again, in order
                lane.lease.lose()
                return None
            except BrokerError as error:  # one of our keys has a foreign type: an operator can repair it meanwhile
                log.error("%s of %s fails: %s", script.name, lane.stream, error)
                await asyncio.sleep(1)
                continue
            is_of_lanes = script in (SETTLE_MESSAGES, SETTLE_MEMBERS)  # these answer for each lane
            status = reply[0][0] if is_of_lanes else reply[0]
            if status == STALE_EPOCH:
                self._stats["refused"] += 1
                self._on_stale(lane)
                return None
            if status == NOT_PENDING:
                self._stats["not_pending"] += 1
                lane.in_flight.discard(entry_id)
                return None
            if status == LOST_BODY:
                await self._bury_lost(lane, entry_id, int(command[1][4]), is_pending=bool(reply[1]))
                return None
            return reply
        return None
