"""The script that changes a layout: keys before, call, keys after; and called twice."""

from __future__ import annotations

import pytest

from rsmq.model.keys import Keys
from rsmq.model.layout import single
from rsmq.redis.client.connector import Client
from rsmq.redis.layouts import change_layout
from rsmq.redis.scripts import CHANGE_LAYOUT, OK

pytestmark = pytest.mark.anyio


async def test_change_layout_is_refused_where_another_one_is_there(client: Client, keys: Keys) -> None:
    """Of two that add a band at the same time one reads again. The second call with the same texts changes nothing."""
    topic = keys.topic("orders")
    assert await CHANGE_LAYOUT(client, (topic,), ("", "a")) == b"GONE"
    assert await client.execute_command("EXISTS", topic) == 0
    await client.execute_command("HSET", topic, "partitions", 2)
    assert await CHANGE_LAYOUT(client, (topic,), ("", "a")) == OK
    assert await CHANGE_LAYOUT(client, (topic,), ("", "b")) == b"CHANGED"
    assert await CHANGE_LAYOUT(client, (topic,), ("", "a")) == b"CHANGED"
    assert await client.execute_command("HMGET", topic, "partitions", "layout") == [b"2", b"a"]


async def test_change_layout_twice_from_what_was_read_changes_once(client: Client, keys: Keys) -> None:
    """The second one, whose answer to the first was lost, sees that it is not what it has read any more."""
    await client.execute_command("HSET", keys.topic("orders"), "partitions", 2)
    read = single(2)
    assert await change_layout(client, keys, "orders", read, read.with_bands(("urgent", "normal")))
    assert not await change_layout(client, keys, "orders", read, read.with_bands(("bulk", "normal")))
