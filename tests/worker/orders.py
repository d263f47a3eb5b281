"""A topic with entries that are read and settled in part: what retention trims, and what its questions are about."""

from __future__ import annotations

from typing import Any

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ensure_groups
from rsmq.redis.topics import Topic, Topics

GROUP = "billing"


class Orders:
    """A topic of two partitions with one group, as retention meets it."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self.client, self.keys, self.settings = client, keys, settings
        self.topics = Topics(client, keys, settings)

    async def make(self, **limits: Any) -> Topic:
        topic = await self.topics.ensure("orders", 2)
        await ensure_groups(self.client, self.keys, topic, GROUP)
        return await self.topics.change("orders", **limits)

    async def fill(self, partition: int, count: int, *, read: int, settle: int, consumer: str = "me") -> list[bytes]:
        stream = self.keys.stream("orders", partition)
        ids = [await self.client.execute_command("XADD", stream, "*", "data", "x") for _ in range(count)]
        reply = await self.client.execute_command(
            "XREADGROUP", "GROUP", GROUP, consumer, "COUNT", read, "STREAMS", stream, ">"
        )
        settled = [entry for entry, _ in reply[0][1]][:settle]
        if settled:
            await self.client.execute_command("XACK", stream, GROUP, *settled)
        return ids

    async def length(self, partition: int) -> int:
        return await self.client.execute_command("XLEN", self.keys.stream("orders", partition))
