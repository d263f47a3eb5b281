"""A topic that grows while everything runs: nothing is lost, nothing comes twice, and each key keeps its order."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tenacity import wait_fixed

from rsmq import Broker, ConfigError, Message, Rate, Reject, RetryPolicy
from rsmq.consumer.owning.key_search import KeySearch
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.left_keys import LeftKeys
from rsmq.control import Cancelled
from rsmq.heartbeat.assignment import assign
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.model.partition import partition_for
from rsmq.redis.client.connector import Connector
from rsmq.redis.layouts import change_layout, numbers_beside
from rsmq.redis.streams import ensure_groups, reset_group
from tests.contract.witness import ask, dies
from tests.matrix.way import steady_connections
from tests.patience import until

pytestmark = steady_connections

Make = Callable[..., Broker]


class Ledger:
    """What was published and handled: of each key, the numbers in order."""

    def __init__(self) -> None:
        self.published = defaultdict[str, list[int]](list)
        self.handled = defaultdict[str, list[int]](list)
        self.running = set[str]()

    async def handle(self, number: int, message: Message) -> None:
        key = message.key or ""
        assert key not in self.running, f"two of {key} run at once"
        self.running.add(key)
        await anyio.lowlevel.checkpoint()
        self.handled[key].append(number)
        self.running.discard(key)

    async def publish(self, broker: Broker, numbers: range, **options: Any) -> None:
        """One message of each of eight keys for each number, all at once."""
        for number in numbers:
            async with anyio.create_task_group() as tasks:
                for key in [f"k{n}" for n in range(8)]:
                    self.published[key].append(number)
                    tasks.start_soon(publish, broker, number, key)

    @property
    def is_complete(self) -> bool:
        return sum(map(len, self.handled.values())) >= sum(map(len, self.published.values()))


async def publish(broker: Broker, number: int, key: str) -> None:
    await broker.publish("orders", number, key=key)


async def resized(broker: Broker, topic: str, partitions: int) -> None:
    """Resize, and wait until it is done: here, or by a worker."""
    await broker.topics.resize(topic, partitions)
    await until_resized(broker, topic, partitions)


async def until_resized(broker: Broker, topic: str, partitions: int) -> None:
    """Until messages go to the new partitions."""

    async def is_done() -> bool:
        return (await broker.topics.existing(topic)).partitions == partitions

    await until(is_done, f"{topic} has {partitions} partitions")


async def sealed(broker: Broker, topic: str, partitions: int) -> None:
    """Resize at once: nothing runs that has to know the new partitions."""
    await broker.topics.resize(topic, partitions)
    assert (await broker.topics.existing(topic)).partitions == partitions


async def test_a_topic_grows_while_publishers_and_workers_go_on(make_broker: Make) -> None:
    """Two resizes while keys are published: each message is handled once, and each key in order."""
    broker, other = make_broker(partitions=2), make_broker()
    ledger, late = Ledger(), Ledger()
    broker.handler("orders", group="g", concurrency=16)(ledger.handle)
    broker.handler("orders", group="late", concurrency=16)(late.handle)

    async def publish_on(own: Broker, prefix: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            async with anyio.create_task_group() as tasks:
                for key in [f"{prefix}{n}" for n in range(8)]:
                    ledger.published[key].append(number)
                    tasks.start_soon(publish, own, number, key)

    stop = anyio.Event()
    async with broker, other, broker.running(), anyio.create_task_group() as tasks:
        await other.publish("orders", 0, key="a0")
        ledger.published["a0"].append(0)
        await broker.pause_group("orders", "late")
        tasks.start_soon(publish_on, broker, "a")
        tasks.start_soon(publish_on, other, "b")
        for partitions, least in ((4, 20), (12, 40)):
            await until(lambda least=least: len(ledger.handled["b3"]) > least, "it works")  # type: ignore[misc]
            if partitions == 12:
                await broker.resume_group("orders", "late")
            await resized(other, "orders", partitions)
        await until(lambda: len(ledger.handled["b3"]) > 60, "it goes on")
        stop.set()
        await until(lambda: ledger.is_complete, "all is handled")
        assert ledger.handled == ledger.published
        late.published = ledger.published
        await until(lambda: late.is_complete, "the paused group has all")
        assert late.handled == ledger.published
        current = (await other.topics.existing("orders")).layout.current
        assert (len(current.numbers), current.first >= 6) == (12, True)


async def test_new_partitions_wait_for_those_before_and_then_run_elsewhere(make_broker: Make) -> None:
    """What was published before is handled first; a second member gets partitions as soon as the group is past it."""
    broker, second, outside = make_broker(partitions=1), make_broker(partitions=1), make_broker()
    ledger, gate = Ledger(), anyio.Event()

    async def handle(number: int, message: Message) -> None:
        if number == 0:
            await gate.wait()
        await ledger.handle(number, message)

    for each in (broker, second):
        each.handler("orders", group="g", concurrency=16)(handle)
    async with outside, broker, broker.running():
        await ledger.publish(outside, range(2))
        await resized(outside, "orders", 4)
        await ledger.publish(outside, range(2, 4))
        async with second, second.running():
            assert broker.worker is not None
            assert second.worker is not None
            mine, theirs = broker.worker.consumers[0], second.worker.consumers[0]
            await until(lambda: len(mine.lanes) + len(theirs.lanes) == 5, "all partitions have an owner")
            assert not any(ledger.handled.values())
            waiting = [lane for each in (mine, theirs) for lane in each.lanes.values() if lane.parents]
            assert sorted(lane.partition for lane in waiting) == sorted(mine.topic.layout.current.numbers)
            gate.set()
            await until(lambda: ledger.is_complete, "all is handled")
            assert ledger.handled == ledger.published
            await until(lambda: len(theirs.lanes) >= 2, "the second member has its share")


def name_of(message: Message) -> str:
    """Two names for the keys of a ledger."""
    return f"n{int((message.key or 'k0')[1:]) % 2}"


@pytest.mark.parametrize(
    "options",
    [{}, {"tenant": name_of}, {"rate": Rate(1000, timedelta(seconds=1), by=name_of)}],
    ids=["plain", "tenants", "names"],
)
async def test_a_key_that_waits_before_a_resize_delays_only_itself(make_broker: Make, options: dict[str, Any]) -> None:
    """One key runs, one waits for its retry: the later messages of all others are handled meanwhile, in order."""
    broker, outside = make_broker(partitions=1), make_broker()
    ledger, gate, has_failed = Ledger(), anyio.Event(), set[str]()

    async def handle(number: int, message: Message) -> None:
        if number == 0 and message.key == "k0":
            await gate.wait()
        if number == 0 and message.key == "k1" and not gate.is_set():
            has_failed.add("k1")
            raise RuntimeError("not yet")
        await ledger.handle(number, message)

    retry = RetryPolicy(max_attempts=1000, wait=wait_fixed(0.05))
    broker.handler("orders", group="g", concurrency=16, retry=retry, **options)(handle)
    others = [f"k{n}" for n in range(2, 8)]
    async with outside, broker, broker.running():
        await ledger.publish(outside, range(2))
        await until(lambda: bool(has_failed), "a key waits for its retry")
        await resized(outside, "orders", 4)
        await ledger.publish(outside, range(2, 5))
        await until(lambda: all(ledger.handled[key] == ledger.published[key] for key in others), "the others go on")
        assert not ledger.handled["k0"]
        assert not ledger.handled["k1"]
        gate.set()
        await until(lambda: ledger.is_complete, "all is handled")
    assert ledger.handled == ledger.published


async def test_a_call_by_key_that_fails_before_a_resize_delays_only_its_key(make_broker: Make) -> None:
    """Calls have the messages of one key. That of one key fails: later messages of all others are handled meanwhile."""
    broker, outside = make_broker(partitions=1), make_broker()
    handled, gate, has_failed = defaultdict[str, list[int]](list), anyio.Event(), anyio.Event()

    @broker.handler(
        "orders", group="g", batch=10, by="key", linger=timedelta(milliseconds=20),
        retry=RetryPolicy(max_attempts=1000, wait=wait_fixed(0.05)),
    )  # fmt: skip
    async def handle(numbers: list[int], messages: list[Message]) -> None:
        (key,) = {message.key or "" for message in messages}
        if key == "hot" and not gate.is_set():
            has_failed.set()
            raise RuntimeError("not yet")
        handled[key] += numbers

    async with outside, broker, broker.running():
        await outside.publish("orders", 0, key="hot")
        await until(has_failed.is_set, "the key waits for its retry")
        await resized(outside, "orders", 2)
        for number, key in itertools.product(range(1, 6), ("hot", *"abcd")):
            await outside.publish("orders", number, key=key)
        await until(lambda: all(handled[key] == [*range(1, 6)] for key in "abcd"), "the others go on")
        assert not handled["hot"]
        gate.set()
        await until(lambda: len(handled["hot"]) >= 6, "all is handled")
    assert handled["hot"] == [*range(6)]


async def test_what_waits_for_a_partition_before_takes_no_memory_from_others(make_broker: Make) -> None:
    """A key waits for its retry, and as many later messages of it as memory has room for wait in the partition that
    follows: all others go on, and are read."""
    broker, outside = make_broker(partitions=1, prefetch=8, read_ahead=0), make_broker()
    handled, gate, has_failed = defaultdict[str, list[int]](list), anyio.Event(), anyio.Event()

    async def handle(number: int, message: Message) -> None:
        if message.key == "hot" and not gate.is_set():
            has_failed.set()
            raise RuntimeError("not yet")
        handled[message.key or ""].append(number)

    retry = RetryPolicy(max_attempts=1000, wait=wait_fixed(0.05))
    broker.handler("orders", group="g", retry=retry)(handle)
    async with outside, broker, broker.running():
        await outside.publish("orders", 0, key="hot")
        await until(has_failed.is_set, "the key waits for its retry")
        await resized(outside, "orders", 2)
        await outside.publish_many("orders", range(1, 41), key=lambda _: "hot")
        await outside.publish_many("orders", range(8), key=lambda number: f"k{number}")
        await until(lambda: len(handled) == 8, "the others go on")
        gate.set()
        await until(lambda: len(handled["hot"]) >= 41, "all is handled")
    assert handled == {"hot": [*range(41)], **{f"k{number}": [number] for number in range(8)}}


async def test_a_key_that_waits_before_a_resize_delays_only_itself_with_several_members(make_broker: Make) -> None:
    """Two hundred messages of a key wait in a partition that six follow: all that follow it are with one of three
    members, and what follows the other one is spread. Afterwards each member has its share."""
    brokers, outside = [make_broker(partitions=2) for _ in range(3)], make_broker()
    ledger, gate = Ledger(), anyio.Event()

    async def handle(number: int, message: Message) -> None:
        if message.key == "hot":
            await gate.wait()
        await ledger.handle(number, message)

    for each in brokers:
        each.handler("orders", group="g", concurrency=16)(handle)
    async with AsyncExitStack() as running:
        for each in (outside, *brokers):
            await running.enter_async_context(each)
        members = [await running.enter_async_context(each.running()) for each in brokers]
        lanes = [each.worker.consumers[0].lanes for each in members if each.worker is not None]
        names = [each.worker.member for each in members if each.worker is not None]
        owners = assign(2, names, "orders/g").items()
        shares = [{at for at, owner in owners if owner == name} for name in names]
        # a partition whose handler does not end is not handed over, and those that follow it would be with another one
        await until(lambda: [each.keys() for each in lanes] == shares, "each has its share")
        ledger.published["hot"] += range(200)
        await outside.publish_many("orders", range(200), key=lambda _: "hot")
        await ledger.publish(outside, range(2))
        await resized(outside, "orders", 12)
        await ledger.publish(outside, range(2, 6))
        others = [f"k{n}" for n in range(8)]
        await until(lambda: all(ledger.handled[key] == ledger.published[key] for key in others), "the others go on")
        assert not ledger.handled["hot"]
        layout = (await outside.topics.existing("orders")).layout
        before = layout.blocks[0].partition_for("hot")
        family = {before, *layout.descendants_of(before)}
        assert len(family) == 7
        await until(lambda: family in [family & each.keys() for each in lanes], "one member has the family")
        await until(lambda: sum(bool(each.keys() - family) for each in lanes) > 1, "the others are spread")
        gate.set()
        await until(lambda: ledger.is_complete, "all is handled")
        current = {*layout.current.numbers}
        await until(lambda: [len(each.keys() & current) for each in lanes] == [4, 4, 4], "each has its share")
    assert ledger.handled == {**ledger.published, "hot": [*range(200)]}


async def test_a_key_with_more_messages_than_are_kept_as_ids_delays_only_itself(make_broker: Make) -> None:
    """The old partition is not read to its end. Keys that come only after the resize go on; one that has a message
    there, behind those of the hot key, keeps its order."""
    broker, outside = make_broker(partitions=1, prefetch=16, read_ahead=50), make_broker()
    ledger, gate = Ledger(), anyio.Event()

    async def handle(number: int, message: Message) -> None:
        if message.key == "hot":
            await gate.wait()
        await ledger.handle(number, message)

    broker.handler("orders", group="g", concurrency=16)(handle)
    async with outside, broker, broker.running():
        ledger.published["hot"] += range(300)
        await outside.publish_many("orders", range(300), key=lambda _: "hot")
        ledger.published["late"] += range(2)
        await outside.publish("orders", 0, key="late")
        await resized(outside, "orders", 4)
        await outside.publish("orders", 1, key="late")
        await ledger.publish(outside, range(20))
        others = [f"k{n}" for n in range(8)]
        await until(lambda: all(ledger.handled[key] == ledger.published[key] for key in others), "the others go on")
        assert not ledger.handled["hot"]
        assert not ledger.handled["late"]
        gate.set()
        await until(lambda: ledger.is_complete, "all is handled")
    assert ledger.handled == ledger.published


async def test_a_key_that_comes_before_the_seal_is_found_when_more_is_unread_than_is_kept_as_ids(
    make_broker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new partitions have owners while a member of another group keeps the old one open: what is published there
    by then comes before later messages of its key, though it is not read yet."""
    broker, outside = make_broker(partitions=1, prefetch=16, read_ahead=50), make_broker()
    ledger, gate, find, looks = Ledger(), anyio.Event(), KeySearch.find, list[int]()

    async def handle(number: int, message: Message) -> None:
        if message.key == "hot":
            await gate.wait()
        await ledger.handle(number, message)

    async def find_counted(self: KeySearch, before: Sequence[Lane], *, is_read: bool) -> Collection[LeftKeys]:
        found = await find(self, before, is_read=is_read)
        looks.append(len(found))
        return found

    monkeypatch.setattr(KeySearch, "find", find_counted)
    broker.handler("orders", group="g", concurrency=16)(handle)
    async with outside, broker, broker.running():
        topic = await outside.topics.existing("orders")
        await ensure_groups(outside.client, outside.keys, topic, "other", "0")
        connector = Connector(outside.settings.url, outside.settings)
        unaware = Heartbeat(connector, outside.settings, outside.keys, "unaware")
        unaware.start(asyncio.get_running_loop())
        try:
            await unaware.join("orders", "other", {"layout": 0}, lambda: None)
            ledger.published["hot"] += range(300)
            await outside.publish_many("orders", range(300), key=lambda _: "hot")
            await outside.topics.resize("orders", 4)
            await until(lambda: len(looks) > 3, "the owner of the new partitions has looked for what is before them")
            ledger.published["late"] += range(2)
            late = await outside.publish("orders", 0, key="late")
            assert late.partition_number == 0
        finally:
            await anyio.to_thread.run_sync(unaware.stop)
        await until_resized(outside, "orders", 4)
        assert (await outside.publish("orders", 1, key="late")).partition_number > 0
        await ledger.publish(outside, range(20))
        others = [f"k{n}" for n in range(8)]
        await until(lambda: all(ledger.handled[key] == ledger.published[key] for key in others), "the others go on")
        assert not ledger.handled["late"]
        gate.set()
        await until(lambda: ledger.is_complete, "all is handled")
    assert ledger.handled == ledger.published


async def test_an_owner_that_keeps_fewer_ids_takes_over_what_the_last_one_had_and_goes_on_behind_it(
    make_broker: Make,
) -> None:
    """It knows all keys of what is pending, so those that come after the resize go on."""
    outside, ledger, gate = make_broker(), Ledger(), anyio.Event()

    async def handle(number: int, message: Message) -> None:
        if message.key == "hot":
            await gate.wait()
        await ledger.handle(number, message)

    def member(read_ahead: int) -> Broker:
        broker = make_broker(partitions=1, prefetch=16, read_ahead=read_ahead, stop_grace="100ms")
        broker.handler("orders", group="g", concurrency=16)(handle)
        return broker

    async def is_full() -> bool:
        (count, *_) = await ask(outside, "XPENDING", outside.keys.stream("orders", 0), "g")
        return bool(count > 80)

    first, second = member(80), member(50)
    async with outside:
        ledger.published["hot"] += range(300)
        async with first, first.running():
            await outside.publish_many("orders", range(300), key=lambda _: "hot")
            await until(is_full, "it has as many as it keeps")
            await resized(outside, "orders", 4)
        async with second, second.running():
            await ledger.publish(outside, range(20))
            others = [f"k{n}" for n in range(8)]
            await until(lambda: all(ledger.handled[key] == ledger.published[key] for key in others), "the others go on")
            assert not ledger.handled["hot"]
            gate.set()
            await until(lambda: ledger.is_complete, "all is handled")
    assert ledger.handled == ledger.published


async def test_keys_of_a_name_whose_rate_is_used_up_before_a_resize_delay_only_themselves(make_broker: Make) -> None:
    """Most of what waits for the rate is kept as ids, without keys. Keys that come after the resize go on, and one that
    waits there keeps its order."""
    broker, outside = make_broker(partitions=1, prefetch=8), make_broker()
    handled, per_minute = defaultdict[str, list[int]](list), 30

    @broker.handler("orders", group="g", concurrency=4, rate=Rate(per_minute, timedelta(minutes=1), by=name_before))
    async def handle(number: int, message: Message) -> None:
        handled[message.key or ""].append(number)

    async with outside, broker, broker.running():
        await outside.publish_many("orders", range(100), key=lambda number: f"slow-{number}")
        await until(lambda: len(handled) == per_minute, "the rate is used up")
        waits = next(key for key in (f"slow-{number}" for number in range(100)) if key not in handled)
        await resized(outside, "orders", 4)
        await outside.publish("orders", 100, key=waits)
        await outside.publish_many("orders", range(20), key=lambda number: f"fast-{number % 4}")
        expected = {f"fast-{n}": [*range(n, 20, 4)] for n in range(4)}
        await until(lambda: {key: handled[key] for key in expected} == expected, "the others go on")
        assert waits not in handled


def name_before(message: Message) -> str:
    """The name in a key such as `fast-3`."""
    return (message.key or "").partition("-")[0]


async def test_a_handler_that_outlasts_a_handover_delays_only_its_key_over_a_resize(make_broker: Make) -> None:
    """A member has joined shortly before, and half of the partitions are to be handed over to it: in each a handler
    runs for longer than the lease. What follows them stays with their owner, so all other keys go on."""
    first, second, outside = [make_broker(partitions=4, lease_ttl="1.5s") for _ in range(3)]
    ledger, gate = Ledger(), anyio.Event()
    hot = {partition_for(f"hot-{n}", 4): f"hot-{n}" for n in range(50)}

    async def handle(number: int, message: Message) -> None:
        if message.key in hot.values():
            await gate.wait()
        await ledger.handle(number, message)

    for each in (first, second):
        each.handler("orders", group="g", concurrency=16)(handle)
    async with outside, first, second, first.running() as running:
        for key in hot.values():
            ledger.published[key] += [0]
            await outside.publish("orders", 0, key=key)
        assert running.worker is not None
        (consumer,) = running.worker.consumers
        await until(lambda: sum(len(each.in_flight) for each in consumer.lanes.values()) == 4, "each has its handler")
        async with second.running() as joined:
            assert joined.worker is not None
            names = [running.worker.member, joined.worker.member]
            assert {*assign(4, names, "orders/g").values()} == {*names}
            await resized(outside, "orders", 8)
            await ledger.publish(outside, range(10))
            others = [f"k{n}" for n in range(8)]
            await until(lambda: all(ledger.handled[key] == ledger.published[key] for key in others), "the others go on")
            assert not [key for key in hot.values() if ledger.handled[key]]
            gate.set()
            await until(lambda: ledger.is_complete, "all is handled")
            lanes = [consumer.lanes, joined.worker.consumers[0].lanes]
            current = {*(await outside.topics.existing("orders")).layout.current.numbers}
            await until(lambda: [len(each.keys() & current) for each in lanes] == [4, 4], "each has its share")
    assert ledger.handled == ledger.published


async def test_a_reset_over_a_resize_begins_with_what_was_published_before_it(make_broker: Make) -> None:
    """The new run handles each key in order, too, and so does a group that is made afterwards."""
    broker, outside, third = make_broker(partitions=2), make_broker(), make_broker()
    first, again, other = Ledger(), Ledger(), Ledger()
    used = [first]

    async def handle(number: int, message: Message) -> None:
        await used[0].handle(number, message)

    broker.handler("orders", group="g", concurrency=16)(handle)
    third.handler("orders", group="other", start="earliest", concurrency=16)(other.handle)
    async with outside:
        async with broker, broker.running():
            await first.publish(outside, range(3))
            await resized(outside, "orders", 4)
            await first.publish(outside, range(3, 6))
            await until(lambda: first.is_complete, "all is handled")
        used[0] = again
        await reset_group(outside.client, outside.keys, await outside.topics.existing("orders"), "g", "earliest")
        async with make_again(make_broker, handle) as broker, broker.running(), third, third.running():
            again.published = other.published = first.published
            await until(lambda: again.is_complete and other.is_complete, "both have all")
    assert first.handled == again.handled == other.handled == first.published


def make_again(make_broker: Make, handle: Callable[..., Any]) -> Broker:
    """The same worker, started again."""
    broker = make_broker()
    broker.handler("orders", group="g", concurrency=16)(handle)
    return broker


async def test_ids_and_names_of_before_count_after_a_resize(make_broker: Make) -> None:
    """An id is stored once, a name is held by one message: with its key, on both sides of a resize."""
    broker = make_broker(partitions=2)
    broker.handler("orders", group="g")(Ledger().handle)
    async with broker:
        async with broker.running():
            pass
        first = await broker.publish("orders", 1, key="a", message_id="one")
        later = await broker.publish("orders", 2, key="b", message_id="two", delay="1h")
        held = await broker.publish("orders", 3, key="c", unique="name")
        edited = await broker.publish("orders", 4, key="d", unique="draft", delay="1h")
        await sealed(broker, "orders", 4)
        again = await broker.publish("orders", 1, key="a", message_id="one")
        new = None if broker.client.is_cluster else True  # there a message with another key may have the id
        assert (first.is_new, again.is_new, later.is_new) == (new, False, new)
        assert (await broker.publish("orders", 2, key="b", message_id="two", delay="1h")).is_new is False
        if not broker.client.is_cluster:
            assert (await broker.publish("orders", 1, key="z", message_id="one")).is_new is False
        many = await broker.publish_many(
            "orders", [1, 9], key=lambda _: "a", message_id=lambda n: {1: "one", 9: "nine"}[n]
        )
        assert [each.is_new for each in many] == [False, new]
        kept = await broker.publish("orders", 5, key="c", unique="name")
        assert (str(kept), kept.is_new) == (str(held), False)
        assert (await broker.publish("orders", 6, key="c", unique="name", on_conflict="replace")).is_new is False
        assert (await broker.publish("orders", 7, key="d", unique="draft", delay="1h")).is_new is False
        assert (await broker.look(edited)).state == "delayed"


async def test_delayed_messages_of_before_are_delivered_after_a_resize(make_broker: Make) -> None:
    """Also cancelled, given another time, and with a name."""
    broker, seen = make_broker(partitions=2), list[int]()

    @broker.handler("orders", group="g")
    async def handle(number: int) -> None:
        seen.append(number)

    async with broker:
        async with broker.running():
            pass
        soon = [await broker.publish("orders", n, key=f"k{n}", delay="1h") for n in range(20)]
        named = await broker.publish("orders", 20, key="k20", unique="n", delay="1h")
        gone = await broker.publish("orders", 21, key="k21", delay="1h")
        await sealed(broker, "orders", 6)
        async with broker.running():
            for ref in soon[:8]:  # before and after they have moved
                await broker.reschedule(ref, delay="0s")
            await until(lambda: len(seen) == 8, "they are handled")
            assert isinstance(await broker.cancel(gone), Cancelled)
            assert (await broker.publish("orders", 22, key="k20", unique="n")).is_new is False
            for ref in [*soon[8:], named]:
                await broker.reschedule(ref, delay="0s")
            await until(lambda: len(seen) == 21, "all but the cancelled one are handled")
            assert (await broker.publish("orders", 22, key="k20", unique="n")).is_new
            await until(lambda: len(seen) == 22, "the name is free again")
    assert sorted(seen) == [*range(21), 22]


async def test_dead_letters_and_outputs_go_over_a_resize(make_broker: Make) -> None:
    """A worker that knows the old partitions stores outputs in the new ones; old dead letters are replayed there."""
    broker, outside = make_broker(partitions=2), make_broker(partitions=2)
    seen, fails, gate = list[str](), [True], anyio.Event()

    @broker.handler("in", group="g", ordering="none")
    async def handle(text: str, message: Message) -> None:
        if text == "held":
            await message.publish("out", "first", key="a", message_id="given")
            await message.publish("out", "second", key="b", delay="0s")
            await gate.wait()
        if text.startswith("bad") and fails[0]:
            raise Reject("bad")
        seen.append(text)

    @broker.handler("out", group="g", retry=RetryPolicy(max_attempts=1))
    async def take(text: str) -> None:
        seen.append(text)

    async with broker, outside, broker.running():
        await outside.publish("out", "zero", key="a")
        await broker.publish("in", "bad", key="b")
        await dies(broker, "in", "g", 1)
        await broker.publish("in", "held", key="h")
        await until(lambda: "zero" in seen, "the topic is used")
        assert broker.worker is not None
        await until(lambda: any(each.running for each in broker.worker.consumers), "its outputs wait")
        for topic in ("in", "out"):
            await resized(outside, topic, 4)
        gate.set()
        await until(lambda: {"held", "first", "second"} <= {*seen}, "they are stored in the new partitions")
        topic = await outside.topics.existing("out")
        lengths = [
            await ask(outside, "XLEN", outside.keys.stream("out", number)) for number in topic.layout.current.numbers
        ]
        assert sum(lengths) == 2
        assert (await outside.publish("out", "first", key="a", message_id="given")).is_new is False
        fails[0] = False
        assert await outside.dead_letters.replay(await outside.topics.existing("in"), "g") == 1
        await until(lambda: "bad" in seen, "it is replayed")


async def test_each_band_grows_and_what_it_had_stays_in_it(make_broker: Make) -> None:
    """Messages, delayed ones and dead letters; a band that is closed and opened again; a new band."""
    broker, outside = make_broker(partitions=2), make_broker()
    bands, fails = ("urgent", "normal"), [True]
    ledger = Ledger()

    @broker.handler("orders", group="g", retry=RetryPolicy(max_attempts=1))
    async def handle(number: int, message: Message) -> None:
        if number == 0 and fails[0]:
            raise Reject("bad")
        await ledger.handle(number, message)
        seen[number] = message.band

    seen = dict[int, str]()
    async with outside, broker, broker.running():
        await outside.topics.ensure("orders")
        await outside.topics.set_bands("orders", bands)
        await until_open(outside, "orders")
        await outside.publish("orders", 0, key="a", band="urgent")
        await dies(broker, "orders", "g", 1)
        later = await outside.publish("orders", 1, key="b", band="urgent", delay="1h")
        await resized(outside, "orders", 4)
        layout = (await outside.topics.existing("orders")).layout
        assert [(each.band, each.count, each.state) for each in layout.blocks] == [
            ("normal", 2, "sealed"), ("urgent", 2, "sealed"), ("urgent", 4, "open"), ("normal", 4, "open"),
        ]  # fmt: skip
        await broker.publish("orders", 2, key="a", band="urgent")  # it does not know the new partitions yet
        fails[0] = False
        assert await outside.dead_letters.replay(await outside.topics.existing("orders"), "g") == 1
        await outside.reschedule(later, delay="0s")
        await until(lambda: len(seen) == 3, "they are handled")
        await outside.topics.set_bands("orders", ("normal",))
        assert (await outside.topics.existing("orders")).layout.sealed_numbers == {0, 1, 2, 3}
        await outside.topics.set_bands("orders", ("urgent", "normal", "bulk"))
        await until_open(outside, "orders")
        for number, band in enumerate(("urgent", "normal", "bulk"), 3):
            ref = await outside.publish("orders", number, key="a", band=band)
            block = (await outside.topics.existing("orders")).layout.block_of(band)
            assert block is not None
            assert ref.partition_number in block.numbers
            assert block.count == 4
        await until(lambda: len(seen) == 6, "all is handled")
    assert seen == {0: "urgent", 1: "urgent", 2: "urgent", 3: "urgent", 4: "normal", 5: "bulk"}


async def until_open(broker: Broker, topic: str) -> None:
    """Until each band is open."""

    async def is_open() -> bool:
        return not await broker.topics.open_bands(topic)

    await until(is_open, f"all bands of {topic} are open")


async def test_a_killed_member_does_not_delay_a_resize(make_broker: Make) -> None:
    """Its sockets are closed, and its heartbeat key counts for an hour more. One that lives does, and so does one of a
    version that does not know layouts: it may be cut off, and come back."""
    broker = make_broker(partitions=2, lease_ttl=timedelta(hours=1))

    async def waits_for() -> str:
        return await broker.topics.go_on_with_resize("orders")

    async with AsyncExitStack() as open_until:
        await open_until.enter_async_context(broker)
        await ensure_groups(broker.client, broker.keys, await broker.topics.ensure("orders"), "g", "0")
        for name in ("old", "lives", "killed"):
            heartbeat = Heartbeat(Connector(broker.settings.url, broker.settings), broker.settings, broker.keys, name)
            heartbeat.start(asyncio.get_running_loop())
            open_until.push_async_callback(anyio.to_thread.run_sync, heartbeat.stop)
            await heartbeat.join("orders", "g", {} if name == "old" else {"layout": 0}, lambda: None)
            if name != "lives":
                await anyio.to_thread.run_sync(heartbeat.stop)  # without a word, as a killed process
        await broker.topics.resize("orders", 4)

        async def is_seen() -> bool:
            return "g: killed" not in await waits_for()

        await until(is_seen, "its end is seen")
        assert "g: lives, g: old" in await waits_for()


async def test_what_keeps_a_topic_from_growing_is_said(make_broker: Make) -> None:
    """A number that is no multiple, bands, two at once; and what it waits for."""
    broker = make_broker(partitions=4)
    broker.handler("orders", group="g")(Ledger().handle)
    async with broker:
        async with broker.running():
            pass
        for number in (2, 4 + 1, 2048):
            with pytest.raises(ConfigError, match="Use 8, 12, 16"):
                await broker.topics.resize("orders", number)
        await broker.publish("orders", 1, key="a")
        await sealed(broker, "orders", 8)
        await broker.topics.resize("orders", 16)
        found = await broker.topics.existing("orders")
        assert found.layout.following is not None
        assert "have not handled" in await broker.topics.go_on_with_resize("orders")
        with pytest.raises(ConfigError, match="is being resized to 16"):
            await broker.topics.resize("orders", 24)
        assert await broker.topics.abort_resize("orders")
        assert not await broker.topics.abort_resize("orders")
        await broker.topics.resize("orders", 16)
        with pytest.raises(ConfigError, match="is being resized"):
            await broker.topics.set_bands("orders", ("urgent", "normal"))
        assert await broker.topics.abort_resize("orders")
        assert await ask(broker, "HGET", broker.keys.topic("orders"), "partitions") == b"resized, see layout"
        assert await broker.topics.ensure("orders", 4)
        assert await broker.topics.ensure("orders", 8)
        with pytest.raises(ConfigError, match="topic resize orders"):
            await broker.topics.ensure("orders", 5)


async def test_ticks_of_a_schedule_go_over_a_resize(make_broker: Make) -> None:
    """None is missing, and none is published twice: the records stay where they were."""
    broker, outside, seen = make_broker(partitions=2), make_broker(), list[datetime]()

    @broker.every(timedelta(milliseconds=100), "ticks")
    def clock(at: datetime) -> str:
        return at.isoformat()

    @broker.handler("ticks", group="g")
    async def handle(text: str) -> None:
        seen.append(datetime.fromisoformat(text))

    async with broker, outside, broker.running():
        await until(lambda: len(seen) > 3, "it ticks")
        await resized(outside, "ticks", 6)
        before = len(seen)
        await until(lambda: len(seen) > before + 10, "it ticks on")
    assert sorted(set(seen)) == sorted(seen)
    steps = {later - earlier for earlier, later in itertools.pairwise(sorted(seen))}
    assert steps == {timedelta(milliseconds=100)}


async def test_a_feed_of_devices_goes_over_a_resize(make_broker: Make) -> None:
    """Each device gets each letter once, in order."""
    broker = make_broker(partitions=1)
    broker.deliver("alerts", to=lambda number: f"device-{number % 2}")
    async with broker, broker.running():
        await broker.publish("alerts", 0, key="k0")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resized, broker, "alerts", 2)
            for number in range(1, 60):
                await broker.publish("alerts", number, key=f"k{number % 2}")
        for device in range(2):
            async with broker.connect(f"device-{device}", auto_ack=True) as session:
                with anyio.fail_after(60):
                    assert [(await anext(session)).payload for _ in range(30)] == [*range(device, 60, 2)]


async def test_the_rate_of_a_key_goes_over_a_resize(make_broker: Make) -> None:
    """It counts what has started in the partition before."""
    broker, started = make_broker(partitions=1), list[float]()

    @broker.handler("orders", group="g", rate=Rate(1, timedelta(seconds=1), by="key"))
    async def handle(_: int) -> None:
        started.append(anyio.current_time())

    async with broker, broker.running():
        for number, partitions in enumerate((2, 4, 8)):
            await broker.publish("orders", number, key="a")
            await until(lambda number=number: len(started) > number, "it has started")  # type: ignore[misc]
            await resized(broker, "orders", partitions)
        assert all(later - earlier > 0.99 for earlier, later in itertools.pairwise(started))


async def test_the_rate_of_a_key_counts_what_starts_before_while_the_next_partition_is_read(make_broker: Make) -> None:
    """Other keys are read there already when the last messages of this one start in the partition before."""
    broker, started, others = make_broker(partitions=1), list[float](), list[int]()

    @broker.handler("orders", group="g", rate=Rate(1, timedelta(milliseconds=600), by="key"))
    async def handle(number: int, message: Message) -> None:
        if message.key == "a":
            started.append(anyio.current_time())
        else:
            others.append(number)

    async with broker, broker.running():
        await broker.publish_many("orders", range(4), key=lambda _: "a")
        await resized(broker, "orders", 2)
        await broker.publish_many("orders", range(4, 8), key=lambda _: "a")
        await broker.publish_many("orders", range(8), key=lambda number: f"k{number}")
        await until(lambda: len(others) == 8, "the others go on")
        assert len(started) < 4
        await until(lambda: len(started) >= 6, "messages of both partitions have started")
    assert all(later - earlier > 0.59 for earlier, later in itertools.pairwise(started))


async def test_a_member_that_joins_while_its_topic_grows_knows_the_new_partitions(
    make_broker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says when it joins was written before: the resize would wait for it for ever."""
    broker, join, added = make_broker(partitions=1), Heartbeat.join, list[bool]()
    broker.handler("orders", group="g")(Ledger().handle)

    async def join_late(self: Heartbeat, *args: Any, **options: Any) -> None:
        if not added:
            topic = await broker.topics.existing("orders")
            choose = numbers_beside(broker.keys, "orders") if broker.client.is_cluster else None
            wanted = topic.layout.with_partitions(2, choose)
            added.append(await change_layout(broker.client, broker.keys, "orders", topic.layout, wanted))
            assert broker.worker is not None
            await broker.worker.consumers[0].follow()
        await join(self, *args, **options)

    async with broker:
        await broker.topics.ensure("orders")
        monkeypatch.setattr(Heartbeat, "join", join_late)
        async with broker.running():
            await resized(broker, "orders", 2)
    assert added == [True]


async def test_a_layout_that_the_server_has_lost_is_written_again(make_broker: Make) -> None:
    """A worker knows it: numbers of partitions are a text again, and what comes next goes to the new ones."""
    broker = make_broker(partitions=2)
    broker.handler("orders", group="g")(Ledger().handle)
    async with broker, broker.running():
        await resized(broker, "orders", 4)
        key, assigned = broker.keys.topic("orders"), broker.worker
        assert assigned is not None
        await until(lambda: assigned.consumers[0].topic.layout.is_resized, "the worker knows it")
        await ask(broker, "HDEL", key, "layout")
        await ask(broker, "HSET", key, "partitions", 2)
        await assigned.consumers[0].follow()
        assert await ask(broker, "HGET", key, "partitions") == b"resized, see layout"
        found = await broker.topics.existing("orders")
        assert (await broker.publish("orders", 1, key="a")).partition_number in found.layout.current.numbers


@pytest.mark.parametrize("partitions", [1, 8])
async def test_what_publishers_store_after_a_resized_topic_was_deleted_goes_to_the_next_one(
    make_broker: Make, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not know of the end for ten seconds, here for an hour: over a slow line the deletion takes longer. The
    next topic has other partitions than they know: its workers look there, also for what is delayed, unique or has an
    id."""
    monkeypatch.setattr("rsmq.redis.topics.FRESH_SECONDS", 3600.0)
    publisher, outside, worker, handled = make_broker(), make_broker(), make_broker(), set[int]()

    @worker.handler("orders", group="g", partitions=partitions)
    async def handle(number: int) -> None:
        handled.add(number)

    async with outside, publisher, worker:
        first = 2 if outside.client.is_cluster else 512  # there new partitions have high numbers
        await outside.topics.ensure("orders", first)
        await sealed(outside, "orders", 2 * first)
        await publisher.publish("orders", -1, key="a")  # it knows the topic now
        await outside.topics.delete("orders")
        assert not await outside.topics.find("orders")
        stored, kinds = list[int](), list[dict[str, Any]]([{}, {"delay": "10ms"}, {"unique": "x"}, {"message_id": "x"}])
        for number in range(40):
            options = {name: f"{value}{number}" if value == "x" else value for name, value in kinds[number % 4].items()}
            ref = await publisher.publish("orders", number, key=f"k{number}", **options)
            stored.append(ref.partition_number)
        assert max(stored) >= 1024
        async with worker.running():
            await until(lambda: len(handled) == 40, "all are handled")
            assert (await outside.topics.existing("orders")).partitions == partitions
