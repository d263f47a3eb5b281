"""A carrier: one connection on which everything that waits for a node is written together, and what happens when it
breaks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Protocol

from redis.exceptions import NoScriptError

from rsmq.clock import monotonic, to_ms
from rsmq.connect import Client
from rsmq.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    PublishUnknown,
    RsmqError,
    SlotMoved,
    SlotMoving,
    TopicFull,
)
from rsmq.keys import Keys
from rsmq.producer.batch import Batch, Full, Once
from rsmq.producer.doubt import Doubt, Doubts, search
from rsmq.settings import Settings
from rsmq.stream import NOTHING, as_dict, is_missing, trim
from rsmq.wire import Wire, pack

log = logging.getLogger("rsmq.publish")

LONGEST_PAUSE: Final = 1.0


class Waiting(Protocol):
    """What waits, and how it comes and goes (a `Line`)."""

    replicas: int
    stored: Counter[str]
    failed: Counter[str]

    def take(self, node: Client, most: int | None = None) -> list[Batch]: ...
    def end(self, batches: list[Batch], resting: set[str]) -> None: ...
    def give_up(self, node: Client, end: Callable[[Batch], None], until: float | None) -> None: ...
    def call_all(self) -> None: ...


class Carrier:
    """Group commit: while one write is on its way, what comes meanwhile gathers for the next one.

    A plain batch whose reply was lost is never simply sent again: the old connection is killed (so that nothing of it
    can still arrive), the stream is searched for the batch, and only what is not there is sent. Where its slot has
    moved meanwhile, the old node refuses what it reads late, so there is nothing to kill.
    """

    def __init__(
        self, line: Waiting, client: Client, node: Client, keys: Keys, settings: Settings, doubts: Doubts
    ) -> None:
        self._line, self._client, self._node, self._keys, self._doubts = line, client, node, keys, doubts
        self._replicas = replicas = line.replicas
        self._wait_ms = to_ms(settings.command_timeout) if replicas else 0
        self._wait_seconds = (settings.command_timeout * (2 if replicas else 1)).total_seconds()
        self._wire = Wire(node)
        self._flying: list[Batch] = []
        self._newest: dict[str, bytes] = {}
        self._failures = 0
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Carry. It ends by cancellation only, and then nobody is left waiting."""
        try:
            while True:
                await self.wake.wait()
                self.wake.clear()
                # after a break one only, so that little is at stake until it works
                while flying := self._line.take(self._node, 1 if self._failures else None):
                    self._flying = flying
                    await self._flush(flying)
        finally:
            await self._wire.close()
            self._give_up(BrokerUnavailable("the broker was closed before the message was confirmed"))

    async def _flush(self, batches: list[Batch]) -> None:
        """One write, one round of replies, and for each batch its end or another turn."""
        trouble: BrokerUnavailable | None = None
        moving: dict[str, SlotMoving] = {}
        try:
            await self._prepare(batches, moving)
            trouble = await self._exchange([b for b in batches if b.ids and b.stream not in moving], moving)
        except BrokerUnavailable as error:
            trouble = error
        except Exception as error:  # the one boundary of this role: whatever it is, the flusher lives on
            log.warning("publishing failed: %s", error, exc_info=not isinstance(error, BrokerError))
            await self._wire.close()
            for batch in batches:
                self._fail(batch, error)
        for batch in batches if moving else ():
            if batch.stream in moving and batch.deadline <= monotonic():
                self._fail(batch, moving[batch.stream])
        self._flying = []
        self._line.end(batches, {stream for stream, error in moving.items() if not is_gone(error)})
        if trouble is None:
            self._failures = 0
        else:
            await self._back_off(trouble)

    async def _prepare(self, batches: list[Batch], moving: dict[str, SlotMoving]) -> None:
        """A connection, an answer to every doubt, and the newest entry of every partition; those that are `moving`
        have to wait."""
        if not self._wire.is_open:
            await self._wire.open()
            self._failures = min(self._failures, 2)  # it breaks, but it is there: no reason to wait long
        for batch in batches:
            try:
                await self._clear_up(batch)
            except SlotMoving as error:
                moving[batch.stream] = error
        unseen = [batch.stream for batch in batches if batch.stream not in self._newest and not batch.is_repeatable]
        replies = await self._wire.exchange([pack(("XINFO", "STREAM", stream)) for stream in unseen]) if unseen else []
        for stream, reply in zip(unseen, replies, strict=True):
            if isinstance(reply, SlotMoving):
                moving[stream] = reply
                continue
            if isinstance(reply, Exception) and not is_missing(reply):
                raise reply
            self._newest[stream] = NOTHING if is_missing(reply) else as_dict(reply)["last-generated-id"]

    async def _clear_up(self, batch: Batch) -> None:
        """Find out what an earlier write has left of this batch."""
        if isinstance(batch, Once):
            for message_id in batch.ids:
                doubt = self._doubts.get(message_id)
                if doubt is not None:
                    _, batch.since[message_id] = await search(self._wire, batch.stream, doubt, {message_id})
        elif batch.doubt is not None:
            # a script is all or nothing, and a full topic cuts at the end: what is found is the front of the batch
            found, _ = await search(self._wire, batch.stream, batch.doubt, set(batch.ids))
            batch.doubt = None
            self._confirm(batch, found, reached=0)

    async def _exchange(self, batches: list[Batch], moving: dict[str, SlotMoving]) -> BrokerUnavailable | None:
        """Write all batches together and settle each by its replies."""
        packed = [batch.commands() for batch in batches]
        commands = [command for group in packed for command in group]
        if not commands:
            return None
        if self._replicas:
            commands.append(pack(("WAIT", self._replicas, self._wait_ms)))
        for batch in batches:  # from here until the reply nobody knows
            since = self._newest.get(batch.stream, NOTHING)
            batch.doubt = Doubt(self._wire.client_id, self._wire.address, since)
        replies = iter(await self._wire.exchange(commands, self._wait_seconds))
        by_batch = [list(islice(replies, len(group))) for group in packed]
        reached = next(replies, 0)
        if isinstance(reached, Exception):
            raise reached
        troubles = [await self._settle(batch, reply, reached) for batch, reply in zip(batches, by_batch, strict=True)]
        for batch, trouble in zip(batches, troubles, strict=True):
            if isinstance(trouble, SlotMoving):
                moving[batch.stream] = trouble
        return next((each for each in troubles if each is not None and not isinstance(each, SlotMoving)), None)

    async def _settle(self, batch: Batch, replies: list[Any], reached: int) -> BrokerUnavailable | None:
        """Act on the replies to one batch. What remains in it is sent again."""
        batch.doubt = None
        stored, newest, trouble = batch.read(replies)
        if newest:
            self._newest[batch.stream] = newest
        if batch.is_repeatable:
            for message_id in batch.ids[:stored]:
                self._doubts.clear(message_id)
        self._confirm(batch, stored, reached)
        if isinstance(trouble, BrokerUnavailable):
            return trouble
        batch.needs_source = isinstance(trouble, NoScriptError)
        if isinstance(trouble, Full):
            await self._make_room(batch)
        elif trouble is not None and not batch.needs_source:
            self._fail(batch, trouble)
        return None

    def _confirm(self, batch: Batch, stored: int, reached: int) -> None:
        """The first messages of a batch are stored, on as many replicas."""
        self._line.stored[batch.topic.name] += stored
        if reached >= self._replicas:
            batch.confirm(stored)
        else:
            batch.fail(too_few_replicas(reached, self._replicas), stored)

    async def _make_room(self, batch: Batch) -> None:
        """Once a batch: remove the settled entries that are only kept for a replay."""
        topic, removed = batch.topic, 0
        if not batch.has_made_room:
            batch.has_made_room = True
            try:
                _, removed, _ = await trim(
                    self._client, self._keys, topic.name, batch.partition, keep_age_ms=0, keep_length=0, exact=True
                )
            except (BrokerError, ConfigError) as error:  # a user who may only publish may not trim
                log.warning("%s is full and cannot be trimmed: %s", batch.stream, error)
        if not removed:
            self._line.failed[topic.name] += len(batch.ids)
            batch.fail(lambda _: TopicFull(topic.name, batch.partition, topic.max_length))

    # -- after a break --------------------------------------------------------------------------------------------

    async def _back_off(self, error: BrokerUnavailable) -> None:
        """Give up what has waited long enough, then wait a little. The first retry is immediate."""
        await self._wire.close()
        self._failures += 1
        self._give_up(error, until=monotonic())
        if self._failures > 1:
            if self._failures == 2:
                log.warning("publishing waits: %s", error)
            pause = min(LONGEST_PAUSE, 0.05 * 2 ** min(self._failures - 2, 10))
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        with suppress(RsmqError):  # what it is, the next write says
            await self._client.refresh()
        self._line.call_all()

    def _give_up(self, error: BrokerUnavailable, until: float | None = None) -> None:
        """Fail every batch whose deadline has passed by then; all of them without it."""

        def fail(batch: Batch) -> None:
            self._fail(batch, error)

        for batch in self._flying:
            if until is None or batch.deadline <= until:
                fail(batch)
        self._line.give_up(self._node, fail, until)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """End a batch: with the error, or with PublishUnknown if it may be stored all the same."""
        doubt, topic = batch.doubt, batch.topic.name
        self._line.failed[topic] += len(batch.ids)
        if doubt is None:
            batch.fail(lambda _: error)
            return
        if not batch.is_repeatable:
            for message_id in batch.ids:
                self._doubts.note(message_id, doubt)
        batch.fail(lambda message_id: PublishUnknown(message_id, topic))

    def __repr__(self) -> str:
        return f"<Carrier flying={len(self._flying)} failures={self._failures}>"


def is_gone(error: SlotMoving) -> bool:
    """Whether the slot has a new owner already."""
    return isinstance(error, SlotMoved) and not error.is_ask


def too_few_replicas(reached: int, wanted: int) -> Callable[[str], Exception]:
    """Makes the error for a message that is stored, but not as often as asked."""
    return lambda message_id: BrokerError(
        f"message {message_id} is stored, but only {reached} of {wanted} replicas confirmed it in time: "
        f"it is lost only if the master is. Look at the replicas, or ask for fewer with wait_replicas"
    )
