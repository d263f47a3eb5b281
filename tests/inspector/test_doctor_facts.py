"""What the doctor reads from a real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import redis.asyncio as redis

from rsmq import Broker
from rsmq.inspector.doctor import foreign_keys, gather, judge
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics

NOW = timedelta(0)


@pytest.fixture
async def stream(client: Client, keys: Keys, settings: Settings) -> str:
    """The first partition of a topic of four, with a group that has no member."""
    await Topics(client, keys, settings).ensure("orders", 4)
    for partition in range(4):
        name = keys.stream("orders", partition)
        await client.execute_command("XGROUP", "CREATE", name, "billing", "0", "MKSTREAM")
    return keys.stream("orders", 0)


async def test_empty_server_has_no_warning(client: Client, keys: Keys, settings: Settings) -> None:
    """Without topics there is nothing to warn of."""
    (finding,) = judge(await gather(client, keys, settings, NOW))
    assert finding.level == "ok"


async def test_dead_consumer_and_deleted_pending_entry_are_found(
    client: Client, keys: Keys, settings: Settings, stream: str
) -> None:
    """A consumer without a member, and an entry that was deleted while it was pending."""
    ids = [await client.execute_command("XADD", stream, "*", "data", "x") for _ in range(3)]
    await client.execute_command("XREADGROUP", "GROUP", "billing", "gone", "COUNT", 2, "STREAMS", stream, ">")
    await client.execute_command("XDEL", stream, ids[0])
    found = await gather(client, keys, settings, NOW)
    (consumer,) = found.consumers
    assert (consumer.topic, consumer.group, consumer.partition) == ("orders", "billing", 0)
    assert (consumer.name, consumer.pending) == ("gone", 2)
    (oldest,) = found.oldest
    assert (oldest.id, oldest.consumer, oldest.is_gone) == (ids[0].decode(), "gone", True)
    topics = {finding.topic for finding in judge(found)}
    assert {"group", "pending"} <= topics
    await client.execute_command("XACK", stream, "billing", ids[0])
    (oldest,) = (await gather(client, keys, settings, NOW)).oldest
    assert not oldest.is_gone


async def test_a_killed_member_is_not_named_as_one_that_a_resize_waits_for(
    client: Client, keys: Keys, settings: Settings, stream: str
) -> None:
    """Its heartbeat counts for a lease more, but its presence connection is gone."""
    del stream
    topics, info = Topics(client, keys, settings), json.dumps({"layout": 0})
    for member in ("lives", "killed"):
        await client.execute_command("SADD", keys.members("orders", "billing"), member)
        await client.execute_command("SET", keys.alive("orders", "billing", member), info, "PX", 60_000)
    async with listening(settings, keys.presence("lives")):
        await topics.resize("orders", 8)
        (said,) = [
            each.text for each in judge(await gather(client, keys, settings, NOW)) if "8 partitions" in each.text
        ]
    assert "before all live members know them: lives does not" in said
    said = "".join(each.text for each in judge(await gather(client, keys, settings, NOW)))
    assert "no worker goes on. Repeat `rsmq topic resize orders 8`" in said


@asynccontextmanager
async def listening(settings: Settings, channel: str) -> AsyncIterator[None]:
    """As the presence connection of a member."""
    async with redis.from_url(str(settings.url)) as connection, connection.pubsub() as subscription:
        await subscription.subscribe(channel)
        await subscription.get_message(timeout=5)
        yield


async def test_keys_of_another_program_are_named(client: Client, keys: Keys, settings: Settings, stream: str) -> None:
    """A key of each kind, and a stream that is gone: the groups are known by the other partitions."""
    assert await foreign_keys(client, keys) == []
    kinds = {
        stream: "stream", keys.delayed("orders", 1): "zset", keys.lease("orders", 0, "billing"): "hash",
        keys.members("orders", "billing"): "set",
    }  # fmt: skip
    for key in kinds:
        await client.execute_command("SET", key, "x")
    assert await foreign_keys(client, keys) == [f"{key} is a string, not a {kind}" for key, kind in kinds.items()]
    await client.execute_command("SET", keys.topics, "x")
    assert await foreign_keys(client, keys) == [f"{keys.topics} is a string, not a set"]


async def test_hot_key_is_named(client: Client, keys: Keys, settings: Settings, stream: str) -> None:
    """If one partition has nearly all of the lag, its most frequent key is found."""
    command = ("XADD", stream, "*", "data", "x", "key", "c-42")
    await client.pipelined([command] * 1500)
    found = await gather(client, keys, settings, NOW)
    assert found.common_keys == {("orders", 0): ("c-42", 1.0)}
    assert "100% of the newest messages of orders.0 have the key 'c-42'" in " ".join(map(str, judge(found)))


async def test_server_settings_are_read(client: Client, keys: Keys, settings: Settings) -> None:
    """Those about idle connections."""
    assert set((await gather(client, keys, settings, NOW)).config) == {"timeout", "tcp-keepalive"}


async def test_topic_without_ids_and_members_with_different_leases_are_named(
    client: Client, keys: Keys, settings: Settings, stream: str
) -> None:
    """Messages of another program, and two workers with different settings; messages of rsmq have ids."""
    await client.execute_command("XADD", stream, "*", "data", "x")
    leases = [timedelta(seconds=seconds) for seconds in (5, 9)]
    one, two = (Broker(replace(settings, preflight="warn", lease_ttl=each)) for each in leases)
    for broker in (one, two):

        @broker.handler("orders", group="billing")
        async def bill(order: str) -> None: ...

    async with one.running(), two.running():
        await one.publish("others", "x")
        found = await gather(client, keys, settings, NOW)
        assert found.without_ids == ["orders"]
        texts = " ".join(map(str, judge(found)))
        assert "the newest messages of orders have no id" in texts
        assert "the members of group billing of orders have different leases, from 5 s" in texts
        for broker in (one, two):
            broker.stop(NOW)


async def test_callbacks_of_open_batches_are_found(settings: Settings) -> None:
    """As long as they have not come; another client's records are no batches."""
    broker = Broker(settings)
    async with broker:
        about: tuple[Client, Keys, Settings] = (broker.client, broker.keys, broker.settings)
        async with broker.batch("campaign", group="sender", on_complete="reports", on_success="successes"):
            assert sorted(each.topic for each in (await gather(*about, NOW)).callbacks) == ["reports", "successes"]
            await broker.client.execute_command("HSET", broker.keys.batch_names(0), "spoiled", b"\xff")
            assert len((await gather(*about, NOW)).callbacks) == 2
        found = await gather(*about, NOW)
        assert found.callbacks == []
