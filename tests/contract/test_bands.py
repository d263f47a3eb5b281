"""Bands: what is urgent does not wait behind anybody's backlog, also while bands are added and servers forget them."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rsmq import Broker, ConfigError, Message, Reject
from rsmq.broker.typed_topic import TypedTopic
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.model.layout import WITH_BANDS
from rsmq.redis.client.connector import Connector
from rsmq.redis.streams import reset_group
from tests.contract.witness import Witness, ask, cut_connections, lose_all, settled
from tests.matrix.way import one_server, steady_connections
from tests.patience import until

pytestmark = steady_connections

Make = Callable[..., Broker]
BANDS = ("urgent", "normal", "bulk")


class Work:
    """A handler of the topic `sms`. Those of `bulk` wait for `gate`."""

    def __init__(self, broker: Broker, *, bands: tuple[str, ...] = BANDS, **options: Any) -> None:
        self.gate = anyio.Event()
        self.started = list[str]()
        self.sms: TypedTopic[str] = broker.topic("sms", str, bands=bands)
        self.sms.handler(group="g", **options)(self.handle)

    async def handle(self, text: str) -> None:
        self.started.append(text)
        if text.startswith("bulk"):
            await self.gate.wait()

    async def fill(self, number: int) -> None:
        await self.sms.publish_many([f"bulk {at}" for at in range(number)], band="bulk")


async def open_block(broker: Broker, band: str) -> range:
    """The partitions of a band, as soon as they are open."""
    found = list[range]()

    async def is_open() -> bool:
        topic = await broker.topics.find("sms")
        block = None if topic is None else topic.layout.block_of(band)
        found[:] = [] if block is None else [block.numbers]
        return block is not None and block.state == "open"

    await until(is_open, f"{band} is open")
    return found[0]


async def test_a_reserved_slot_starts_an_urgent_message_while_all_others_are_busy(make_broker: Make) -> None:
    """The backlog fills the memory of its band, and every slot but the reserved one: the urgent one starts at once."""
    broker = make_broker(partitions=2, prefetch=6)
    work = Work(broker, concurrency=4, reserve={"urgent": 1})
    async with broker, broker.running():
        await work.fill(60)
        await until(lambda: len(work.started) == 3, "bulk has its slots")
        for number in range(20):
            await work.sms.publish(f"urgent {number}", band="urgent", key=f"k{number % 3}")
        await until(lambda: len(work.started) == 23, "all urgent ones have started")
        assert [each for each in work.started[:3] if each.startswith("bulk")] == work.started[:3]
        await work.sms.publish("normal")
        work.gate.set()
        await until(lambda: len(work.started) == 81, "everything is handled")
        assert work.started.index("normal") < 30, "normal comes before the rest of bulk"
        await settled(broker, "sms")


async def test_strict_starts_the_highest_band_first(make_broker: Make) -> None:
    """One slot: the next start is of the highest band that has something."""
    broker = make_broker(partitions=1)
    work = Work(broker, concurrency=1)
    async with broker, broker.running():
        await work.fill(3)
        await until(lambda: work.started == ["bulk 0"], "the first one of bulk runs")
        await work.sms.publish("normal")
        await work.sms.publish("urgent", band="urgent")
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        await until(lambda: consumer.queue.in_flight == 5, "all are read")
        work.gate.set()
        await until(lambda: len(work.started) == 5, "all are handled")
        assert work.started == ["bulk 0", "urgent", "normal", "bulk 1", "bulk 2"]


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_bands_are_added_while_a_worker_runs_and_a_group_is_paused(make_broker: Make, distribution: str) -> None:
    """Every group is made in a band before it is open; until then its messages go to `normal`. Nothing is lost."""
    broker, late = make_broker(partitions=2), make_broker()
    work = Work(broker, bands=(), distribution=distribution)
    work.gate.set()
    async with broker, broker.running(), late:
        await work.sms.publish("before")
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("sms", 0), "other", "0")
        with pytest.raises(ConfigError, match="no band 'urgent'"):
            await work.sms.publish("x", band="urgent")
        await late.topics.set_bands("sms", BANDS)
        numbers = await open_block(late, "urgent")
        for number in numbers:
            groups = await ask(broker, "XINFO", "GROUPS", broker.keys.stream("sms", number))
            assert {row[1] for row in groups} == {b"g", b"other"}
        stored = await ask(broker, "HGET", broker.keys.group("sms", "g"), "distribution")
        assert stored.decode() == distribution + WITH_BANDS
        ref = await late.publish("sms", "after", band="urgent")
        assert ref.partition_number in numbers
        await until(lambda: sorted(work.started) == ["after", "before"], "both are handled")
        while (found := await late.look(ref, topic="sms")).groups[0].state in ("ready", "running"):
            await anyio.sleep(0.01)
        assert [(each.group, each.state) for each in found.groups] == [("g", "settled"), ("other", "unread")]


async def test_a_band_stays_closed_while_a_live_member_does_not_know_it(make_broker: Make) -> None:
    """Such a member would own its partitions and not read them. Its name is the error; till then it is normal."""
    broker = make_broker(partitions=1)
    work = Work(broker, bands=())
    async with broker, broker.running():
        keys = broker.keys
        await ask(broker, "SET", keys.alive("sms", "g", "old"), json.dumps({"member": "old", "ordering": "key"}))
        await ask(broker, "SADD", keys.members("sms", "g"), "old")
        await broker.topics.set_bands("sms", BANDS)

        async def is_waited_for() -> bool:
            return await broker.topics.open_bands("sms") == ["g: old"]

        await until(is_waited_for, "only the old member does not know it")
        ref = await work.sms.publish("soon", band="urgent")
        assert ref.partition_number == 0
        await ask(broker, "DEL", keys.alive("sms", "g", "old"))
        numbers = await open_block(broker, "urgent")
        await broker.topics.find("sms")
        assert (await work.sms.publish("now", band="urgent")).partition_number in numbers
        await until(lambda: sorted(work.started) == ["now", "soon"], "both are handled")


async def test_a_member_that_knows_no_bands_and_comes_when_they_are_open_gets_no_partitions(make_broker: Make) -> None:
    """It has read the distribution of its group before, and is announced after: all partitions are read."""
    broker = make_broker(partitions=4)
    work = Work(broker)
    old = Heartbeat(Connector(str(broker.settings.url), broker.settings), broker.settings, broker.keys, "old")
    old.start(asyncio.get_running_loop())
    try:
        async with broker, broker.running():
            await open_block(broker, "urgent")
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            await until(lambda: len(consumer.lanes) == 12, "it has all partitions")
            await old.join("sms", "g", {"handler": "h", "ordering": "key"}, lambda: None)
            await until(lambda: "old" in consumer.membership.live, "it is seen")
            for number in range(3):
                done = len(work.started) + 20
                await work.sms.publish_many([f"{number}.{at}" for at in range(20)], band="urgent")
                await until(lambda: len(work.started) == done, "all are handled")  # noqa: B023
            assert len(consumer.lanes) == 12
            await old.leave("sms", "g")
    finally:
        await anyio.to_thread.run_sync(old.stop)


@pytest.mark.parametrize("loss", ["layout", "topic", "all"])
async def test_a_layout_that_the_server_has_lost_is_written_again(make_broker: Make, loss: str) -> None:
    """A member writes the layout that it knows, and who makes the topic again as well: what is in a band is found."""
    broker, other = make_broker(partitions=1, retention_interval="200ms"), make_broker(partitions=1)
    work = Work(broker)
    async with broker, broker.running(), other:
        before = await work.sms.publish("first", band="urgent")
        await until(lambda: work.started == ["first"], "it is handled")
        keys = broker.keys
        if loss == "layout":
            await ask(broker, "HDEL", keys.topic("sms"), "layout")
        elif loss == "topic":
            await ask(broker, "UNLINK", keys.topic("sms"))
        else:
            await lose_all(broker)
        await open_block(other, "urgent")
        after = await other.publish("sms", "second", band="urgent")
        assert after.partition_number == before.partition_number
        await until(lambda: work.started == ["first", "second"], "it is handled")


async def lose_bands(broker: Broker, publisher: Broker) -> None:
    """A failover: the layout of `sms` and the partition of its band are lost, and so is the connection."""
    await ask(broker, "HDEL", broker.keys.topic("sms"), "layout")
    await ask(broker, "DEL", broker.keys.stream("sms", 1))
    await cut_connections(publisher)


async def test_publisher_writes_a_lost_layout_again_before_it_publishes(make_broker: Make) -> None:
    """No worker runs that remembers it, and the next one declares no bands: what was published is read."""
    publisher, after = make_broker(partitions=1), make_broker()
    publisher.topic("sms", str, bands=("urgent", "normal"))
    async with publisher, after:
        assert (await publisher.publish("sms", "lost", band="urgent")).partition_number == 1
        await lose_bands(publisher, publisher)
        assert (await publisher.publish("sms", "found", band="urgent")).partition_number == 1
        assert (await after.topics.existing("sms")).layout.bands == ("urgent", "normal")
        work = Work(after, bands=())
        async with after.running():
            await until(lambda: work.started == ["found"], "it is handled")


async def test_publisher_stores_in_no_other_band_that_has_got_the_numbers_after_a_failover(make_broker: Make) -> None:
    """It has read the topic less than ten seconds ago; another band is declared before its next message."""
    publisher, other = make_broker(partitions=1), make_broker(partitions=1)
    publisher.topic("sms", str, bands=("urgent", "normal"))
    work = Work(other, bands=("normal", "bulk"))
    async with publisher, other:
        assert (await publisher.publish("sms", "lost", band="urgent")).partition_number == 1
        await lose_bands(other, publisher)
        await other.publish("sms", "made")
        (bulk,) = await open_block(other, "bulk")
        assert bulk == 1
        await publisher.publish_many("sms", ["found", "found, too"], band="urgent")
        assert not await ask(other, "XLEN", other.keys.stream("sms", bulk))
        async with other.running():
            await until(lambda: sorted(work.started) == ["found", "found, too", "made"], "all are handled")
            numbers = await open_block(publisher, "urgent")
            assert bulk not in numbers
            assert (await publisher.publish("sms", "later", band="urgent")).partition_number in numbers


async def test_what_a_band_has_that_nothing_remembers_is_read_and_its_numbers_are_given_to_no_other_one(
    make_broker: Make,
) -> None:
    """The layout was lost while no worker ran, and other bands are declared: also the message of before is handled."""
    before, after = make_broker(partitions=1), make_broker(partitions=1)
    before.topic("sms", str, bands=("urgent", "normal"))
    async with before:
        lost = await before.publish("sms", "first", band="urgent")
        await ask(before, "XGROUP", "CREATE", before.keys.stream("sms", 0), "g", "0", "MKSTREAM")
        await ask(before, "HDEL", before.keys.topic("sms"), "layout")
    work = Work(after, bands=("normal", "bulk"))
    async with after, after.running():
        await until(lambda: work.started == ["first"], "it is handled")
        numbers = await open_block(after, "bulk")
        topic = await after.topics.existing("sms")
        assert lost.partition_number not in numbers
        assert topic.layout.band_of(lost.partition_number) == f"lost-{lost.partition_number}"
        with pytest.raises(ConfigError, match="has no band 'urgent': its bands are normal, bulk"):
            await after.publish("sms", "second", band="urgent")


async def test_a_group_that_knows_no_bands_is_made_in_them_before_anything_is_trimmed(make_broker: Make) -> None:
    """A worker of an older version makes its group in the partitions that it knows: what a band has is kept for it."""
    broker = make_broker(partitions=1, retention_interval="50ms")
    work = Work(broker)
    async with broker, broker.running():
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("sms", 0), "old", "0")
        numbers = await open_block(broker, "bulk")

        async def is_made() -> bool:
            groups = await ask(broker, "XINFO", "GROUPS", broker.keys.stream("sms", numbers[0]))
            return {row[1] for row in groups} == {b"g", b"old"}

        await until(is_made, "the group is there")
        work.gate.set()


async def test_a_worker_that_knows_no_bands_is_refused_after_a_reset_as_well(make_broker: Make) -> None:
    """Its version compares the distribution of the group with its own; a worker that knows bands may change it."""
    broker, other = make_broker(partitions=1), make_broker()
    work = Work(broker)
    other.topic("sms", str, bands=BANDS).handler(group="g", distribution="shared")(work.handle)
    about = broker.keys.group("sms", "g")
    async with broker, other:
        async with broker.running():
            assert (await ask(broker, "HGET", about, "distribution")).decode() == "hash" + WITH_BANDS
        with pytest.raises(ConfigError, match="distribution 'hash', not 'shared'"):
            async with other.running():
                pass
        await broker.reset_group("sms", "g")
        assert (await ask(broker, "HGET", about, "distribution")).decode() == WITH_BANDS
        async with other.running():
            assert (await ask(broker, "HGET", about, "distribution")).decode() == "shared" + WITH_BANDS


async def test_order_per_key_holds_within_a_band_through_failures_reset_and_replay(
    make_broker: Make, witness: Witness
) -> None:
    """A band is partitions as all others: keys, retries, dead letters, a reset and a second member work there."""
    broker, second = make_broker(partitions=2), make_broker()
    handled = list[tuple[str, str]]()

    async def handle(text: str, message: Message) -> None:
        if text == "3" and message.attempt == 1:
            raise ValueError
        handled.append((str(message.key), text))

    for each in (broker, second):
        topic = each.topic("sms", str, bands=BANDS)
        topic.handler(group="g")(handle)
    async with broker, second:
        for number in range(8):
            for band in BANDS:
                await broker.publish("sms", str(number), key=band, band=band)
        async with broker.running(), second.running():
            await until(lambda: len(set(handled)) == 24, "all are handled")
            await settled(broker, "sms")
            for band in BANDS:
                texts = [text for key, text in handled if key == band]
                assert list(dict.fromkeys(texts)) == [str(number) for number in range(8)]
            handled.clear()
            topic = await broker.topics.existing("sms")
            await reset_group(broker.client, broker.keys, topic, "g", "earliest")
            await until(lambda: len(set(handled)) == 24, "all are handled again")


@one_server
async def test_each_way_to_publish_takes_a_band(make_broker: Make) -> None:
    """Also delayed, with an id, a unique name or a schedule, as an output and as a request; an id is one message in the
    whole topic, and a message is found in its band."""
    broker = make_broker(partitions=2)
    handled = dict[str, int]()
    sms = broker.topic("sms", str, bands=BANDS)

    @sms.handler(group="g", replies=True)
    async def handle(text: str, message: Message) -> str:
        handled[text] = message.partition
        return text

    @broker.handler("orders", group="g")
    async def order(text: str, message: Message) -> None:
        await message.publish("sms", f"output of {text}", key="k", band="urgent")

    @broker.every("100ms", "sms", band="bulk")
    def tick() -> str:
        return "tick"

    async with broker:
        topic = await broker.topics.ensure("sms")
        blocks = {block.band: block.numbers for block in topic.layout.blocks}
        ways: list[dict[str, Any]] = [
            {"key": "k"}, {}, {"delay": "50ms"}, {"message_id": "one", "key": "k"}, {"unique": "name"},
            {"message_id": "later", "delay": "50ms"},
        ]  # fmt: skip
        refs = [await sms.publish(f"way {number}", band="urgent", **way) for number, way in enumerate(ways)]
        again = await sms.publish("again", band="bulk", message_id="one", key="k")
        assert again.is_new is False
        many = await sms.publish_many([f"many {number}" for number in range(5)], band="bulk", key=lambda text: text)
        await broker.publish("orders", "o")
        async with broker.running():
            assert await broker.request("sms", "asked", timeout="30s", band="urgent") == "asked"
            wanted = {*(f"way {number}" for number in range(6)), *(f"many {number}" for number in range(5))}
            wanted |= {"output of o", "tick", "asked"}
            await until(lambda: handled.keys() >= wanted, "all are handled")
            for text, partition in handled.items():
                assert partition in blocks["bulk" if text.startswith(("many", "tick")) else "urgent"], text
            for ref in (refs[0], refs[1], many[0]):
                found = await broker.look(str(ref), topic="sms")
                assert found.partition in {*blocks["urgent"], *blocks["bulk"]}, found


async def test_a_message_has_its_band_also_for_the_rule_that_lets_others_wait(make_broker: Make) -> None:
    """One handler for codes and offers: its `when` lets the urgent ones start by night; a fallback keeps the band."""
    broker = make_broker(partitions=1)
    sms, calls = broker.topic("sms", str, bands=BANDS), broker.topic("calls", str, bands=BANDS)
    rung, morning = list[str](), datetime.now(UTC) + timedelta(hours=8)

    @sms.handler(group="g", when=lambda message: None if message.band == "urgent" else morning, fallback=calls)
    async def handle(text: str, message: Message) -> None:
        assert message.band == pickle.loads(pickle.dumps(message)).band, "also in a process of its own"
        raise Reject(text)

    @calls.handler(group="g")
    async def ring(text: str, message: Message) -> None:
        rung.append(f"{message.band} {text}")

    async with broker, broker.running():
        offer = await sms.publish("the sale begins", band="bulk")
        plain = await sms.publish("your invoice")
        await sms.publish("your code is 4711", band="urgent")
        await until(lambda: rung == ["urgent your code is 4711"], "the code came first, and by a call")
        for waiting in (offer, plain):
            status = await broker.look(waiting)
            assert [each.state for each in status.groups] == ["waiting_for_time"]
