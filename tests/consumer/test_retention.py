"""Retention: settled entries go by the topic's limits, dead consumers go when they owe nothing, reasons are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rsmq.connect import Client, Connector
from rsmq.consumer.retention import Hold, Reason, Retention, reasons, why_not_trimmed
from rsmq.keys import Keys
from rsmq.settings import Settings
from rsmq.stream import ensure_groups
from rsmq.topic import Topic, Topics
from tests.patience import until
from tests.servers import Server

GROUP = "billing"


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


class Place:
    """A topic of two partitions with one group."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self.client, self.keys, self.settings = client, keys, settings
        self.topics = Topics(client, keys, settings)
        self.consumers: list[Any] = []

    async def make(self, **limits: Any) -> Topic:
        topic = await self.topics.ensure("orders", 2)
        await ensure_groups(self.client, self.keys, topic, GROUP)
        return await self.topics.change("orders", **limits)

    def retention(self) -> Retention:
        return Retention(self.client, self.keys, self.settings, self.topics, lambda: self.consumers)

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


@pytest.fixture
async def place(client: Client, keys: Keys, settings: Settings) -> Place:
    """No topic yet."""
    return Place(client, keys, settings)


async def test_a_round_trims_what_the_topic_does_not_keep(place: Place) -> None:
    """Only in partitions of this process, only what is settled; a new group is respected at once."""
    topic = await place.make(retention_length=0)
    for partition in (0, 1):
        await place.fill(partition, 300, read=250, settle=210)
    place.consumers.append(Consumer(topic, {0: None}))
    retention = place.retention()
    assert await retention.tidy() >= 200
    assert await place.length(0) in range(90, 101)
    assert await place.length(1) == 300
    assert await retention.tidy() == 0
    await ensure_groups(place.client, place.keys, topic, "audit")
    place.consumers.append(Consumer(topic, {1: None}))
    assert await retention.tidy() == 0
    assert await place.length(1) == 300


async def test_by_default_settled_entries_stay(place: Place) -> None:
    """A day or 100 000 entries are kept for a replay."""
    topic = await place.make()
    await place.fill(0, 300, read=300, settle=300)
    place.consumers.append(Consumer(topic, {0: None}))
    assert await place.retention().tidy() == 0
    assert await place.length(0) == 300


async def test_the_topics_limits_are_followed(place: Place) -> None:
    """A shorter age, set later, counts for what is there already."""
    topic = await place.make()
    for number in range(200):
        await place.client.execute_command("XADD", place.keys.stream("orders", 0), f"{number + 1}-0", "data", "old")
    await place.client.execute_command("XGROUP", "SETID", place.keys.stream("orders", 0), GROUP, "$")
    place.consumers.append(Consumer(topic, {0: None}))
    await place.topics.change("orders", retention_age=timedelta(days=365_000 // 10))
    assert await place.retention().tidy() == 0
    await place.topics.change("orders", retention_age=timedelta(hours=1))
    assert await place.retention().tidy() >= 100


async def test_dead_consumers_go_when_they_owe_nothing(place: Place) -> None:
    """Live ones stay, idle or not; so do those with something pending and those that were here a moment ago."""
    topic = await place.make()
    await place.fill(0, 1, read=1, settle=0, consumer="owes")
    for consumer in ("me", "dead"):
        await place.client.execute_command("XGROUP", "CREATECONSUMER", place.keys.stream("orders", 0), GROUP, consumer)
    assert await place.retention().remove_dead("orders", 0, GROUP, ("me",)) == []
    impatient = place.settings.model_copy(update={"lease_ttl": timedelta(milliseconds=1)})
    retention = Retention(place.client, place.keys, impatient, place.topics, lambda: place.consumers)
    with anyio.fail_after(30):
        while not (removed := await retention.remove_dead("orders", 0, GROUP, ("me",))):
            await anyio.sleep(0.002)
    assert removed == ["dead"]
    place.consumers.append(Consumer(topic, {0: None}, live=("me", "owes")))
    await retention.tidy()
    rows = await place.client.execute_command("XINFO", "CONSUMERS", place.keys.stream("orders", 0), GROUP)
    assert sorted(row[1] for row in rows) == [b"me", b"owes"]


async def test_a_round_keeps_up_with_any_rate(place: Place) -> None:
    """One call of the server trims 10 000 entries at most: a round goes on until all is gone that may go."""
    topic = await place.make(retention_length=0, retention_age=timedelta(0))
    stream = place.keys.stream("orders", 0)
    await place.client.pipelined([("XADD", stream, "*", "data", "x")] * 25_000)
    await place.client.execute_command("XGROUP", "SETID", stream, GROUP, "$")
    assert await place.retention().trim(topic, 0) >= 24_900


async def test_what_does_not_exist_is_no_error(place: Place, client: Client, keys: Keys) -> None:
    """After FLUSHALL there is nothing to trim until the groups are back."""
    topic = await place.make()
    place.consumers.append(Consumer(topic, {0: None, 1: None}))
    await client.execute_command("DEL", keys.stream("orders", 0), keys.stream("orders", 1))
    assert await place.retention().tidy() == 0


async def test_it_tells_why_something_is_kept(place: Place) -> None:
    """Per group: what is pending, parked and not delivered, each with its oldest id."""
    topic = await place.make()
    ids = await place.fill(0, 5, read=4, settle=2)
    for entry in (ids[1], ids[0]):
        await place.client.execute_command("ZADD", place.keys.retry("orders", 0, GROUP), 1, entry + b"|2")
    await ensure_groups(place.client, place.keys, topic, "audit", "$")
    audit, billing = await why_not_trimmed(place.client, place.keys, "orders", 0)
    names = [entry.decode() for entry in ids]
    assert billing == Hold(GROUP, 2, names[2], 2, names[0], names[4])
    assert str(billing) == (
        f"billing: 2 pending, the oldest is {names[2]}; 2 waiting for a retry, the oldest is {names[0]}; "
        f"not delivered from {names[4]} on"
    )
    assert (audit.is_holding, str(audit)) == (False, "audit: has settled everything")
    assert await why_not_trimmed(place.client, place.keys, "nothing", 0) == []


async def test_a_required_archive_counts_at_once(place: Place) -> None:
    """Said while a worker runs, it holds the very next round, which knew the topic without it."""
    topic = await place.make(retention_length=0)
    await place.fill(0, 300, read=300, settle=300)
    place.consumers.append(Consumer(topic, {0: None}))
    retention = place.retention()
    assert place.topics.cached("orders") is not None
    other = Topics(place.client, place.keys, place.settings)
    await other.change("orders", archive="required")
    assert await retention.tidy() == 0
    await other.change("orders", archive="off")
    assert await retention.tidy() >= 200


async def test_reasons_name_whoever_keeps_something(place: Place) -> None:
    """Groups, archives and the topic's limits, the one that holds retention back first; nothing of what is empty."""
    topic = await place.make(archive="required", retention_length=5)
    ids = [entry.decode() for entry in await place.fill(0, 5, read=5, settle=3)]
    archived = place.keys.archived("orders", 0)

    async def told() -> list[Reason]:
        return await reasons(place.client, place.keys, topic, 0)

    group = Reason(f"group {GROUP}", ids[3], f"2 pending, the oldest is {ids[3]}")
    nothing = Reason("archive", ids[0], "required, and none has committed anything of this partition")
    assert await told() == [nothing, group]
    await place.client.execute_command("HSET", archived, "nightly", ids[0], "done", ids[4])
    assert await told() == [
        Reason("retention", ids[0], "settled by all: kept for a replay until 1 day, 0:00:00 old, or until 5 newer ones "
               "are settled", is_limit=True),
        Reason("archive nightly", ids[1], f"has committed up to {ids[0]}"),
        group,
    ]  # fmt: skip
    assert await reasons(place.client, place.keys, topic, 1) == []


async def test_without_a_group_everything_is_kept(place: Place) -> None:
    """And the reason is that none has said that it does not need it."""
    topic = await place.topics.ensure("orders", 1)
    await place.client.execute_command("XADD", place.keys.stream("orders", 0), "1-0", "data", "x")
    (reason,) = await reasons(place.client, place.keys, topic, 0)
    assert (reason.oldest, reason.is_limit) == ("1-0", True)
    assert "no group yet" in reason.why


async def test_too_many_parked_are_said(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The operator learns which group holds everything."""
    topic = await place.make(retention_length=0)
    (entry,) = await place.fill(0, 1, read=1, settle=1)
    pairs = [part for number in range(5001) for part in (number, b"%s|%d" % (entry, number))]
    await place.client.execute_command("ZADD", place.keys.retry("orders", 0, GROUP), *pairs)
    assert await place.retention().trim(topic, 0) == 0
    assert "group billing wait for a retry" in caplog.text


async def test_an_outage_is_waited_out(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    """The server dies and comes back: the role goes on, with one line in the log."""
    with Server(aof=True) as server:
        settings = Settings(
            url=server.url,
            retention_interval=timedelta(milliseconds=20),
            unavailable_timeout=timedelta(milliseconds=50),
        )
        async with Connector(server.url, settings).connected() as client, anyio.create_task_group() as tasks:
            place = Place(client, keys, settings)
            place.consumers.append(Consumer(await place.make(retention_length=0), {0: None}))
            tasks.start_soon(place.retention().run)
            await asyncio.to_thread(server.kill)
            await until(lambda: caplog.records, "the outage is logged")
            await asyncio.to_thread(server.start)
            await place.fill(0, 300, read=300, settle=300)
            with anyio.fail_after(30):
                while await place.length(0) > 100:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
