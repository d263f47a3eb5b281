"""Topics: created once however many ask, changed within limits, deleted with everything that belongs to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import anyio
import pytest

from rsmq import Broker
from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.streams import ensure_groups
from rsmq.redis.topics import Topic, Topics, cached_topic, lookup_topic, note_batches
from tests.servers import Server


@pytest.fixture
def topics(client: Client, keys: Keys, settings: Settings) -> Topics:
    """The topics of this test."""
    return Topics(client, keys, settings)


async def test_first_use_creates_it_with_the_defaults(topics: Topics, settings: Settings) -> None:
    """A topic that is created on first use has the partitions and limits of the settings, and is listed."""
    topic = await topics.ensure("orders")
    assert (topic.partitions, topic.max_length, topic.on_full) == (8, 0, "reject")
    assert (topic.retention_age, topic.retention_length) == (settings.retention_age, settings.retention_length)
    assert topic.created_ms > 0
    assert await topics.names() == ["orders"]
    assert await topics.find("orders") == topic


async def test_creating_at_the_same_time_gives_one_topic(client: Client, keys: Keys, settings: Settings) -> None:
    """Twenty clients that race with different numbers of partitions all end up with the same topic."""
    found: list[Topic] = []

    async def create(number: int) -> None:
        mine = Topics(client, keys, replace(settings, partitions=number, max_length=number))
        found.append(await mine.ensure("orders"))

    async with anyio.create_task_group() as tasks:
        for number in range(1, 21):
            tasks.start_soon(create, number)
    assert len(found) == 20
    assert len(set(found)) == 1


async def test_another_number_of_partitions_is_refused(topics: Topics) -> None:
    """The number of partitions never changes: the error says which one to use."""
    await topics.ensure("orders", 4)
    assert (await topics.ensure("orders", 4)).partitions == 4
    with pytest.raises(ConfigError, match=r"has 4 partitions, not 5.*leave `partitions` out, say 4"):
        await topics.ensure("orders", 5)


@pytest.mark.parametrize("partitions", [0, -1, 1025])
async def test_an_impossible_number_of_partitions_is_refused(topics: Topics, partitions: int) -> None:
    """Nothing is created for a number outside 1 to 1024."""
    with pytest.raises(ConfigError, match="use 1 to 1024"):
        await topics.ensure("orders", partitions)
    assert await topics.find("orders") is None


@pytest.mark.parametrize("name", ["", ".hidden", "a b", "a}b", "x" * 129, "ü"])
async def test_a_name_that_could_break_a_key_is_refused(topics: Topics, name: str) -> None:
    """Names are checked before anything is asked or written."""
    with pytest.raises(ConfigError, match="topic name"):
        await topics.ensure(name)


async def test_a_half_written_topic_does_not_exist(topics: Topics, client: Client, keys: Keys) -> None:
    """A creator that died before the last field left nothing behind that counts; the next one completes it."""
    await client.execute_command("HSET", keys.topic("orders"), "max_length", 7)
    assert await topics.find("orders") is None
    assert (await topics.ensure("orders")).max_length == 7


async def test_change_sets_limits_and_nothing_else(topics: Topics) -> None:
    """Limits are changed one by one; the rest stays."""
    before = await topics.ensure("orders", 2)
    after = await topics.change("orders", max_length=10, on_full="trim", retention_age=timedelta(hours=1))
    assert (after.max_length, after.on_full, after.retention_age) == (10, "trim", timedelta(hours=1))
    assert (after.partitions, after.retention_length) == (2, before.retention_length)


@pytest.mark.parametrize(
    "limits",
    [
        {"partitions": 3},
        {"max_length": -1},
        {"on_full": "explode"},
        {"retention_age": 5},
        {"retention_length": "9"},
        {"archive": "maybe"},
    ],
)
async def test_change_refuses_what_no_topic_has(topics: Topics, limits: dict[str, Any]) -> None:
    """A wrong limit changes nothing and says what is possible."""
    before = await topics.ensure("orders")
    with pytest.raises(ConfigError, match=r"a topic cannot have|retention_age=5 is not a duration"):
        await topics.change("orders", **limits)
    assert await topics.find("orders") == before


async def test_changing_or_deleting_an_unknown_topic_is_refused(topics: Topics) -> None:
    """A typo does not create a topic."""
    with pytest.raises(ConfigError, match="there is no topic"):
        await topics.change("oders", max_length=1)
    with pytest.raises(ConfigError, match="there is no topic"):
        await topics.delete("oders")
    assert await topics.names() == []


async def test_lookup_asks_once(topics: Topics, client: Client, keys: Keys) -> None:
    """Publishing does not ask the server for a topic it has just seen."""
    assert cached_topic(topics, "orders") is None
    topic = await lookup_topic(topics, "orders")
    await client.execute_command("DEL", keys.topic("orders"))
    assert cached_topic(topics, "orders") is topic
    assert await lookup_topic(topics, "orders") is topic


async def test_lookups_return_in_the_order_of_the_calls(topics: Topics) -> None:
    """Also those that come while others are woken, and where some are cancelled meanwhile."""
    called, returned, chance = list[int](), list[int](), Random(1)

    async def look_up(number: int) -> None:
        for _ in range(chance.randrange(60)):
            await asyncio.sleep(0)
        called.append(number)
        await lookup_topic(topics, f"orders{number % 3}")
        returned.append(number)

    async with anyio.create_task_group() as callers:
        cancelled = [asyncio.create_task(look_up(number)) for number in range(1000)]
        for _ in range(40):
            await asyncio.sleep(0)
        for task in chance.sample(cancelled, 100):
            task.cancel()
        callers.start_soon(partial(asyncio.wait, cancelled))
    assert len(returned) >= 900
    for rest in range(3):
        mine = {number for number in returned if number % 3 == rest}
        assert [number for number in called if number in mine] == [number for number in returned if number in mine]
    assert all(cached_topic(topics, f"orders{rest}") for rest in range(3)), "no caller waits any more"


async def test_many_publishers_of_a_new_topic_share_their_writes(settings: Settings) -> None:
    """A publisher that comes back does not wait again behind those that were never served."""
    with Server() as own:
        async with Broker(replace(settings, url=own.url)) as broker:

            async def publish() -> None:
                for number in range(20):
                    await broker.publish("orders", number, key=f"k{number}")

            async with anyio.create_task_group() as publishers:
                for _ in range(1000):
                    publishers.start_soon(publish)
            stats = (await broker.client.execute_command("INFO", "commandstats")).decode()
    writes = int(stats.partition("cmdstat_exec:calls=")[2].partition(",")[0])
    assert writes < 1_000, "20 000 messages: each write has more than twenty"


async def test_a_publisher_reads_a_topic_that_was_resized_once(settings: Settings) -> None:
    """The server refuses what is on its way to each of eight partitions, and one look says where all of it goes."""
    with Server() as own:
        async with Broker(replace(settings, url=own.url)) as broker, Broker(replace(settings, url=own.url)) as other:
            await broker.publish("orders", 0, key="k0")
            await other.topics.resize("orders", 16)
            await other.client.execute_command("CONFIG", "RESETSTAT")
            async with anyio.create_task_group() as publishers:
                for number in range(100):
                    publishers.start_soon(partial(broker.publish, "orders", number, key=f"k{number}"))
            stats = (await other.client.execute_command("INFO", "commandstats")).decode()
            lengths = [await other.client.execute_command("XLEN", other.keys.stream("orders", n)) for n in range(24)]
    assert stats.partition("cmdstat_hgetall:calls=")[2].partition(",")[0] == "1"
    assert (sum(lengths[:8]), sum(lengths[8:])) == (1, 100)


async def test_an_unavailable_server_is_waited_for_together(settings: Settings) -> None:
    """Each caller gives up when its own time is over, not when all before it have given up one after the other."""
    nowhere = replace(settings, url="redis://127.0.0.1:1", unavailable_timeout=timedelta(seconds=0.5))
    client = Connector("redis://127.0.0.1:1", nowhere).client()
    topics, waited = Topics(client, Keys("t"), nowhere), list[float]()

    async def look_up() -> None:
        began = monotonic()
        with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
            await lookup_topic(topics, "orders")
        waited.append(monotonic() - began)

    await look_up()
    async with anyio.create_task_group() as callers:
        for _ in range(30):
            callers.start_soon(look_up)
    await client.aclose()
    assert max(waited) < 6 * waited[0], "30 would take 30 times as long, one after the other"


async def test_what_the_server_has_lost_is_made_as_it_was(topics: Topics, client: Client, keys: Keys) -> None:
    """After a failover or FLUSHALL: another number of partitions would end its workers, and part its keys."""
    await topics.ensure("orders", 3)
    await client.execute_command("DEL", keys.topic("orders"))
    assert (await topics.ensure("orders")).partitions == 3
    await topics.delete("orders")
    assert (await topics.ensure("orders")).partitions == 8, "who deletes it here begins anew"


async def test_a_look_at_a_topic_does_not_forget_what_the_server_has_lost(
    topics: Topics, client: Client, keys: Keys
) -> None:
    """A failover has lost that the topic has grown. `find` returns what is there; the next publisher writes the
    layout again, and stores nothing in a partition that was sealed."""
    await topics.ensure("orders", 2)
    before = await client.execute_command("HGETALL", keys.topic("orders"))
    grown = await topics.resize("orders", 4)
    await client.pipelined([("DEL", keys.topic("orders")), ("HSET", keys.topic("orders"), *before)])
    found = await topics.find("orders")
    assert found is not None
    assert found.partitions == 2
    assert cached_topic(topics, "orders") is None
    assert (await lookup_topic(topics, "orders")).layout == grown.layout
    assert (await Topics(client, keys, topics._settings).existing("orders")).layout == grown.layout


@pytest.mark.parametrize("is_sync", [False, True])
async def test_whoever_publishes_first_makes_it_as_its_handler_says(
    settings: Settings, client: Client, keys: Keys, is_sync: bool
) -> None:
    """A service that publishes before any worker has started does not shut its workers out."""
    broker = Broker(settings)

    @broker.handler("orders", group="g", partitions=3)
    async def handle(order: dict[str, int]) -> None:
        """Never called: no worker runs."""

    if is_sync:
        await anyio.to_thread.run_sync(broker.publish_sync, "orders", {"n": 1})
        broker._portal.close()
    else:
        async with broker:
            await broker.publish("orders", {"n": 1})
            await broker.publish("others", {"n": 1})
    assert await client.execute_command("HGET", keys.topic("orders"), "partitions") == b"3"


async def test_delete_removes_every_key_of_the_topic_and_no_other(
    topics: Topics, client: Client, keys: Keys, prefix: str
) -> None:
    """Streams, groups, members, leases, retries, dead letters, delayed and dedup keys go; a neighbour's stay."""
    for name in ("orders", "orders2"):
        topic = await topics.ensure(name, 2)
        await ensure_groups(client, keys, topic, "billing")
        await client.execute_command("SADD", keys.members(name, "billing"), "m1")
        for key in (keys.alive(name, "billing", "m1"), keys.dedup(name, 1, "a"), keys.dedup(name, 0, "b*[?")):
            await client.execute_command("SET", key, "x")
        for key in (keys.group(name, "billing"), keys.lease(name, 0, "billing")):
            await client.execute_command("HSET", key, "a", "b")
        for key in (keys.retry(name, 1, "billing"), keys.delayed(name, 1), keys.marks(name, 0)):
            await client.execute_command("ZADD", key, 1, "x")
        await client.execute_command("XADD", keys.dlq(name, 0, "billing"), "*", "data", "x")
    await topics.delete("orders")
    left = {key.decode() for key in await client.execute_command("KEYS", f"{prefix}:*")}
    assert not [key for key in left if "{orders}" in key or "{orders." in key]
    assert len([key for key in left if "{orders2" in key]) == 13
    assert await topics.names() == ["orders2"]
    assert cached_topic(topics, "orders") is None


async def test_an_archive_and_trimming_when_full_exclude_each_other(topics: Topics) -> None:
    """Whichever comes second is refused: a full topic would drop in silence what no archive has."""
    await topics.ensure("orders")
    assert (await topics.change("orders", archive="required")).archive == "required"
    with pytest.raises(ConfigError, match=r"cannot have on_full=trim and archive=required.*use on_full=reject"):
        await topics.change("orders", on_full="trim")
    await topics.change("orders", archive="off", on_full="trim")
    with pytest.raises(ConfigError, match="cannot have on_full=trim and archive=required"):
        await topics.change("orders", archive="required")
    assert (await topics.find("orders")).archive == "off"  # type: ignore[union-attr]
    await topics.change("orders", archive="required", on_full="reject")


async def test_without_an_archive_its_places_are_forgotten(topics: Topics, client: Client, keys: Keys) -> None:
    """An archive that has stopped for good does not come back with the next `required`; deleting forgets it, too."""
    await topics.ensure("orders", 2)
    for forget in (lambda: topics.change("orders", archive="off"), lambda: topics.delete("orders")):
        for number in (0, 1):
            await client.execute_command("HSET", keys.archived("orders", number), "nightly", "1-0")
        await forget()
        assert await client.execute_command("EXISTS", keys.archived("orders", 0), keys.archived("orders", 1)) == 0


async def test_marks_of_batches_go_along_and_those_of_single_messages_stay(
    topics: Topics, client: Client, keys: Keys
) -> None:
    """A group may have cancelled a million messages: their marks are read in pages, and only those of batches are
    copied."""
    await topics.ensure("orders", 2)
    await ensure_groups(client, keys, await topics.existing("orders"), "billing")
    await note_batches(topics, "orders")
    parent = keys.cancels("orders", 0, "billing")
    singles = {f"{number}-0": "cancelled" for number in range(3000)}
    await client.execute_command("HSET", parent, *[part for pair in singles.items() for part in pair])
    await client.execute_command("HSET", parent, "batch|3.abc", "5")
    layout = (await topics.resize("orders", 4)).layout
    assert len(layout.descendants_of(0)) == 2
    for number in layout.descendants_of(0):
        assert await client.execute_command("HGETALL", keys.cancels("orders", number, "billing")) == [
            b"batch|3.abc",
            b"5",
        ]
    for number in layout.descendants_of(1):
        assert await client.execute_command("HLEN", keys.cancels("orders", number, "billing")) == 0
