"""Stray messages: published under an old description of their topic, into partitions that it has no more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import anyio.abc

from rsmq.consumer.consumer import Consumer
from rsmq.model.keys import Keys
from rsmq.model.packing import readable_fields
from rsmq.model.partition import route_of
from rsmq.model.record import whole
from rsmq.model.stream_id import following_id, parse_stream_id, sortable
from rsmq.model.words import count
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import FORGET_STRAY, OK, PUBLISH_MARKED, Value
from rsmq.redis.streams import groups_of, read_entries, server_now_ms
from rsmq.redis.topics import Topic, Topics, stored_numbers
from rsmq.worker.rounds import each_round

log = logging.getLogger("rsmq.strays")

INTERVAL: Final = 2.0
CLUSTER_INTERVAL: Final = 10.0
"""Seconds between two looks: SMEMBERS and EXISTS for a topic, on a cluster EXISTS for each partition that it may be."""
PAGE: Final = 200


class StrayMover:
    """Moves what no group would read into the partitions that the topic has.

    A topic that was deleted, or lost with FLUSHALL, can be made again with fewer partitions, or others. Publishers go
    on with the description that they know, for ten seconds, and clients in other languages for as long as they like.
    The member that reads partition 0 looks for such partitions: all that a topic can begin with, and the higher ones
    that a deleted one had after a resize. One that a worker reads (its lease is held) is left alone.

    A message is moved once while nothing fails: a mark in the target's slot says how far a stray stream was moved, as
    for a relay. Order: messages of a key keep theirs among the strays; those that came the right way may be before
    them.
    """

    def __init__(self, client: Client, keys: Keys, topics: Topics, consumers: Sequence[Consumer]) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics
        self._consumers = consumers

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        pause = CLUSTER_INTERVAL if self._client.is_cluster else INTERVAL
        await each_round(self.look, lambda: pause, log, "stray messages wait")

    async def look(self) -> int:
        """One round over the topics whose partition 0 this process reads; returns how many messages were moved."""
        moved = 0
        for name in sorted({each.topic.name for each in self._consumers if 0 in each.lanes}):
            for partition in await self._suspects(name):
                topic = await self._topics.find(name)
                if topic is None or partition in topic.numbers or await self._is_read(name, partition):
                    continue
                found = await self._move_stream(topic, partition) + await self._move_delayed(topic, partition)
                if found:
                    log.warning(
                        "topic %s has %s, and %s came into partition %d, from a publisher that knew an older "
                        "description: moved", name, count(len(topic.numbers), "partition"), count(found, "message"),
                        partition,
                    )  # fmt: skip
                moved += found
        return moved

    async def _suspects(self, name: str) -> list[int]:
        """Partitions that the topic does not have, and that have a stream or delayed messages."""
        topic = await self._topics.find(name)
        if topic is None:
            return []
        found = await stored_numbers(self._client, self._keys, name, topic.numbers)
        return sorted(found.difference(topic.numbers))

    async def _is_read(self, name: str, partition: int) -> bool:
        """Whether a member that knows an older description holds a lease on it."""
        now_ms = await server_now_ms(self._client)
        for row in await groups_of(self._client, self._keys.stream(name, partition)):
            lease = self._keys.lease(name, partition, row["name"].decode(errors="replace"))
            owner, until_ms = await self._client.execute_command("HMGET", lease, "owner", "until_ms")
            if owner and (whole(until_ms) or 0) > now_ms:
                return True
        return False

    async def _move_stream(self, topic: Topic, partition: int) -> int:
        stream, moved = self._keys.stream(topic.name, partition), 0
        last, has_room = await self._first_needed(stream), True
        while has_room and (page := await read_entries(self._client, "XRANGE", stream, b"(" + last, "+", PAGE)):
            for entry_id, fields in page:
                has_room = await self._append(topic, partition, entry_id, fields)
                if not has_room:
                    break
                last = entry_id
                moved += 1
            await self._client.execute_command("XTRIM", stream, "MINID", "=", following_id(last))
        if has_room:
            await self._forget(topic, partition)
        return moved

    async def _first_needed(self, stream: str) -> bytes:
        """The id before the first entry that some group has not settled."""
        delivered = []
        for row in await groups_of(self._client, stream):
            delivered.append(b"0-0" if row["pending"] else row["last-delivered-id"])
        return min(delivered, key=parse_stream_id, default=b"0-0")

    async def _append(self, topic: Topic, partition: int, entry_id: bytes, fields: Sequence[bytes]) -> bool:
        """Put an entry where it belongs, unless that was done. False: there is no room."""
        target = target_of(topic, fields, entry_id)
        mark: list[Value] = [f"stray|{partition}", sortable(entry_id), len(fields)]
        numbers = (target, *topic.layout.ancestors_of(target))
        keys = (self._keys.stream(topic.name, target), *[self._keys.jobs(topic.name, each) for each in numbers])
        word, *_ = await PUBLISH_MARKED(self._client, keys, (topic.max_length, topic.on_full, *mark, *fields))
        return bool(word == OK)

    async def _move_delayed(self, topic: Topic, partition: int) -> int:
        source, moved = self._keys.delayed(topic.name, partition), 0
        while page := await self._client.execute_command("ZRANGE", source, 0, PAGE - 1, "WITHSCORES"):
            for packed, due in zip(page[::2], page[1::2], strict=True):
                target = self._keys.delayed(topic.name, target_of(topic, readable_fields(packed), packed))
                await self._client.execute_command("ZADD", target, due, packed)
                await self._client.execute_command("ZREM", source, packed)
                moved += 1
        return moved

    async def _forget(self, topic: Topic, partition: int) -> None:
        """The stray stream is empty, so the marks go, too: a new one may begin with lower ids."""
        for target in topic.numbers:
            await self._client.execute_command("HDEL", self._keys.jobs(topic.name, target), f"stray|{partition}")
        await FORGET_STRAY(self._client, (self._keys.stream(topic.name, partition),))

    def __repr__(self) -> str:
        return f"<StrayMover {len(self._consumers)} consumers>"


def target_of(topic: Topic, fields: Sequence[bytes], own: bytes) -> int:
    """The partition of a message in its topic: by its key, else by its id, else by what it was found as."""
    return topic.open_block().partition_for(route_of(fields, own))
