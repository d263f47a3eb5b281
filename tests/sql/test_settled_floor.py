"""How far a group has settled a partition, with more parked messages than are read."""

from __future__ import annotations

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.server_context import ServerContext
from rsmq.redis.topics import Topics
from rsmq.sql.settled_floor import settled_floor


async def test_floor_with_many_parked_messages_is_the_oldest_entry(client: Client, keys: Keys) -> None:
    """Below it no message can be handled again, so marks go as far as retention has removed messages."""
    settings, stream, retry = Settings(), keys.stream("orders", 0), keys.retry("orders", 0, "billing")
    context = ServerContext(client, keys, settings, Topics(client, keys, settings), "me")
    for number in range(1, 7):
        await client.execute_command("XADD", stream, f"{number}-0", "data", "x")
    await client.execute_command("XGROUP", "CREATE", stream, "billing", "5-0")
    for number in range(2, 5):
        await client.execute_command("ZADD", retry, 9 - number, f"{number}-0|1")

    async def floor(most: int) -> tuple[int, int] | None:
        return await settled_floor(context, "orders", 0, "billing", most)

    assert [await floor(3), await floor(2)] == [(2, 0), (1, 0)]
    await client.execute_command("XTRIM", stream, "MINID", "2-0")
    assert await floor(2) == (2, 0)
    await client.execute_command("XTRIM", stream, "MAXLEN", 0)
    assert await floor(2) == (5, 1)
    assert await settled_floor(context, "orders", 0, "no group", 2) is None
