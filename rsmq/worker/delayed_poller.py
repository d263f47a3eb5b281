"""The delayed poller: moves delayed messages into their streams when they are due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio
import anyio.abc

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, PartitionSealed
from rsmq.model.backoff import Backoff
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.packing import readable_fields
from rsmq.model.partition import route_of
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import ShardedConnection, pack
from rsmq.redis.scripts import MOVE_DELAYED, RELEASE_DELAYED
from rsmq.redis.streams import trim
from rsmq.redis.topics import Topic, Topics, cached_topic

log = logging.getLogger("rsmq.delay")

MOST_AT_ONCE: Final = 200
LONGEST_PAUSE: Final = 1.0
EARLIEST: Final = 0.01
"""Seconds between two polls, where a message is due before the next one."""
PAGE: Final = 32
"""Partitions checked with one command."""

Partition = tuple[str, int]
"""Topic and number."""


class DelayedPoller:
    """Polls the partitions that `partitions` returns every `delay_resolution`, with one write to each node. A partition
    whose next message is due before that is asked again when it is due, at most every 10 ms.

    Several pollers may poll the same partition: the script moves each message once. It polls even when nothing was
    scheduled a moment ago, because a message delayed by 200 ms may arrive at any time.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        partitions: Callable[[], Sequence[Partition]],
        topics: Topics,
    ) -> None:
        self._client = client
        self._keys = keys
        self._partitions = partitions
        self._topics = topics
        self._resolution = settings.delay_resolution.total_seconds()
        self._connection = ShardedConnection(client)
        self._backoff = Backoff(2 * self._resolution, LONGEST_PAUSE)
        self._broken: set[Partition] = set()
        self._due: dict[Partition, float] = {}
        """When the next message of a partition is due (monotonic), as far as the server has said it."""
        self._next_at = 0.0

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        try:
            while True:
                await asyncio.sleep(await self._poll())
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections; the next poll opens them again."""
        await self._connection.close()

    async def _poll(self) -> float:
        """Move what is due; returns the seconds until the next poll. Errors end here and lengthen the pause."""
        begun, everything = monotonic(), list(self._partitions())
        is_early = begun < self._next_at
        if not is_early:
            self._next_at = begun + self._resolution
            self._due.clear()
        next_at = self._next_at
        try:
            if is_early:
                asked: Sequence[Partition] = [each for each in everything if self._due.get(each, next_at) <= begun]
            else:
                asked = await self._non_empty(everything)
            moved = await self.release(asked)
        except BrokerError as error:
            (log.debug if self._backoff.failures else log.warning)("delayed messages wait: %s", error)
            await self.close()
            return max(self._backoff.next(), next_at - monotonic())
        self._backoff.reset()
        is_more_due = any(count >= MOST_AT_ONCE for count in moved)
        if is_more_due:
            return 0.0
        soonest = max(min([next_at, *self._due.values()]), begun + EARLIEST)
        return max(0.0, min(next_at, soonest) - monotonic())

    async def _non_empty(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        """Skip pages of partitions without delayed messages: most have none, and one EXISTS checks a whole page.

        On a cluster the partitions are in different slots, so all of them are polled.
        """
        if self._client.is_cluster or len(partitions) < 2:
            return partitions
        pages = [partitions[at : at + PAGE] for at in range(0, len(partitions), PAGE)]
        names = [[self._keys.delayed(*partition) for partition in page] for page in pages]
        counts = await self._connection.exchange([(page[0], pack(("EXISTS", *page))) for page in names])
        return [partition for page, count in zip(pages, counts, strict=True) if count for partition in page]

    async def release(self, partitions: Sequence[Partition]) -> list[int]:
        """Move the due messages of these partitions; returns how many each had."""
        if not partitions:
            return []
        names = (self._keys.stream, self._keys.delayed, self._keys.unique)
        limits = {name: await self._limit(name) for name in {name for name, _ in partitions}}
        calls = [([name(*each) for name in names], (MOST_AT_ONCE, *limits[each[0]])) for each in partitions]
        replies = await self._connection.exchange(
            [(keys[0], pack(RELEASE_DELAYED.command(keys, args))) for keys, args in calls]
        )
        moved, now = [], monotonic()
        for partition, reply in zip(partitions, replies, strict=True):
            self._due.pop(partition, None)
            if isinstance(reply, PartitionSealed) and await self._follow(*partition):
                moved.append(0)
                continue
            if not isinstance(reply, Exception) and reply[1] >= 0 and not reply[2]:
                self._due[partition] = now + reply[1] / 1000
            moved.append(0 if isinstance(reply, Exception) else reply[0])
            self._log_failure(partition, reply)
            if not isinstance(reply, Exception) and reply[2]:
                await self._make_room(partition)
        if all(isinstance(reply, BrokerUnavailable) for reply in replies):
            raise replies[0]
        return moved

    async def _limit(self, name: str) -> tuple[int, str]:
        """The `max_length` of a topic, and what happens when it is full."""
        topic = cached_topic(self._topics, name) or await self._topics.find(name)
        return (topic.max_length, topic.on_full) if topic is not None else (0, "reject")

    async def _follow(self, name: str, partition: int) -> bool:
        """The topic was resized: all delayed messages of a sealed partition go to those that follow, as soon as these
        are open. False: it was not."""
        topic = await self._topics.find(name)
        if topic is not None and topic.layout.is_being_sealed(partition):
            return True
        if topic is None or not topic.layout.is_sealed(partition):
            return False
        delayed, unique = self._keys.delayed(name, partition), self._keys.unique(name, partition)
        while page := await self._client.execute_command("ZRANGE", delayed, 0, MOST_AT_ONCE - 1):
            targets = dict[int, list[bytes]]()
            for packed in page:
                targets.setdefault(target_of(topic, partition, packed), []).append(packed)
            for target, args in targets.items():
                keys = (delayed, self._keys.delayed(name, target), unique, self._keys.unique(name, target))
                await MOVE_DELAYED(self._client, keys, args)
        return True

    async def _make_room(self, partition: Partition) -> None:
        """Remove what a full partition keeps only for a replay. Else what is due waits for its consumers."""
        with suppress(ConfigError):
            await trim(self._client, self._keys, *partition, keep_age_ms=0, keep_length=0, exact=True)

    def _log_failure(self, partition: Partition, reply: object) -> None:
        """A partition that fails is logged once; the other partitions go on."""
        if isinstance(reply, BrokerUnavailable):
            log.debug("delayed messages of %s.%d wait: %s", *partition, reply)
        elif isinstance(reply, Exception):
            level = logging.DEBUG if partition in self._broken else logging.ERROR
            log.log(level, "delayed messages of %s.%d wait: %s", *partition, reply)
            self._broken.add(partition)
        else:
            self._broken.discard(partition)

    def __repr__(self) -> str:
        return f"<DelayedPoller partitions={len(self._partitions())} failures={self._backoff.failures}>"


def target_of(topic: Topic, partition: int, packed: bytes) -> int:
    """Where a delayed message of a sealed partition goes. One that cannot be unpacked goes by what it is."""
    return topic.layout.partition_after(partition, route_of(readable_fields(packed), packed))
