"""Messages in partitions that their topic has no more are found, and moved to where they are read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rsmq import Broker, Settings
from rsmq.model.clock import now_ms
from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields
from rsmq.model.partition import partition_for
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics
from rsmq.worker.strays import StrayMover
from tests.patience import until

OLD, NEW, MANY = 8, 2, 40


@pytest.fixture
async def mover(client: Client, keys: Keys, settings: Settings) -> StrayMover:
    """Of the member that reads partition 0 of a topic with two partitions."""
    topics = Topics(client, keys, settings)
    topic = await topics.ensure("orders", NEW)
    return StrayMover(client, keys, topics, [SimpleNamespace(topic=topic, lanes={0: None})])  # type: ignore[list-item]


async def stored(client: Client, keys: Keys, partition: int) -> list[bytes]:
    """The payloads of a partition."""
    return [
        fields[1] for _, fields in await client.execute_command("XRANGE", keys.stream("orders", partition), "-", "+")
    ]


async def test_messages_of_an_old_publisher_are_handled_in_order_of_their_keys(settings: Settings) -> None:
    """A topic is made again with fewer partitions, while a publisher goes on with what it knows."""
    handled: list[tuple[str, int]] = []
    publisher, admin = Broker(replace(settings, partitions=OLD)), Broker(settings)
    worker = Broker(settings)

    @worker.handler("orders", group="billing")
    async def bill(order: dict[str, Any]) -> None:
        handled.append((order["key"], order["n"]))

    async with publisher, admin, worker:
        await publisher.publish("orders", {"key": "a", "n": -1}, key="a")
        await admin.topics.delete("orders")
        await admin.topics.ensure("orders", NEW)
        for n in range(MANY):
            await publisher.publish("orders", {"key": f"k{n % 5}", "n": n}, key=f"k{n % 5}")
            await publisher.publish("orders", {"key": f"d{n}", "n": n}, key=f"d{n}", delay="10ms")
        async with worker.running():
            await until(lambda: len(set(handled)) == 2 * MANY, "all are handled")
        for key in {key for key, _ in handled}:
            numbers = [n for each, n in handled if each == key]
            assert numbers == sorted(numbers)


async def test_strays_are_moved_once_by_movers_that_die(client: Client, keys: Keys, mover: StrayMover) -> None:
    """What is in its target already, but not yet trimmed, is not added again."""
    for n in range(5):
        fields = ("data", str(n), "key", "k")
        await client.execute_command("XADD", keys.stream("orders", 5), f"{n + 1}-0", *fields)
    entry = (await client.execute_command("XRANGE", keys.stream("orders", 5), "-", "+"))[0]
    topic = await Topics(client, keys, Settings(url="redis://unused")).find("orders")
    assert topic is not None
    assert await mover._append(topic, 5, *entry)
    assert await mover.look() == 5
    found = await stored(client, keys, partition_for("k", NEW))
    assert found == [b"0", b"1", b"2", b"3", b"4"]
    assert await client.execute_command("EXISTS", keys.stream("orders", 5)) == 0
    assert await mover.look() == 0


async def test_a_stray_stream_that_somebody_reads_is_left_alone(client: Client, keys: Keys, mover: StrayMover) -> None:
    """A member with an older description holds a lease; when it is over, what is not settled is moved."""
    stream, lease = keys.stream("orders", 5), keys.lease("orders", 5, "g")
    await client.execute_command("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
    for n in range(3):
        await client.execute_command("XADD", stream, "*", "data", str(n), "key", "k")
    read = await client.execute_command("XREADGROUP", "GROUP", "g", "m", "COUNT", 1, "STREAMS", stream, ">")
    entries = read[0][1]
    await client.execute_command("XACK", stream, "g", entries[0][0])
    await client.execute_command("HSET", lease, "owner", "m", "until_ms", now_ms() + 60_000)
    assert await mover.look() == 0
    await client.execute_command("HSET", lease, "until_ms", 1)
    assert await mover.look() == 2
    assert await stored(client, keys, partition_for("k", NEW)) == [b"1", b"2"]


async def test_a_full_target_keeps_the_rest_where_it_is(client: Client, keys: Keys, mover: StrayMover) -> None:
    """The limit of the topic holds; nothing is lost, and the next round goes on."""
    await client.execute_command("HSET", keys.topic("orders"), "max_length", 2, "on_full", "reject")
    for n in range(5):
        await client.execute_command("XADD", keys.stream("orders", 5), "*", "data", str(n), "key", "k")
    target = partition_for("k", NEW)
    assert await mover.look() == 2
    await client.execute_command("XTRIM", keys.stream("orders", target), "MAXLEN", 0)
    assert await mover.look() == 2
    assert await stored(client, keys, target) == [b"2", b"3"]
    assert await stored(client, keys, 5) == [b"4"]


async def test_what_cannot_be_read_is_moved_as_it_is(client: Client, keys: Keys, mover: StrayMover) -> None:
    """Without a key or an id, with bytes that are no text, or cut off: a consumer buries it, it is not lost."""
    stream, delayed = keys.stream("orders", 7), keys.delayed("orders", 7)
    await client.execute_command("XADD", stream, "*", "data", b"\xff")
    await client.execute_command("XADD", stream, "*", "key", b"\xff\xfe")
    await client.execute_command("ZADD", delayed, 1, b"\x00\x00\x00\xffcut", 2, pack_fields(["data", "x", "key", "k"]))
    assert await mover.look() == 4
    total = [await client.execute_command("XLEN", keys.stream("orders", n)) for n in range(NEW)]
    waiting = [await client.execute_command("ZCARD", keys.delayed("orders", n)) for n in range(NEW)]
    assert (sum(total), sum(waiting)) == (2, 2)
    assert await client.execute_command("EXISTS", stream, delayed) == 0


async def test_a_stray_with_an_empty_key_goes_where_that_key_belongs(
    client: Client, keys: Keys, mover: StrayMover
) -> None:
    """An empty key is a key, as for its publisher: its messages keep their order."""
    empty = partition_for("", NEW)
    other = next(str(n) for n in range(100) if partition_for(str(n), NEW) != empty)
    await client.execute_command("XADD", keys.stream("orders", 5), "*", "data", "x", "id", other, "key", "")
    assert await mover.look() == 1
    assert await stored(client, keys, empty) == [b"x"]
