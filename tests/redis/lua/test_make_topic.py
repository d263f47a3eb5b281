"""The script that makes a topic: of two processes that do it at the same time, one does it whole."""

from __future__ import annotations

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import MAKE_TOPIC
from rsmq.redis.streams import as_dict

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_grown_first", [True, False])
async def test_what_the_second_process_knows_is_not_mixed_in(client: Client, keys: Keys, is_grown_first: bool) -> None:
    """After FLUSHALL one knows the layout, and the other one only with how many partitions the topic began."""
    topic, grown, begun = keys.topic("orders"), ("layout", "grown", "resized"), ("3",)
    calls = (grown, begun) if is_grown_first else (begun, grown)
    assert [await MAKE_TOPIC(client, (topic,), each) for each in calls] == [1, 0]
    expected = {"layout": b"grown", "partitions": b"resized"} if is_grown_first else {"partitions": b"3"}
    assert as_dict(await client.execute_command("HGETALL", topic)) == expected


async def test_a_limit_that_was_set_before_stays(client: Client, keys: Keys) -> None:
    """An operator may have set it, or a process of an older version that died while it made the topic."""
    topic = keys.topic("orders")
    await client.execute_command("HSET", topic, "max_length", "7")
    assert await MAKE_TOPIC(client, (topic,), ("max_length", "9", "on_full", "trim", "3")) == 1
    found = as_dict(await client.execute_command("HGETALL", topic))
    assert found == {"max_length": b"7", "on_full": b"trim", "partitions": b"3"}
