"""A partition is handed over while the connection to the server breaks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, BrokerUnavailable, Message, RetryPolicy, Settings
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.redis.scripts import UNPARK_MESSAGES
from tests.contract.witness import ask, lanes, settled
from tests.patience import until


async def test_lease_is_released_after_the_connection_broke(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane is dropped by then: a lease left on the server would block its partition until it runs out."""
    failed: list[Lease] = []
    release = Leases.release

    async def broken(self: Leases, lease: Lease, late_reader: str) -> None:
        if failed.count(lease) < 2:
            failed.append(lease)
            raise BrokerUnavailable("the connection breaks")
        await release(self, lease, late_reader)

    monkeypatch.setattr(Leases, "release", broken)

    def member() -> Broker:
        broker = Broker(replace(settings, lease_ttl=timedelta(minutes=2), preflight="warn"))

        @broker.handler("t", group="g")
        async def handle(_order: dict[str, int]) -> None:
            """Never called: nothing is published."""

        return broker

    first, second = member(), member()
    async with first.running():
        await until(lambda: len(lanes(first)) == 8, "the first has all")
        async with second.running():
            await until(lambda: len(lanes(first)) == len(lanes(second)) == 4, "each has half", 20)
            assert len(failed) >= 8
            monkeypatch.undo()


async def deliver_to_the_dead(broker: Broker) -> str:
    """All that is published is pending for a member that is gone, and has given its lease back. Returns the stream."""
    stream = broker.keys.stream("t", 0)
    await ask(broker, "XGROUP", "CREATE", stream, "g", "0")
    await ask(broker, "XREADGROUP", "GROUP", "g", "dead", "STREAMS", stream, ">")
    await ask(broker, "HSET", broker.keys.lease("t", 0, "g"), "owner", "", "epoch", 1)
    return stream


async def test_cancelled_handover_keeps_the_attempts_that_another_member_started(settings: Settings) -> None:
    """Messages that were taken over and handed back are delivered to this member, but they are not unseen."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    seen, is_over = list[tuple[int, int]](), anyio.Event()

    @broker.handler("t", group="g", concurrency=1)
    async def handle(order: dict[str, int], message: Message) -> None:
        seen.append((order["n"], message.attempt))
        await is_over.wait()

    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(3)])
        await deliver_to_the_dead(broker)
        async with broker.running():
            await until(lambda: seen, "the first one runs")
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            (lane,) = consumer.lanes.values()
            assert not await consumer.lifecycle.quiesce(lane, 0)
            await consumer.lifecycle.resume(lane)
            is_over.set()
            await settled(broker, "t")
    assert seen == [(n, 2) for n in range(3)]


async def test_messages_taken_over_survive_a_deleted_consumer(settings: Settings) -> None:
    """Another client deletes our consumer while messages of a dead member wait for their turn: they are handled."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    seen, is_over = list[tuple[int, int]](), anyio.Event()

    @broker.handler("t", group="g", concurrency=1)
    async def handle(order: dict[str, int], message: Message) -> None:
        seen.append((order["n"], message.attempt))
        await is_over.wait()

    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(3)])
        stream = await deliver_to_the_dead(broker)
        async with broker.running():
            await until(lambda: seen, "the first one runs")
            assert broker.worker is not None
            await ask(broker, "XGROUP", "DELCONSUMER", stream, "g", broker.worker.member)
            is_over.set()
            await until(lambda: len(seen) == 3, "all of it is handled")
            await settled(broker, "t")
    assert seen == [(n, 2) for n in range(3)]


async def test_message_that_fails_during_a_handover_does_not_start_again_here(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its retry belongs to the next owner. Here the end of the handover would cancel it, with others of its batch."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    is_begun, may_fail, is_emptied = anyio.Event(), anyio.Event(), anyio.Event()

    @broker.handler("t", group="g", retry=RetryPolicy(wait=wait_fixed(3600)))
    async def handle(_order: dict[str, int]) -> None:
        is_begun.set()
        await may_fail.wait()
        raise ValueError("this attempt fails")

    async with broker.running():
        await broker.publish("t", {"n": 1}, key="k")
        await until(is_begun.is_set, "it runs")
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        (lane,) = consumer.lanes.values()
        withdraw = consumer.queue.withdraw

        def withdrawn(*args: Any) -> list[Message]:
            is_emptied.set()
            return withdraw(*args)

        monkeypatch.setattr(consumer.queue, "withdraw", withdrawn)

        async def fail() -> None:
            await is_emptied.wait()
            may_fail.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            assert await consumer.lifecycle.quiesce(lane, 60)
        assert await ask(broker, "ZCARD", broker.keys.retry("t", 0, "g")) == 1
        assert not lane.flows.parked


async def test_handover_waits_for_a_retry_that_is_on_its_way(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without key order a retry comes from the server: after the handover it would start in a lane that is given up."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    is_due, may_arrive, is_emptied = anyio.Event(), anyio.Event(), anyio.Event()

    @broker.handler("t", group="g", ordering="none", retry=RetryPolicy(wait=wait_fixed(0.05)))
    async def handle(_order: dict[str, int]) -> None:
        raise ValueError("this attempt fails")

    async with broker.running():
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        call = consumer.settler.ask

        async def ask_late(script: Any, *command: Any) -> Any:
            reply = await call(script, *command)
            if script is UNPARK_MESSAGES and reply[2:]:
                is_due.set()
                await may_arrive.wait()
            return reply

        monkeypatch.setattr(consumer.settler, "ask", ask_late)
        await broker.publish("t", {"n": 1})
        await until(is_due.is_set, "its retry is on its way")
        (lane,) = consumer.lanes.values()
        withdraw, on_their_way = consumer.queue.withdraw, list[int]()
        wait_until_settled = consumer.settler.wait_until_settled

        def withdrawn(*args: Any) -> list[Message]:
            is_emptied.set()
            return withdraw(*args)

        async def waits(*args: Any) -> None:
            on_their_way.append(lane.recovery.claims)
            await wait_until_settled(*args)

        async def let_it_arrive() -> None:
            await is_emptied.wait()
            may_arrive.set()

        monkeypatch.setattr(consumer.queue, "withdraw", withdrawn)
        monkeypatch.setattr(consumer.settler, "wait_until_settled", waits)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_it_arrive)
            assert await consumer.lifecycle.quiesce(lane, 60)
        assert (on_their_way, consumer.pool.running_of(lane), list(consumer.queue.ready)) == ([0], 0, [])
        monkeypatch.undo()
