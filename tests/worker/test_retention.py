"""Retention: settled entries are trimmed by the topic's limits; dead consumers with nothing pending are deleted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.streams import ensure_groups, start_id, trim
from rsmq.redis.topics import Topic, Topics, cached_topic
from rsmq.worker.retention import Retention
from tests.patience import until
from tests.servers import Server
from tests.worker.orders import GROUP, Orders


@dataclass
class Consumer:
    """What retention looks at in a running consumer."""

    topic: Topic
    lanes: dict[int, Any]
    live: tuple[str, ...] = ("me",)
    handler: Any = field(default_factory=lambda: SimpleNamespace(group=GROUP))

    @property
    def membership(self) -> Any:
        return SimpleNamespace(live=self.live)

    async def follow(self, found: Topic) -> None:
        """The topic has changed."""
        self.topic = found


class ServedOrders(Orders):
    """The topic and the consumers of one process that serve it."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        super().__init__(client, keys, settings)
        self.consumers: list[Any] = []

    def retention(self, lease_ttl: timedelta | None = None) -> Retention:
        settings = replace(self.settings, **({"lease_ttl": lease_ttl} if lease_ttl else {}))
        return Retention(self.client, self.keys, settings, self.topics, self.consumers)


@pytest.fixture
async def orders(client: Client, keys: Keys, settings: Settings) -> ServedOrders:
    """No topic yet."""
    return ServedOrders(client, keys, settings)


async def test_retention_round_trims_settled_entries_of_its_own_partitions(orders: ServedOrders) -> None:
    """Entries of other partitions and unsettled entries stay; a new group keeps everything at once."""
    topic = await orders.make(retention_length=0)
    for partition in (0, 1):
        await orders.fill(partition, 300, read=250, settle=210)
    orders.consumers.append(Consumer(topic, {0: None}))
    retention = orders.retention()
    assert await retention.tidy() >= 200
    assert await orders.length(0) in range(90, 101)
    assert await orders.length(1) == 300
    assert await retention.tidy() == 0
    await ensure_groups(orders.client, orders.keys, topic, "audit")
    orders.consumers.append(Consumer(topic, {1: None}))
    assert await retention.tidy() == 0
    assert await orders.length(1) == 300


async def test_retention_with_default_limits_keeps_settled_entries(orders: ServedOrders) -> None:
    """The default limits keep a day or 100 000 entries for a replay."""
    topic = await orders.make()
    await orders.fill(0, 300, read=300, settle=300)
    orders.consumers.append(Consumer(topic, {0: None}))
    assert await orders.retention().tidy() == 0
    assert await orders.length(0) == 300


async def test_retention_age_changed_later_applies_to_older_entries(orders: ServedOrders) -> None:
    """A shorter age removes entries that were added before it was set."""
    topic = await orders.make()
    for number in range(200):
        await orders.client.execute_command("XADD", orders.keys.stream("orders", 0), f"{number + 1}-0", "data", "old")
    await orders.client.execute_command("XGROUP", "SETID", orders.keys.stream("orders", 0), GROUP, "$")
    orders.consumers.append(Consumer(topic, {0: None}))
    await orders.topics.change("orders", retention_age=timedelta(days=365_000 // 10))
    assert await orders.retention().tidy() == 0
    changed = await orders.topics.change("orders", retention_age=timedelta(hours=1))
    assert await orders.retention().tidy() >= 100
    assert [each.topic for each in orders.consumers] == [changed]


async def test_dead_consumers_without_pending_messages_are_deleted(orders: ServedOrders) -> None:
    """Live consumers stay, idle or not; so do those with pending messages and those that were active within a lease."""
    topic = await orders.make()
    await orders.fill(0, 1, read=1, settle=0, consumer="owes")
    stream = orders.keys.stream("orders", 0)
    for consumer in ("me", "dead"):
        await orders.client.execute_command("XGROUP", "CREATECONSUMER", stream, GROUP, consumer)
    assert await orders.retention().remove_dead("orders", 0, GROUP, ("me",)) == []
    retention, removed = orders.retention(lease_ttl=timedelta(seconds=1)), list[str]()

    async def has_removed_some() -> bool:
        removed.extend(await retention.remove_dead("orders", 0, GROUP, ("me",)))
        return bool(removed)

    await until(has_removed_some, "a dead consumer is removed")
    assert removed == ["dead"]
    orders.consumers.append(Consumer(topic, {0: None}, live=("me", "owes")))
    await retention.tidy()
    rows = await orders.client.execute_command("XINFO", "CONSUMERS", stream, GROUP)
    assert sorted(row[1] for row in rows) == [b"me", b"owes"]


async def test_retention_round_trims_more_than_one_call_can(orders: ServedOrders) -> None:
    """The server trims at most 10 000 entries a call; a round repeats the call until the floor is reached."""
    topic = await orders.make(retention_length=0, retention_age=timedelta(0))
    stream = orders.keys.stream("orders", 0)
    await orders.client.pipelined([("XADD", stream, "*", "data", "x")] * 25_000)
    await orders.client.execute_command("XGROUP", "SETID", stream, GROUP, "$")
    assert await orders.retention().trim(topic, 0) >= 24_900


async def test_retention_of_missing_streams_trims_nothing(orders: ServedOrders, client: Client, keys: Keys) -> None:
    """After FLUSHALL a round does nothing until the groups exist again."""
    topic = await orders.make()
    orders.consumers.append(Consumer(topic, {0: None, 1: None}))
    await client.execute_command("DEL", keys.stream("orders", 0), keys.stream("orders", 1))
    assert await orders.retention().tidy() == 0


async def test_required_archive_set_meanwhile_stops_the_next_round(orders: ServedOrders) -> None:
    """The round reads the topic again, so a setting changed by another process applies at once."""
    topic = await orders.make(retention_length=0)
    await orders.fill(0, 300, read=300, settle=300)
    orders.consumers.append(Consumer(topic, {0: None}))
    retention = orders.retention()
    assert cached_topic(orders.topics, "orders") is not None
    other = Topics(orders.client, orders.keys, orders.settings)
    await other.change("orders", archive="required")
    assert await retention.tidy() == 0
    await other.change("orders", archive="off")
    assert await retention.tidy() >= 200


async def test_too_many_parked_messages_are_logged_with_their_group(
    orders: ServedOrders, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the group that keeps the partition from being trimmed."""
    topic = await orders.make(retention_length=0)
    (entry,) = await orders.fill(0, 1, read=1, settle=1)
    pairs = [part for number in range(5001) for part in (number, b"%s|%d" % (entry, number))]
    await orders.client.execute_command("ZADD", orders.keys.retry("orders", 0, GROUP), *pairs)
    assert await orders.retention().trim(topic, 0) == 0
    assert "group billing wait for a retry" in caplog.text


async def test_retention_during_an_outage_waits_and_goes_on(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    """The server dies and comes back: the role continues after one warning."""
    with Server(aof=True) as server:
        settings = Settings(
            url=server.url,
            retention_interval=timedelta(milliseconds=20),
            unavailable_timeout=timedelta(milliseconds=50),
        )
        async with Connector(server.url, settings).connected() as client, anyio.create_task_group() as tasks:
            orders = ServedOrders(client, keys, settings)
            orders.consumers.append(Consumer(await orders.make(retention_length=0), {0: None}))
            tasks.start_soon(orders.retention().run)
            await asyncio.to_thread(server.kill)
            await until(lambda: caplog.records, "the outage is logged")
            await asyncio.to_thread(server.start)
            await orders.fill(0, 300, read=300, settle=300)
            await until(partial(is_trimmed, orders), "the settled entries are trimmed")
            tasks.cancel_scope.cancel()
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_partition_that_cannot_be_trimmed_leaves_the_others_to_the_round(
    orders: ServedOrders, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged once; the others are trimmed, and the role goes on."""
    topic = await orders.make(retention_length=0)
    await orders.fill(1, 300, read=300, settle=300)
    orders.consumers.append(Consumer(topic, {0: None, 1: None}))
    for name in (orders.keys.stream("orders", 0), orders.keys.removed("orders", 0)):
        await orders.client.execute_command("SET", name, "another client's")
    retention = orders.retention()
    assert await retention.tidy() >= 200
    assert await retention.tidy() == 0
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [each.partition(" ")[0] for each in errors] == ["orders.0", "orders.0/billing"]


async def test_room_is_made_beside_a_group_that_starts_at_a_time(orders: ServedOrders) -> None:
    """As for a full topic. The group has read nothing yet; what lies before its start is not needed."""
    topic, stream = await orders.make(), orders.keys.stream("orders", 0)
    await orders.client.pipelined([("XADD", stream, f"{ms}-0", "data", "x") for ms in range(1, 101)])
    await orders.client.execute_command("XGROUP", "SETID", stream, GROUP, "$")
    await ensure_groups(orders.client, orders.keys, topic, "late", start_id(from_epoch_ms(51)))
    trimmed = await trim(orders.client, orders.keys, "orders", 0, keep_age_ms=0, keep_length=0, exact=True)
    assert (trimmed.word, trimmed.removed) == (b"OK", 50)


async def is_trimmed(orders: ServedOrders) -> bool:
    """At most the 100 entries of one node of the stream are left."""
    return await orders.length(0) <= 100


async def test_round_forgets_notes_and_names_behind_many_that_stay(orders: ServedOrders) -> None:
    """More than one page of notes on messages that are there do not hide those of messages that are gone."""
    topic = await orders.make(retention_length=100_000)
    await orders.fill(0, 1, read=1, settle=0)
    keys, call = orders.keys, orders.client.execute_command
    kept = [part for n in range(15_000) for part in (f"9{n:012d}-0", "asked")]
    gone = [part for n in range(15_000) for part in (f"{n + 1}-0", "1 1 old")]
    for at in range(0, len(kept), 5000):
        await call("HSET", keys.cancels("orders", 0, GROUP), *kept[at : at + 5000], *gone[at : at + 5000])
        await call("HSET", keys.errors("orders", 0, GROUP), *kept[at : at + 5000], *gone[at : at + 5000])
    names = [part for n in range(5000) for part in (f"n{n}", pack_record(["settled", "id", f"{n + 1}-0", ""]))]
    await call("HSET", keys.unique("orders", 0), *names)
    orders.consumers.append(Consumer(topic, {0: None}))
    await orders.retention().tidy()
    assert await call("HLEN", keys.cancels("orders", 0, GROUP)) == 15_000
    assert await call("HLEN", keys.errors("orders", 0, GROUP)) == 15_000
    assert await call("HLEN", keys.unique("orders", 0)) == 0


def pack_record(values: list[str]) -> bytes:
    """Short texts as an array of MessagePack, as `publish_unique.lua` writes the record of a name."""
    return bytes([0x90 + len(values)]) + b"".join(bytes([0xA0 + len(value)]) + value.encode() for value in values)
