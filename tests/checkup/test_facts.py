"""What the checkup sees on a real server."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rsmq.checkup import gather, judge
from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.topic import Topics

NOW = timedelta(0)


@pytest.fixture
async def stream(client: Client, keys: Keys, settings: Settings) -> str:
    """The first partition of a topic of four, which a group of nobody has read a part of."""
    await Topics(client, keys, settings).ensure("orders", 4)
    for partition in range(4):
        name = keys.stream("orders", partition)
        await client.execute_command("XGROUP", "CREATE", name, "billing", "0", "MKSTREAM")
    return keys.stream("orders", 0)


async def test_an_empty_server_is_well(client: Client, keys: Keys, settings: Settings) -> None:
    """Nothing is wrong where nothing is."""
    (finding,) = judge(await gather(client, keys, settings, NOW))
    assert finding.level == "ok"


async def test_hands_and_phantoms(client: Client, keys: Keys, settings: Settings, stream: str) -> None:
    """A consumer that nobody is, and an entry that was deleted while it was pending."""
    ids = [await client.execute_command("XADD", stream, "*", "data", "x") for _ in range(3)]
    await client.execute_command("XREADGROUP", "GROUP", "billing", "gone", "COUNT", 2, "STREAMS", stream, ">")
    await client.execute_command("XDEL", stream, ids[0])
    found = await gather(client, keys, settings, NOW)
    (hand,) = found.hands
    assert (hand.place, hand.name, hand.pending) == (("orders", "billing", 0), "gone", 2)
    (oldest,) = found.oldest
    assert (oldest.id, oldest.consumer, oldest.is_gone) == (ids[0].decode(), "gone", True)
    topics = {finding.topic for finding in judge(found)}
    assert {"group", "pending"} <= topics
    await client.execute_command("XACK", stream, "billing", ids[0])
    (oldest,) = (await gather(client, keys, settings, NOW)).oldest
    assert not oldest.is_gone


async def test_a_hot_key_is_named(client: Client, keys: Keys, settings: Settings, stream: str) -> None:
    """Where one partition has nearly all that waits, its most frequent key is told."""
    command = ("XADD", stream, "*", "data", "x", "key", "c-42")
    await client.pipelined([command] * 1500)
    found = await gather(client, keys, settings, NOW)
    assert found.common_keys == {("orders", 0): ("c-42", 1.0)}
    assert "100% of the newest messages of orders.0 have the key 'c-42'" in " ".join(map(str, judge(found)))


async def test_the_servers_settings(client: Client, keys: Keys, settings: Settings) -> None:
    """Those that decide about idle connections."""
    assert set((await gather(client, keys, settings, NOW)).config) == {"timeout", "tcp-keepalive"}
