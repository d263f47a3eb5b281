"""The sender: one connection to a node, on which all waiting batches are written together, and its recovery."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from rsmq.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    PartitionSealed,
    PublishUnknown,
    RsmqError,
    SlotMoved,
    SlotMoving,
    TopicFull,
)
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake, to_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.producer.batch import Batch, Full, Once
from rsmq.producer.in_doubt import InDoubt, InDoubtMessages, ask, end_write, search
from rsmq.producer.send_queue import SendQueue
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.streams import NOTHING, as_dict, is_missing, newest_id, trim
from rsmq.redis.topics import Topic, Topics, doubt_layouts, recall_topic, topic_after

log = logging.getLogger("rsmq.publish")

FIRST_PAUSE: Final = 0.025
"""Seconds. The first retry skips its pause, so the first real pause is twice as long."""
LONGEST_PAUSE: Final = 1.0


class Sender:
    """Group commit: messages that are published while a write is in flight share the next write.

    A plain batch whose reply was lost is in doubt. It is not simply sent again: the sender kills the old connection (so
    that nothing more arrives from it), searches the stream for the batch, and sends only what is missing. If the slot
    has moved meanwhile, the old node refuses late commands, so there is nothing to kill.
    """

    def __init__(
        self,
        queue: SendQueue,
        client: Client,
        node: Client,
        keys: Keys,
        settings: Settings,
        in_doubt: InDoubtMessages,
        topics: Topics,
    ) -> None:
        self._topics = topics
        self._queue = queue
        self._client = client
        self._node = node
        self._keys = keys
        self._in_doubt = in_doubt
        self._replicas = replicas = queue.replicas
        self._wait_ms = to_ms(settings.command_timeout) if replicas else 0
        self._wait_seconds = (settings.command_timeout * (2 if replicas else 1)).total_seconds()
        self._connection = RawConnection(node)
        self._was_open = False
        self._in_flight: list[Batch] = []
        self._newest: dict[str, bytes] = {}
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Send until cancelled. All callers that still wait then get an error."""
        try:
            while True:
                await self.wake.wait()
                self.wake.clear()
                # after a failure one batch only, so that few messages are in doubt until it works
                while batches := self._queue.take(self._node, 1 if self._backoff.failures else None):
                    self._in_flight = batches
                    await self._flush(batches)
        finally:
            await self._connection.close()
            self._expire(BrokerUnavailable("the broker was closed before the message was confirmed"))

    async def _flush(self, batches: list[Batch]) -> None:
        """One write and its replies. Each batch is confirmed, failed or sent again."""
        trouble: BrokerUnavailable | None = None
        moving: dict[str, SlotMoving | PartitionSealed] = {}
        try:
            await self._prepare(batches, moving)
            trouble = await self._exchange([b for b in batches if b.ids and b.stream not in moving], moving)
        except BrokerUnavailable as error:
            trouble = error
        except Exception as error:  # the sender must survive any error: later messages need it
            log.warning("publishing failed: %s", error, exc_info=not isinstance(error, BrokerError))
            await self._connection.close()
            for batch in batches:
                self._fail(batch, error)
        for batch in batches if moving else ():
            if batch.stream in moving and batch.deadline <= awake():
                self._fail(batch, not_stored(moving[batch.stream]))
        self._in_flight = []
        self._queue.end(batches, {stream for stream, error in moving.items() if not is_gone(error)})
        if trouble is None:
            self._backoff.reset()
        else:
            await self._back_off(trouble)

    async def _prepare(self, batches: list[Batch], moving: dict[str, SlotMoving | PartitionSealed]) -> None:
        """Open the connection, resolve the batches in doubt and read the newest entry of each stream. A stream whose
        slot is moving is added to `moving` and waits."""
        if not self._connection.is_open:
            await self._connection.open()
            self._newest.clear()  # a server that has lost writes, and whose clock is behind, goes on with lower ids
            if self._was_open:
                doubt_layouts(self._topics)
                await self._follow_bands(batches)
            self._was_open = True
            self._backoff.failures = min(self._backoff.failures, 2)  # the server is there: keep the pauses short
        for batch in batches:
            try:
                await self._resolve(batch)
            except SlotMoving as error:
                moving[batch.stream] = error
        unseen = [batch.stream for batch in batches if batch.stream not in self._newest and not batch.is_repeatable]
        replies = (
            await self._connection.exchange([pack(("XINFO", "STREAM", stream)) for stream in unseen]) if unseen else []
        )
        for stream, reply in zip(unseen, replies, strict=True):
            if isinstance(reply, SlotMoving):
                moving[stream] = reply
                continue
            if isinstance(reply, Exception) and not is_missing(reply):
                raise reply
            self._newest[stream] = NOTHING if is_missing(reply) else newest_id(as_dict(reply))

    async def _resolve(self, batch: Batch) -> None:
        """Find out how much of this batch an earlier write has stored."""
        if isinstance(batch, Once):
            for message_id in batch.ids:
                write = self._in_doubt.get(message_id)
                if write is not None:
                    stored, before = await search(self._connection, write, [message_id])
                    if write.stream == batch.stream:
                        batch.since[message_id] = before
                    elif stored:  # before the topic was resized: the script sees no other stream than its own
                        life = ("PX", batch.window_ms, "NX")
                        await ask(self._connection, "SET", batch.dedup(message_id), f"@{batch.ancestry[0]}", *life)
        elif batch.in_doubt is not None and batch.is_repeatable:
            await end_write(self._connection, batch.in_doubt)  # or it stores a message that was answered as held
            batch.in_doubt = None
        elif batch.in_doubt is not None:
            # a write stores all or, in a full topic, the front of a batch
            front, _ = await search(self._connection, batch.in_doubt, batch.ids)
            batch.in_doubt = None
            self._confirm(batch, front, reached=0)

    async def _exchange(
        self, batches: list[Batch], moving: dict[str, SlotMoving | PartitionSealed]
    ) -> BrokerUnavailable | None:
        """Write all batches together and act on the replies to each."""
        packed = [batch.commands() for batch in batches]
        commands = [command for group in packed for command in group]
        if not commands:
            return None
        for batch in batches:  # in doubt until the reply
            since = self._newest.get(batch.stream, NOTHING)
            batch.in_doubt = InDoubt(self._connection.client_id, self._connection.address, since, batch.stream)
        wait = pack(("WAIT", self._replicas, self._wait_ms)) if self._replicas else b""
        replies = iter(await self._connection.exchange(commands, self._wait_seconds, last=wait))
        by_batch = [list(islice(replies, len(group))) for group in packed]
        reached = next(replies, 0)
        if isinstance(reached, Exception):
            raise reached
        read = dict[str, Topic]()
        troubles = [
            await self._settle(batch, reply, reached, read) for batch, reply in zip(batches, by_batch, strict=True)
        ]
        for batch, trouble in zip(batches, troubles, strict=True):
            if isinstance(trouble, SlotMoving | PartitionSealed):
                moving[batch.stream] = trouble
        waits = (SlotMoving, PartitionSealed)
        return next(
            (each for each in troubles if isinstance(each, BrokerUnavailable) and not isinstance(each, waits)), None
        )

    async def _settle(
        self, batch: Batch, replies: list[Any], reached: int, read: dict[str, Topic]
    ) -> BrokerUnavailable | PartitionSealed | None:
        """Act on the replies to one batch. Messages that remain in it are sent again. `read`: topics that were read
        after these replies."""
        batch.in_doubt = None
        stored, newest, trouble = batch.read(replies)
        if newest:
            self._newest[batch.stream] = batch.newest = newest
        if batch.is_repeatable:
            for message_id in batch.ids[:stored]:
                self._in_doubt.clear(message_id)
        self._confirm(batch, stored, reached)
        if isinstance(trouble, BrokerUnavailable):
            return trouble
        if isinstance(trouble, Full):
            return await self._make_room(batch)
        if isinstance(trouble, PartitionSealed):
            return await self._follow(batch, trouble, read)
        if trouble is not None:
            self._fail(batch, trouble)
        return None

    def _confirm(self, batch: Batch, stored: int, reached: int) -> None:
        """The first `stored` messages of a batch are on the master and on `reached` replicas."""
        self._queue.stored[batch.topic.name] += stored
        if reached >= self._replicas:
            batch.confirm(stored)
        else:
            batch.fail(too_few_replicas(reached, self._replicas), stored)

    async def _follow(
        self, batch: Batch, sealed: PartitionSealed, read: dict[str, Topic]
    ) -> BrokerUnavailable | PartitionSealed | None:
        """The topic was resized: what is left of a batch goes to the partitions that follow. PartitionSealed: on a
        cluster it waits until all partitions of the topic are sealed. What was read for one batch tells so of all."""
        topic = read.get(batch.topic.name)
        if (
            topic is not None
            and topic.created_ms == batch.topic.created_ms
            and topic.layout.is_being_sealed(batch.partition)
        ):
            return being_sealed(topic)
        try:
            topic = await topic_after(self._topics, batch.topic, batch.partition)
        except BrokerUnavailable as error:
            return error
        except (BrokerError, ConfigError) as error:
            self._fail(batch, error)
            return None
        if topic is not None and topic.layout.is_being_sealed(batch.partition):
            read[topic.name] = topic
            return being_sealed(topic)
        if topic is None or not topic.layout.is_sealed(batch.partition):
            self._fail(batch, sealed)
        else:
            self._queue.follow(batch, topic)
        return None

    async def _follow_bands(self, batches: Sequence[Batch]) -> None:
        """The server may be another one, which has lost the layout of a topic. What it has lost is written again; a
        batch whose partition belongs to another band by now goes to a partition of its own band."""
        for batch in batches:
            known = batch.topic.layout
            if not known.has_more:
                continue
            try:
                topic, band = await recall_topic(self._topics, batch.topic), known.band_of(batch.partition)
                if topic is not None and topic.layout.band_of(batch.partition) != band:
                    self._queue.follow(batch, topic.in_band(band))
            except BrokerUnavailable:
                raise
            except (BrokerError, ConfigError) as error:
                self._fail(batch, error)

    async def _make_room(self, batch: Batch) -> BrokerUnavailable | None:
        """Remove settled entries that are kept only for a replay; at most once per batch. A lost reply is returned: the
        batch is sent again, because there may be room now."""
        topic, removed = batch.topic, 0
        if not batch.has_made_room:
            batch.has_made_room = True
            try:
                _, removed, *_ = await trim(
                    self._client, self._keys, topic.name, batch.partition, keep_age_ms=0, keep_length=0, exact=True
                )
            except BrokerUnavailable as error:
                batch.has_made_room = False
                return error
            except (BrokerError, ConfigError) as error:  # such as a user without the right to trim
                log.warning("%s is full and cannot be trimmed: %s", batch.stream, error)
        if not removed:
            self._queue.failed[topic.name] += len(batch.ids)
            batch.fail(lambda _: TopicFull(topic.name, batch.partition, topic.max_length))
        return None

    # -- after a failure --------------------------------------------------------------------------------------------

    async def _back_off(self, error: BrokerUnavailable) -> None:
        """Fail the batches that are past their deadline, then pause. The first retry is immediate."""
        await self._connection.close()
        pause = self._backoff.next()
        self._expire(error, until=awake())
        if self._backoff.failures > 1:
            if self._backoff.failures == 2:
                log.warning("publishing waits: %s", error)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        with suppress(RsmqError):  # the next write reports the error
            await self._client.refresh()
        self._queue.wake_all()

    def _expire(self, error: BrokerUnavailable, until: float | None = None) -> None:
        """Fail every batch with a deadline before `until`; without it, every batch."""

        def fail(batch: Batch) -> None:
            self._fail(batch, error)

        for batch in self._in_flight:
            if until is None or batch.deadline <= until:
                fail(batch)
        self._queue.expire(self._node, fail, until)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Fail a batch with the error, or with PublishUnknown if it may have been stored."""
        write, topic = batch.in_doubt, batch.topic.name
        self._queue.failed[topic] += len(batch.ids)
        if write is None:
            batch.fail(lambda _: error)
            return
        if not batch.is_repeatable:
            for message_id in batch.ids:
                self._in_doubt.note(message_id, write)
        batch.fail(lambda message_id: PublishUnknown(message_id, topic))

    def __repr__(self) -> str:
        return f"<Sender in_flight={len(self._in_flight)} failures={self._backoff.failures}>"


def is_gone(error: SlotMoving | PartitionSealed) -> bool:
    """Whether the slot already has a new owner."""
    return isinstance(error, SlotMoved) and not error.is_ask


def being_sealed(topic: Topic) -> PartitionSealed:
    """What a message waits for on a cluster, and what its publisher gets if that does not end."""
    return PartitionSealed(
        f"topic {topic.name!r} is being resized, and not all of its partitions are sealed yet: a worker goes "
        f"on, or `rsmq topic resize {topic.name} {topic.layout.all_following[0].count}`. Nothing was stored"
    )


def not_stored(error: SlotMoving | PartitionSealed) -> BrokerError:
    """What a publisher gets that has waited for a slot for as long as it does."""
    if isinstance(error, PartitionSealed):
        return error
    return SlotMoving(
        f"{error}, and no node took the message within RSMQ_UNAVAILABLE_TIMEOUT. Nothing was stored: publish it again. "
        f"`redis-cli --cluster check` shows a move that was not finished"
    )


def too_few_replicas(reached: int, wanted: int) -> Callable[[str], Exception]:
    """Make the error for a message that is stored on too few replicas."""
    return lambda message_id: BrokerError(
        f"message {message_id} is stored, but only {reached} of {wanted} replicas confirmed it in time: "
        f"it is lost only if the master is lost. Check the replicas, or ask for fewer with wait_replicas"
    )
