"""Who has subscribed to a topic name is looked up; what a router cannot ask for is held by every gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count, islice

import pytest

from rsmq import Broker
from rsmq.gateway.fleet.registry import ListHolder, Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.router import MqttRouter
from rsmq.gateway.fleet.shares import KeptChoices
from rsmq.model.clock import ServerClock
from rsmq.model.keys import Keys
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.mqtt_subscription import SHARDS, Subscription, pack, shard_of
from rsmq.persistence.inbox_writer import InboxWriter
from rsmq.redis.client.script_batcher import ScriptBatcher

MANY = 64
"""So many subscribers of a name in a shard are looked up."""


@asynccontextmanager
async def batched(broker: Broker) -> AsyncIterator[ScriptBatcher]:
    """A gateway's connection for its writes."""
    batcher = ScriptBatcher(broker.client)
    running = asyncio.create_task(batcher.run())
    yield batcher
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def clients_of(shard: int, name: str, number: int) -> list[str]:
    """So many clients of a shard."""
    return list(islice((each for n in count() if shard_of(each := f"{name}-{n}") == shard), number))


async def lengths(broker: Broker, keys: Keys, command: str, kind: str) -> int:
    """The length of a kind of key, over all shards."""
    return sum([await broker.client.execute_command(command, keys.mqtt(n, kind)) for n in range(SHARDS)])


async def found(registry: Registry, name: str) -> list[tuple[str, int]]:
    """Who is met by a name, and with which QoS."""
    await registry.look((name,))
    by_name = registry.subscribers(name)
    assert by_name is not None
    return sorted((client, each.qos) for client, each in (*by_name.found, *registry.tree.match(name)))


async def test_a_topic_name_is_looked_up_and_held_by_no_process(broker: Broker, name: str) -> None:
    """It writes no change that all routers read, and a process that begins reads nothing of it."""
    keys = Keys(name)
    async with batched(broker) as batcher:
        registry, beginning = (Registry(broker.client, keys, batcher) for _ in range(2))
        for number in range(20):
            wanted = [Subscription(f"cmd/{number}", 1, identifier=268_435_455), Subscription(f"cmd/{number}/x", 2)]
            await registry.write(f"{name}-{number}", "1", wanted)
        await beginning.catch_up()
        assert (beginning.tree.size, beginning.subscriptions) == (0, 40)
        assert await lengths(broker, keys, "XLEN", "changes") == 0
        assert await found(beginning, "cmd/7") == [(f"{name}-7", 1)]
        by_name = beginning.subscribers("cmd/7")
        assert by_name is not None
        assert by_name.found == [(f"{name}-7", Subscription("cmd/7", 1, identifier=268_435_455))]
        await registry.write(f"{name}-7", "1", [Subscription("cmd/7", 0, True, True, 2)])
        assert await found(beginning, "cmd/7/x") == []
        assert await found(beginning, "cmd/7") == [(f"{name}-7", 0)]
        for number in range(20):
            await registry.write(f"{name}-{number}", "2", ())
        assert await found(beginning, "cmd/7") == []
        assert beginning.subscriptions == 0
        for kind in ("subscriptions", "names", "followed"):
            assert await lengths(broker, keys, "HLEN", kind) == 0


async def test_a_name_with_many_subscribers_is_followed_until_the_last_has_gone(broker: Broker, name: str) -> None:
    """A router that looked it up would read all of them after each change of the shard."""
    keys, clients = Keys(name), clients_of(3, name, MANY + 2)
    async with batched(broker) as batcher:
        registry, following = (Registry(broker.client, keys, batcher) for _ in range(2))
        for number, client in enumerate(clients):
            await registry.write(
                client, "1", [Subscription("news", 1 + number % 2), Subscription("own", 1)][: 1 + (number < 5)]
            )
            if number in (MANY - 1, MANY, MANY + 1):
                assert len(await found(following, "news")) == number + 1
                assert following.tree.size == (0 if number < MANY else number + 1)
        beginning = Registry(broker.client, keys, batcher)
        assert await found(beginning, "news") == sorted((each, 1 + n % 2) for n, each in enumerate(clients))
        assert beginning.subscriptions == following.subscriptions == len(clients) + 5
        await registry.write(clients[0], "1", [Subscription("news", 0)])
        assert (clients[0], 0) in await found(following, "news")
        for left, client in enumerate(reversed(clients)):
            await registry.write(client, "2", ())
            assert len(await found(following, "news")) == len(clients) - 1 - left
        assert following.tree.size == 0
        await registry.write(clients[0], "3", [Subscription("news", 1)])
        assert await found(following, "news") == [(clients[0], 1)]
        assert following.tree.size == 0


async def test_a_known_name_is_looked_up_again_only_where_a_name_has_changed(broker: Broker, name: str) -> None:
    """A batch whose names are known costs one question for all shards."""
    keys, (first, second), (other,) = Keys(name), clients_of(1, name, 2), clients_of(2, name, 1)
    async with batched(broker) as batcher:
        registry = Registry(broker.client, keys, batcher)
        await registry.write(first, "1", [Subscription("a", 1)])
        assert await found(registry, "a") == [(first, 1)]
        known, lookups = registry.subscribers("a"), registry.lookups
        assert lookups == SHARDS
        assert await found(registry, "a") == [(first, 1)]
        await registry.write(other, "1", [Subscription("b/+", 1)])  # a wildcard: the names stay as they were
        assert await found(registry, "a") == [(first, 1)]
        assert (registry.lookups, registry.tree.size) == (lookups, 1)
        await registry.write(second, "1", [Subscription("b", 1)])
        assert await found(registry, "a") == [(first, 1)]
        assert registry.lookups == lookups + 1
        assert registry.subscribers("a") is known
        await broker.client.execute_command("DEL", *(keys.mqtt(n, each) for n in (1, 2) for each in ("names", "mark")))
        assert await found(registry, "a") == []


async def test_an_older_message_does_not_meet_a_name_that_is_subscribed_to_later(broker: Broker, name: str) -> None:
    """Its gateway had acknowledged it before. A later one meets it, and the other subscriber meets both."""
    client, keys = broker.client, broker.keys
    for payload in (b"early", b"late"):
        headers = {"mqtt-topic": f"{name}/a", "mqtt-client": "other", "mqtt-qos": "1"}
        await broker.publish(name, payload, key="one", headers=headers)
    (partition, messages), = [
        (n, [Message(MessageOrigin(name, n, "mqtt"), entry_id, fields) for entry_id, fields in entries])
        for n in (await broker.topics.existing(name)).numbers
        if (entries := await client.execute_command("XRANGE", keys.stream(name, n), "-", "+"))
    ]  # fmt: skip
    before = {f"{name}.{partition}": messages[0].entry_id.decode(), "other.0": "1-0"}
    async with batched(broker) as batcher:
        registry, retained = Registry(client, keys, batcher), Retained(client, keys, batcher, 100)
        writer = InboxWriter(batcher, keys, broker.settings, is_cluster=False)
        router = MqttRouter(registry, writer, retained, KeptChoices(keys, batcher), ServerClock().now_ms)
        await registry.write(f"{name}-old", "1", [Subscription(f"{name}/a", 1)])
        await registry.write(f"{name}-new", "1", [Subscription(f"{name}/a", 1)], before=before)
        await registry.write(f"{name}-new", "1", [Subscription(f"{name}/a", 0)])  # it is the same subscription
        assert await router.route(messages[:1]) is None
        assert router.letters == 1
        assert await router.route(messages[1:]) is None
        assert router.letters == 3
        known = registry.subscribers(f"{name}/a")
        assert known is not None
        assert known.older == {}
        for each in ("old", "new"):
            await registry.write(f"{name}-{each}", "2", ())
    await broker.topics.delete(name)


async def test_lists_of_an_earlier_version_are_named(
    broker: Broker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It wrote no names, so no router would meet them, and a client that subscribes again would change nothing."""
    keys = Keys(name)
    await broker.client.execute_command(
        "HSET", keys.mqtt(5, "subscriptions"), "phone", b"1|" + pack([Subscription("a", 1)])
    )
    async with batched(broker) as batcher:
        await Registry(broker.client, keys, batcher).catch_up()
    assert f"the subscriptions in {keys.mqtt(5, 'subscriptions')} were written by an earlier version" in caplog.text


def test_field_of_another_client_stands_for_no_list_of_a_client() -> None:
    """An empty topic name behind a client would be read as the client's own list, in the place of it."""
    assert ListHolder.read(b"phone") == ListHolder("phone")
    assert ListHolder.read(b"phone\0a/b") == ListHolder("phone", "a/b")
    assert ListHolder.read(b"phone\0") is None
