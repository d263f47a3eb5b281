"""A topic grows on a cluster: the same tests, with this directory's brokers; and what only a cluster has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rsmq import Broker, ConfigError
from rsmq.errors import BrokerUnavailable, PartitionSealed, SlotMoving
from rsmq.producer import sender
from rsmq.redis import layouts
from rsmq.redis.topics import set_lost_seals
from rsmq.redis.wire.slots import slot_of
from tests.cluster.cluster import Cluster
from tests.contract.test_resize import (
    sealed,
    test_a_reset_over_a_resize_begins_with_what_was_published_before_it,  # noqa: F401
    test_a_topic_grows_while_publishers_and_workers_go_on,
    test_dead_letters_and_outputs_go_over_a_resize,  # noqa: F401
    test_delayed_messages_of_before_are_delivered_after_a_resize,  # noqa: F401
    test_each_band_grows_and_what_it_had_stays_in_it,  # noqa: F401
    test_ids_and_names_of_before_count_after_a_resize,  # noqa: F401
    test_ticks_of_a_schedule_go_over_a_resize,  # noqa: F401
    test_what_publishers_store_after_a_resized_topic_was_deleted_goes_to_the_next_one,  # noqa: F401
)
from tests.contract.witness import ask
from tests.patience import until

Make = Callable[..., Broker]


@pytest.mark.long_chaos("ten seconds")
async def test_a_topic_grows_while_its_slots_move(make_broker: Make, cluster: Cluster) -> None:
    """Of its record, its group and its partitions: the test of one server, with that beside it."""
    keys, chance, moved = make_broker().keys, random.Random(1), list[str]()
    names = [keys.topic("orders"), keys.group("orders", "g"), keys.stream("orders", 0), keys.stream("orders", 1)]

    async def move() -> None:
        while True:
            await anyio.sleep(chance.uniform(0.1, 0.5))
            moved.append(chance.choice(names))
            await anyio.to_thread.run_sync(cluster.migrate, moved[-1])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(move)
        await test_a_topic_grows_while_publishers_and_workers_go_on(make_broker)
        tasks.cancel_scope.cancel()
    assert moved


async def test_a_new_partition_is_in_the_slot_of_the_one_that_it_follows(make_broker: Make) -> None:
    """And the server refuses what is published to that one; a seal that a failover has lost is set again."""
    broker = make_broker(partitions=3)
    async with broker:
        await broker.publish("orders", 1, key="a")
        await sealed(broker, "orders", 6)
        await sealed(broker, "orders", 12)
        topic = await broker.topics.existing("orders")
        assert len(topic.numbers) == 3 + 6 + 12
        for number in topic.numbers:
            slots = {slot_of(broker.keys.stream("orders", each)) for each in topic.layout.ancestors_of(number)}
            assert slots <= {slot_of(broker.keys.stream("orders", number))}
        stream = broker.keys.stream("orders", 0)
        for _ in range(2):
            with pytest.raises(PartitionSealed):
                await ask(broker, "XADD", stream, "*", "data", "1")
            await ask(broker, "XSETID", stream, "1-1")
            await ask(broker, "XADD", stream, "2-1", "data", "1")
            await ask(broker, "XTRIM", stream, "MAXLEN", 0)
            await set_lost_seals(broker.topics, topic)


async def test_a_resize_that_dies_while_partitions_are_sealed_is_finished(
    make_broker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not given up any more. A publisher waits meanwhile, or gets an error that says what to do; a worker, or
    the command again, goes on."""
    broker, impatient = make_broker(partitions=2), make_broker(unavailable_timeout="200ms")
    seen, steps = list[int](), list[str]()

    @broker.handler("orders", group="g", concurrency=16)
    async def handle(number: int) -> None:
        seen.append(number)

    async def dies(client: Any, calls: Any, args: Any) -> Any:
        steps.append(args[0])
        if args[0] == "make":
            return await for_each(client, calls, args)
        await for_each(client, calls[:1], args)
        raise BrokerUnavailable("the process is killed")

    for_each = layouts.SEAL_PARTITION.for_each
    async with broker, impatient:
        for number in range(10):
            await broker.publish("orders", number, key=f"k{number}")
        monkeypatch.setattr(layouts.SEAL_PARTITION, "for_each", dies)
        with pytest.raises(BrokerUnavailable, match="killed"):
            await broker.topics.resize("orders", 4)
        monkeypatch.undo()
        assert steps == ["make", "seal"]
        layout = (await broker.topics.existing("orders")).layout
        assert (layout.is_opening, layout.is_resized) == (True, False)
        assert not await broker.topics.abort_resize("orders")
        with pytest.raises(ConfigError, match="is being resized to 4"):
            await broker.topics.resize("orders", 8)
        several = [impatient.publish("orders", 10 + number, key=f"k{number}") for number in range(10)]
        replies = await asyncio.gather(*several, return_exceptions=True)
        errors = [str(reply) for reply in replies if isinstance(reply, PartitionSealed)]
        assert 0 < len(errors) < 10
        assert all("rsmq topic resize orders 4" in error for error in errors)
        async with broker.running():
            for number in range(10):
                await broker.publish("orders", 20 + number, key=f"k{number}")
            await until(lambda: len(seen) == 30 - len(errors), "all is handled")
    assert (await layout_of(make_broker())).is_resized


async def test_a_worker_seals_many_partitions_in_as_many_writes_as_few(
    make_broker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishers wait for it: each partition that is asked for on its own is one more wait for the server."""
    writes, for_each = list[int](), layouts.SEAL_PARTITION.for_each

    async def dies(client: Any, calls: Any, args: Any) -> Any:
        if args[0] == "make":
            return await for_each(client, calls, args)
        raise BrokerUnavailable("the process is killed")

    for count in (2, 32):
        broker, asked = make_broker(partitions=count), list[Any]()
        async with broker:
            await broker.topics.ensure(f"orders{count}")
            broker.handler(f"orders{count}", group="g")(is_called)
            async with broker.running():
                pass
            with monkeypatch.context() as patch:
                patch.setattr(layouts.SEAL_PARTITION, "for_each", dies)
                with pytest.raises(BrokerUnavailable, match="killed"):
                    await broker.topics.resize(f"orders{count}", 2 * count)
            with monkeypatch.context() as patch:
                for name in ("execute_command", "pipelined"):
                    patch.setattr(broker.client, name, counted(getattr(broker.client, name), asked))
                assert not await broker.topics.go_on_with_resize(f"orders{count}")
        writes.append(len(asked))
    assert writes[0] == writes[1]


def counted(call: Any, asked: list[Any]) -> Any:
    """The same, noted."""

    async def ask(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return await call(*args, **options)

    return ask


async def test_a_publisher_reads_a_topic_that_is_being_sealed_once_a_write(
    make_broker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waits: with hundreds of them it would ask for the topic all the time, and keep up the process that seals."""
    broker, impatient = make_broker(partitions=32), make_broker(unavailable_timeout="200ms")
    for_each, reads, writes = layouts.SEAL_PARTITION.for_each, list[Any](), list[Any]()

    async def dies(client: Any, calls: Any, args: Any) -> Any:
        replies = await for_each(client, calls, args)
        if args[0] == "seal":
            raise BrokerUnavailable("the process is killed")
        return replies

    async with broker, impatient:
        await impatient.publish("orders", 0, key="k0")
        monkeypatch.setattr(layouts.SEAL_PARTITION, "for_each", dies)
        with pytest.raises(BrokerUnavailable, match="killed"):
            await broker.topics.resize("orders", 64)
        monkeypatch.setattr(sender, "topic_after", counted(sender.topic_after, reads))
        monkeypatch.setattr(sender.Sender, "_exchange", noted(sender.Sender._exchange, writes))
        several = [impatient.publish("orders", number, key=f"k{number}") for number in range(200)]
        replies = await asyncio.gather(*several, return_exceptions=True)
        assert all(isinstance(reply, PartitionSealed) for reply in replies)
        assert 0 < len(reads) <= len(writes)


def noted(call: Any, writes: list[Any]) -> Any:
    """A method that writes batches, which are noted."""

    async def exchange(self: Any, batches: Any, moving: Any) -> Any:
        writes.append(batches)
        return await call(self, batches, moving)

    return exchange


async def test_a_partition_whose_slot_is_moving_keeps_no_other_from_being_sealed(
    make_broker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishers wait until all are sealed: so the resize does not end at the first one that cannot be, and does not
    begin again."""
    broker, asked = make_broker(partitions=4), list[tuple[str, str]]()
    for_each = layouts.SEAL_PARTITION.for_each

    async def moves(client: Any, calls: Any, args: Any) -> Any:
        asked.extend((args[0], keys[0]) for keys in calls)
        moving = (args[0], broker.keys.stream("orders", 1))
        replies = await for_each(client, [keys for keys in calls if keys[0] != moving[1]], args)
        for keys in calls:
            if keys[0] == moving[1] and asked.count(moving) < 3:
                replies.insert(calls.index(keys), SlotMoving("Multiple keys request during rehashing of slot"))
            elif keys[0] == moving[1]:
                replies[calls.index(keys) : 0] = await for_each(client, [keys], args)
        return replies

    async with broker:
        await broker.topics.ensure("orders")
        monkeypatch.setattr(layouts.SEAL_PARTITION, "for_each", moves)
        assert (await broker.topics.resize("orders", 8)).partitions == 8
    order = [int(key.rpartition(".")[2].rstrip("}")) for step, key in asked if step == "seal"]
    assert order == [0, 1, 2, 3, 1, 1]


async def test_a_resize_waits_for_a_slot_that_is_moving(make_broker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the group, too, whose members are asked before the first partition is sealed."""
    broker = make_broker(partitions=2)
    broker.handler("orders", group="g")(is_called)

    async def moves(_client: Any, _keys: Any) -> Any:
        raise SlotMoving("Multiple keys request during rehashing of slot")

    async with broker:
        async with broker.running():
            pass
        monkeypatch.setattr(layouts, "MEASURE_MEMBERS", moves)
        assert (await broker.topics.resize("orders", 4)).layout.following is not None
        assert await broker.topics.go_on_with_resize("orders") == "a slot that is moving to another node"
        monkeypatch.undo()
        assert await broker.topics.go_on_with_resize("orders") == ""


async def test_a_resize_and_new_bands_wait_while_the_slot_of_their_topic_moves(
    make_broker: Make, cluster: Cluster
) -> None:
    """Key by key: the command waits until the slot has moved."""
    broker = make_broker(partitions=2)
    async with broker:
        await broker.topics.ensure("orders")
        for change in (broker.topics.resize("orders", 4), broker.topics.set_bands("orders", ("urgent", "normal"))):
            moving = ExitStack()
            async with anyio.create_task_group() as tasks:
                await anyio.to_thread.run_sync(moving.enter_context, cluster.moving(broker.keys.topic("orders")))
                tasks.start_soon(ends, change)
                await anyio.sleep(0.1)
                await anyio.to_thread.run_sync(moving.close)
        layout = (await broker.topics.existing("orders")).layout
        assert (layout.current.count, layout.bands) == (4, ("urgent", "normal"))


async def ends(change: Coroutine[Any, Any, Any]) -> None:
    """It raises nothing."""
    await change


async def is_called(number: int) -> None:
    """A handler."""


async def layout_of(broker: Broker) -> Any:
    """The layout of the topic as it is stored."""
    async with broker:
        return (await broker.topics.existing("orders")).layout


async def test_outputs_that_wait_for_a_sealed_partition_go_to_those_that_follow_once_and_in_order(
    make_broker: Make,
) -> None:
    """One that was relayed before the resize is not stored again; the mark passes none of those that wait."""
    broker, outside = make_broker(partitions=1), make_broker(partitions=1)

    @broker.handler("in", group="g")
    async def handle(number: int) -> None:
        """Nothing is published here: the test writes the outputs."""

    async with outside, broker, broker.running():
        await outside.topics.ensure("out")
        out = outside.keys.out("in", 0, "g")
        await wait(outside, out, 1, 0)
        await relayed(broker, outside, out)  # the relay knows the topic as it was
        await sealed(outside, "out", 3)
        after = (await outside.topics.existing("out")).layout.partition_after(0, "a")
        await wait(outside, out, 1, 0)  # again: its XDEL was lost
        for position, partition in enumerate((0, after, 0, after), 2):
            await wait(outside, out, position, partition)
        await relayed(broker, outside, out)
        found = [
            int(entry[1][1])
            for number in (0, after)
            for entry in await ask(outside, "XRANGE", outside.keys.stream("out", number), "-", "+")
        ]
        assert found == [1, 2, 3, 4, 5]


async def wait(broker: Broker, out: str, position: int, partition: int) -> None:
    """An output waits in an out-stream."""
    fields = ("data", position, "id", f"id{position}", "key", "a", "out.topic", "out", "out.partition", partition)
    if position == 1:
        await ask(broker, "DEL", out)  # a new stream takes low ids again
    await ask(broker, "XADD", out, f"{position}-1", *fields)


async def relayed(broker: Broker, outside: Broker, out: str) -> None:
    """Wake the relay, and wait until nothing is left."""

    async def is_relayed() -> bool:
        return not await ask(outside, "XLEN", out)

    assert broker.worker is not None
    (consumer,) = broker.worker.consumers
    await until(lambda: 0 in consumer.lanes, "it has its partition")
    consumer.settler.outputs.relay.wake(consumer.lanes[0])
    await until(is_relayed, "they are relayed")
