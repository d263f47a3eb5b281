"""A partition changes hands while the line to the server breaks."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable, Message, Settings
from rsmq.heartbeat.lease import Lease, Leases
from tests.contract.witness import ask, lanes, settled
from tests.patience import until


async def test_a_lease_is_given_back_though_the_line_breaks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane is dropped by then: kept on the server, the lease would hold up its partition until it runs out."""
    failed: list[Lease] = []
    release = Leases.release

    async def broken(self: Leases, lease: Lease) -> None:
        if failed.count(lease) < 2:
            failed.append(lease)
            raise BrokerUnavailable("the line breaks")
        await release(self, lease)

    monkeypatch.setattr(Leases, "release", broken)

    def member() -> Broker:
        broker = Broker(settings.model_copy(update={"lease_ttl": timedelta(minutes=2), "preflight": "warn"}))

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


async def test_what_another_had_started_stays_charged_when_a_lane_is_kept_after_all(settings: Settings) -> None:
    """It was taken over, and handed back: it is ours by then, but not a message that nobody has ever had in hand."""
    broker = Broker(settings.model_copy(update={"preflight": "warn", "partitions": 1}))
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
            assert not await consumer.warden.quiesce(lane, 0)
            await consumer.warden.resume_lane(lane)
            is_over.set()
            await settled(broker, "t")
    assert seen == [(n, 2) for n in range(3)]


async def test_what_was_taken_over_is_not_lost_with_a_deleted_consumer(settings: Settings) -> None:
    """Somebody deletes our consumer while what a dead member had left waits for its turn: it is handled still."""
    broker = Broker(settings.model_copy(update={"preflight": "warn", "partitions": 1}))
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
