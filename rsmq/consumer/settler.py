"""Settling: what became of messages is written back, fenced by the lease's epoch, many in one write."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta
from typing import Any, Final

import anyio
from redis.exceptions import NoScriptError

from rsmq.clock import now_ms, to_ms
from rsmq.complaint import Complaints
from rsmq.connect import Client
from rsmq.consumer.convoy import Convoy
from rsmq.consumer.lane import Lane
from rsmq.errors import BrokerError, BrokerUnavailable, GroupMissing
from rsmq.fleet import Fleet
from rsmq.message import Message
from rsmq.retry import Bury
from rsmq.script import (
    BURY_MESSAGE,
    HAND_BACK,
    NOT_PENDING,
    PARK_MESSAGE,
    SETTLE_MESSAGES,
    STALE_EPOCH,
    START_MESSAGE,
    Script,
    Value,
)
from rsmq.settings import Settings
from rsmq.wire import pack

log = logging.getLogger("rsmq.settle")

LATE: Final = 0.004
"""Seconds that a finished message may wait for the next read to carry its acknowledgement."""

Part = tuple[Lane, list[bytes]]
"""What is done in one lane."""
Batch = list[Part]
"""What travels in one call: everything on a single server, which takes keys of any partition; a lane on a cluster."""


class Settler:
    """Writes acknowledgements in batches and everything rarer one by one.

    A batch leaves with the next read, on the reader's connection; when no read goes out in time (the reader is blocked,
    the queue is empty) it leaves on a second connection. It counts as settled only when the server said so.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        member: str,
        group: str,
        on_stale: Callable[[Lane], None],
        stats: Counter[str],
    ) -> None:
        self._client, self._settings, self._member, self._group = client, settings, member, group
        self._on_stale, self._stats = on_stale, stats
        self._complaints = Complaints(log)
        self._dirty: list[Lane] = []
        self._convoy = Convoy(client)
        self._due = asyncio.Event()
        self._idle = asyncio.Event()

    def note(self, lane: Lane) -> None:
        """The first message of a lane is done since the last batch: have it settled soon."""
        self._dirty.append(lane)
        self._due.set()

    # -- the batch on its way -------------------------------------------------------------------------------------

    def take(self, lanes: Collection[Lane] | None = None) -> list[Batch]:
        """Everything that is done, or what is in some lanes. `confirm` or `put_back` must follow for each batch."""
        parts, left = list[Part](), []
        for lane in self._dirty:
            if lanes is not None and lane not in lanes:
                left.append(lane)
            elif lane.done:
                parts.append((lane, lane.done))
                lane.done = []
                lane.settling += 1
        self._dirty = left
        return [[part] for part in parts] if self._client.is_cluster else [parts] if parts else []

    def command(self, batch: Batch) -> bytes:
        """The batch as one packed command."""
        return pack(SETTLE_MESSAGES.command(*self._call(batch)))

    def _call(self, batch: Batch) -> tuple[list[str], list[Value]]:
        keys, args = list[str](), list[Value]((self._member, self._group))
        for lane, ids in batch:
            keys += (lane.stream, lane.lease_key)
            args += (lane.epoch, len(ids))
            args += ids
        return keys, args

    async def confirm(self, batch: Batch, reply: Any) -> None:
        """What the server said to a batch."""
        if isinstance(reply, NoScriptError):
            reply = await self._again(batch)
        if isinstance(reply, BrokerUnavailable):
            self.put_back([batch])
            return
        if isinstance(reply, BrokerError) and len(batch) > 1:  # one lane's keys are at fault: each for itself
            while batch:
                answer = await self._again(batch[:1])
                await self.confirm([batch.pop(0)], answer)
            return
        answers = [reply] if isinstance(reply, BrokerError) else reply
        for (lane, ids), answer in zip(batch, answers, strict=True):
            self._confirm(lane, ids, answer)

    async def _again(self, batch: Batch) -> Any:
        """The reply to a batch that is sent once more, by itself. To acknowledge twice is harmless."""
        try:
            return await SETTLE_MESSAGES(self._client, *self._call(batch))
        except BrokerError as error:
            return error

    def _confirm(self, lane: Lane, ids: list[bytes], answer: Any) -> None:
        lane.settling -= 1
        if isinstance(answer, BrokerError) or answer[0] == STALE_EPOCH:
            self._stats["refused"] += len(ids)
            self._on_stale(lane)
            return
        lane.held.difference_update(ids)
        self._stats["settled"] += answer[1]
        if answer[1] < len(ids):
            self._stats["not_pending"] += len(ids) - answer[1]

    def put_back(self, batches: list[Batch]) -> None:
        """The connection broke: acknowledging again is harmless, so it is simply done again."""
        for batch in batches:
            for lane, ids in batch:
                lane.done[:0] = ids
                lane.settling -= 1
                self.note(lane)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Settle on a second connection what the reader has not taken along, on a third what is awaited one by one."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._convoy.run)
            task_status.started()
            await self._follow()

    async def _follow(self) -> None:
        fleet = Fleet(self._client)
        try:
            while True:
                await self._due.wait()
                await asyncio.sleep(LATE)
                self._due.clear()
                if await self._flush(fleet) and not self._dirty:
                    self._idle.set()
        finally:
            await fleet.close()

    async def _flush(self, fleet: Fleet) -> bool:
        batches = self.take()
        replies = await fleet.exchange([(batch[0][0].stream, self.command(batch)) for batch in batches])
        for batch, reply in zip(batches, replies, strict=True):
            await self.confirm(batch, reply)
        waiting = next((reply for reply in replies if isinstance(reply, BrokerUnavailable)), None)
        if waiting is not None:
            self._complaints.say("settling waits", waiting)
            await asyncio.sleep(0.1)
        return waiting is None

    async def flush(self) -> None:
        """Settle what is done now, on connections of its own."""
        fleet = Fleet(self._client)
        try:
            await self._flush(fleet)
        finally:
            await fleet.close()

    async def drained(self, lanes: list[Lane]) -> None:
        """Wait until everything done in these lanes is confirmed, or their lease is gone."""
        while any(lane.done or lane.settling for lane in lanes if lane.lease.is_held()):
            self._idle.clear()
            self._due.set()
            with anyio.move_on_after(0.1):
                await self._idle.wait()

    # -- one message at a time ------------------------------------------------------------------------------------

    async def start(self, message: Message, lane: Lane) -> bool:
        """Charge the attempt of a redelivered message. False: it is not ours any more, do not start it."""
        args = (message.entry_id, message.attempt - 1)
        return await self._run(START_MESSAGE, lane, (), args, message.entry_id)

    async def settle(self, message: Message, lane: Lane) -> None:
        """Acknowledge one message now, and return when the server has said so."""

        async def ask() -> Any:
            (answer,) = await self._convoy.ask(SETTLE_MESSAGES, *self._call([(lane, [message.entry_id])]))
            return answer

        if await self._decided(SETTLE_MESSAGES.name, lane, ask, message.entry_id):
            lane.held.discard(message.entry_id)
            self._stats["settled"] += 1

    async def park(self, message: Message, lane: Lane, delay: timedelta, *, keep_pending: bool) -> bool:
        """Put a failed message aside for its next attempt."""
        args = (message.entry_id, message.attempt, to_ms(delay), int(keep_pending))
        if keep_pending:
            return await self._run(PARK_MESSAGE, lane, (), args, message.entry_id)
        lane.parking.add(message.entry_id)
        try:
            is_parked = await self._run(PARK_MESSAGE, lane, (), args, message.entry_id)
            if is_parked:
                lane.held.discard(message.entry_id)
            return is_parked
        finally:
            lane.parking.discard(message.entry_id)

    async def bury(self, lane: Lane, entry_id: bytes, attempts: int, decision: Bury) -> bool:
        """Move a message to the dead letters."""
        facts: tuple[Value, ...] = () if decision.is_copied else ("dlq.body", "stream")
        facts += (
            "dlq.reason", decision.reason, "dlq.error", decision.error, "dlq.attempts", attempts,
            "dlq.group", self._group, "dlq.origin", entry_id, "dlq.at_ms", now_ms(), "dlq.member", self._member,
        )  # fmt: skip
        args = (entry_id, attempts, self._settings.dlq_length, *facts)
        is_buried = await self._run(BURY_MESSAGE, lane, (lane.dlq_key,), args, entry_id)
        lane.held.discard(entry_id)
        return is_buried

    async def hand_back(self, lane: Lane, messages: list[Message]) -> None:
        """Return messages that did not run to the end: a planned stop is no attempt."""
        charged = [(message.entry_id, message.attempt - 1) for message in messages]
        lane.held.difference_update(entry_id for entry_id, _ in charged)  # also when the server does not hear of it
        for at in range(0, len(charged), 500):
            args = [value for pair in charged[at : at + 500] for value in pair]
            await HAND_BACK(self._client, (lane.stream, lane.lease_key), (self._member, lane.epoch, self._group, *args))
        self._stats["handed_back"] += len(charged)

    async def _run(
        self, script: Script, lane: Lane, more_keys: tuple[str, ...], args: tuple[Value, ...], entry_id: bytes
    ) -> bool:
        """A script on one message. False: it is not ours any more."""
        keys = (lane.stream, lane.lease_key, lane.retry_key, *more_keys)

        def ask() -> Awaitable[Any]:
            return self._convoy.ask(script, keys, (self._member, lane.epoch, self._group, *args))

        return await self._decided(script.name, lane, ask, entry_id)

    async def _decided(self, name: str, lane: Lane, ask: Callable[[], Awaitable[Any]], entry_id: bytes) -> bool:
        """Ask until the server has answered or the lease is over. All of it may be repeated safely."""
        while lane.lease.is_held():
            try:
                reply = await ask()
            except BrokerUnavailable as error:
                self._complaints.say(f"{name} waits", error)
                await asyncio.sleep(0.1)
                continue
            except GroupMissing:  # it is made again from the start: all of it comes again, in order
                lane.lease.lose()
                return False
            except BrokerError as error:  # a foreign type under one of our keys: an operator can mend it meanwhile
                log.error("%s of %s fails: %s", name, lane.stream, error)
                await asyncio.sleep(1)
                continue
            if reply[0] == STALE_EPOCH:
                self._stats["refused"] += 1
                self._on_stale(lane)
                return False
            if reply[0] == NOT_PENDING:
                self._stats["not_pending"] += 1
                lane.held.discard(entry_id)
                return False
            return True
        return False
