"""Ends batches that expire, deletes what is left of old ones, and on a cluster publishes their callbacks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import anyio.abc

from rsmq.consumer.consumer import Consumer
from rsmq.errors import ConfigError
from rsmq.model.batch_member import SHARDS
from rsmq.model.keys import Keys
from rsmq.model.record import text, whole
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import END_BATCHES, NOTE_CALLBACK, PUBLISH_ONCE
from rsmq.redis.topics import Topics, topics_with_batches
from rsmq.worker.rounds import each_round

log = logging.getLogger("rsmq.batch")

INTERVAL: Final = 1.0
"""Seconds between two looks."""
MOST: Final = 100
"""Batches of one call."""
SPARE_MS: Final = 86_400_000
"""So much longer than its batch the id of a callback is remembered."""


class BatchEnds:
    """Serves all batches. It asks the server only in a process whose topics have members or callbacks of some.

    Several processes may do it at once: the scripts decide, and a callback is published under the same id.
    """

    def __init__(self, client: Client, keys: Keys, topics: Topics, consumers: Sequence[Consumer]) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics
        self._consumers = consumers

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        await each_round(self._look_if_needed, lambda: INTERVAL, log, "batches that end wait")

    async def _look_if_needed(self) -> None:
        if self._is_needed():
            await self.look()

    def _is_needed(self) -> bool:
        known = topics_with_batches(self._topics)
        for consumer in self._consumers:
            if any(lane.outgoing.members for lane in consumer.lanes.values()):
                known.add(consumer.topic.name)
        return any(consumer.topic.name in known for consumer in self._consumers)

    async def look(self) -> None:
        """One round."""
        due = [self._keys.batch_due(shard) for shard in range(SHARDS)]
        if not self._client.is_cluster and not await self._client.execute_command("EXISTS", *due):
            return
        for shard in range(SHARDS):
            names = (due[shard], self._keys.batch_names(shard))
            for call in await END_BATCHES(self._client, names, (MOST,)):
                await self._call_back(*call)
        if self._client.is_cluster:  # other processes may have ended members here, such as by a cancellation
            for consumer in self._consumers:
                for lane in consumer.lanes.values():
                    consumer.settler.outputs.relay.wake(lane)

    async def _call_back(self, home: bytes, which: bytes, target: bytes, data: bytes, keep_ms: bytes) -> None:
        """Store a callback, once, and note that."""
        batch, (topic, _, number) = text(home), text(target).rpartition(".")
        if whole(number) is None or whole(keep_ms) is None:
            log.error(
                "batch %s cannot call back: another client has written into %s", batch, self._keys.batch_state(batch)
            )
            return
        state, due = self._keys.batch_state(batch), self._keys.batch_due(int(batch.partition(".")[0]))
        identity = f"{batch}.{which.decode()}"
        name: Any = await self._client.execute_command("HGET", state, "name") or b""
        partition = remembered = int(number)
        with suppress(ConfigError):
            known = await self._topics.find(topic)
            if known is not None and known.layout.is_resized:
                remembered = known.layout.root_of(partition)
                partition = known.layout.partition_after(partition, name)
        names = (self._keys.stream(topic, partition), self._keys.dedup(topic, remembered, identity))
        fields = ("data", data, "id", identity, "key", name)
        await PUBLISH_ONCE(self._client, names, (0, "reject", int(keep_ms) + SPARE_MS, "", identity, *fields))
        await NOTE_CALLBACK(self._client, (state, due), (batch, which))

    def __repr__(self) -> str:
        return "<BatchEnds>"
