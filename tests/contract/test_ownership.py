"""A partition has one owner at a time, and a member without its lease cannot settle: promise 3."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, ConfigError, Message
from rsmq.handler.handler import Ordering
from rsmq.model.clock import now_ms
from tests.contract.witness import Witness, ask, lanes, patient, settled
from tests.patience import until


async def steal(broker: Broker, partition: int, seconds: float = 1.0) -> None:
    """Another member takes the lease of a partition, for a while."""
    lease = broker.keys.lease("t", partition, "g")
    await ask(broker, "HINCRBY", lease, "epoch", 1)
    await ask(broker, "HSET", lease, "owner", "thief", "until_ms", now_ms() + int(seconds * 1000))


async def pending(broker: Broker, partition: int = 0) -> int:
    """How many messages of a partition are delivered and not settled."""
    reply = await ask(broker, "XPENDING", broker.keys.stream("t", partition), "g")
    return int(reply[0])


async def test_members_share_the_partitions(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """Two members own disjoint halves; when one leaves, the other gets its half; no message is handled twice."""

    def member() -> Broker:
        broker = make_broker()

        @broker.handler("t", group="g")
        async def handle(order: dict[str, int]) -> None:
            witness.note(order["n"])

        return broker

    first, second = member(), member()
    async with first.running():
        async with second.running():
            await until(lambda: len(lanes(first)) == 4 and len(lanes(second)) == 4, "each has half")
            assert lanes(first) | lanes(second) == set(range(8))
            await first.publish_many("t", [{"n": n} for n in range(200)])
            await witness.sees(range(200))
        await until(lambda: len(lanes(first)) == 8, "the first has everything again")
        await first.publish_many("t", [{"n": n} for n in range(200, 400)])
        await witness.sees(range(400))
        await settled(first, "t")
    assert len(witness.seen) == 400


async def test_a_partition_moves_while_a_read_blocks(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """A settlement that is sent with a blocking read takes effect at once, before the read ends."""

    def member() -> Broker:
        broker = make_broker(lease_ttl=timedelta(minutes=2), block=timedelta(minutes=1))

        @broker.handler("t", group="g")
        async def handle(order: dict[str, int]) -> None:
            witness.note(order["n"])

        return broker

    first, second = member(), member()
    async with first.running():
        await first.publish_many("t", [{"n": n} for n in range(20_000)])
        with anyio.fail_after(30):
            async with second.running():  # the first is in the middle of it: some batch is always on its way
                await until(lambda: len(lanes(first)) == 4 and len(lanes(second)) == 4, "each has half")
                await witness.sees(range(20_000))


async def test_a_lost_lease_cancels_its_handler(broker: Broker, witness: Witness) -> None:
    """The handler is cancelled, nothing is settled, and the message is delivered again afterwards."""
    began = anyio.Event()

    @broker.handler("t", group="g", partitions=1)
    async def handle(order: dict[str, int]) -> None:
        try:
            began.set()
            await anyio.sleep(0 if "cancelled" in witness.seen else 600)
        except asyncio.CancelledError:
            witness.note("cancelled")
            raise
        witness.note(order["n"])

    async with broker.running():
        await broker.publish("t", {"n": 1})
        await began.wait()
        await steal(broker, 0)
        await witness.sees(["cancelled"])
        assert await pending(broker) == 1
        await witness.sees([1])
        await settled(broker, "t")


async def test_a_zombie_cannot_settle(broker: Broker, witness: Witness) -> None:
    """A thread cannot be cancelled: if it succeeds after its lease was lost, its message is not settled."""
    began, go_on = threading.Event(), threading.Event()

    @broker.handler("t", group="g", partitions=1)
    def handle(order: dict[str, int], message: Message) -> None:
        began.set()
        go_on.wait(30)
        witness.note((order["n"], message.attempt))

    async with broker.running():
        await broker.publish("t", {"n": 1})
        await until(began.is_set, "the handler runs")
        await steal(broker, 0)
        await until(lambda: 0 not in lanes(broker), "the loss is noticed")
        go_on.set()
        await until(lambda: witness.seen, "the zombie ends")
        assert await pending(broker) == 1
        await until(lambda: len(witness.seen) == 2, "it is handled by the next owner")
        await settled(broker, "t")


async def test_a_batch_with_one_lost_partition_is_cancelled(broker: Broker, witness: Witness) -> None:
    """When one partition of a batch is lost, the batch is cancelled and the other partitions' messages run again."""
    began, batches = anyio.Event(), list[int]()

    @broker.handler("t", group="g", batch=100, linger=timedelta(milliseconds=300), partitions=2)
    async def handle(orders: list[dict[str, int]], messages: list[Message]) -> None:
        batches.append(len(orders))
        if len(batches) == 1:
            began.set()
            await anyio.sleep(600)
        for order, message in zip(orders, messages, strict=True):
            witness.note((message.partition, order["n"]))

    async with broker:
        await patient(broker.topics.ensure)("t", 2)
        async with broker.running():
            # both are ours before the first message comes: a batch of one partition only would not be cancelled
            await until(lambda: lanes(broker) == {0, 1}, "both are ours")
            await asyncio.gather(*[broker.publish("t", {"n": n}, key=f"k{n % 8}") for n in range(40)])
            await began.wait()
            lost = 1
            await steal(broker, lost, seconds=600)
            found = await patient(broker.topics.find)("t")
            assert found is not None
            kept = await ask(broker, "XRANGE", broker.keys.stream("t", 1 - lost), "-", "+")
            await until(lambda: len(set(witness.seen)) == len(kept), "the other partition goes on")
            assert {partition for partition, _ in witness.seen} == {1 - lost}
            await ask(broker, "HSET", broker.keys.lease("t", lost, "g"), "until_ms", 0)
            await until(lambda: len(set(witness.seen)) == 40, "the lost partition too, when it is free")
            await settled(broker, "t")


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_members_that_distribute_otherwise_are_refused(
    make_broker: Callable[..., Broker], distribution: str
) -> None:
    """A group has one distribution: mixed members would break each other's promises."""
    first, second = make_broker(), make_broker()

    async def handle(_order: dict[str, int]) -> None: ...

    other = {"hash": "shared", "shared": "hash"}[distribution]
    first.handler("t", group="g", distribution=distribution)(handle)  # type: ignore[arg-type]
    second.handler("t", group="g", distribution=other)(handle)  # type: ignore[arg-type]
    async with first.running():
        with pytest.raises(ConfigError, match="distribution"):
            async with second.running():
                pass


@pytest.mark.parametrize(("first", "second"), [("key", "none"), ("none", "key"), ("partition", "key")])
async def test_members_with_another_ordering_are_refused(
    make_broker: Callable[..., Broker], first: Ordering, second: Ordering
) -> None:
    """The owner of a partition would decide whether it is handled in order. When all have left, it may change."""

    def member(ordering: Ordering) -> Broker:
        broker = make_broker()

        @broker.handler("t", group="g", ordering=ordering)
        async def handle(_order: dict[str, int]) -> None: ...

        return broker

    refused = pytest.raises(ConfigError, match=f"ordering='{first}'.*not with '{second}'.*Stop all its members")
    async with member(first).running(), member(first).running():
        with refused:
            async with member(second).running():
                pass
    async with member(second).running() as changed:
        await until(lambda: len(lanes(changed)) == 8, "it serves")


async def test_member_that_starts_with_another_ordering_at_the_same_time_is_refused(
    make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again when the others can see it."""

    async def unseen(*_: object) -> None: ...

    first, second = make_broker(), make_broker()
    for broker, ordering in ((first, "key"), (second, "none")):

        @broker.handler("t", group="g", ordering=ordering)  # type: ignore[arg-type]
        async def handle(_order: dict[str, int]) -> None: ...

    monkeypatch.setattr("rsmq.worker.worker.refuse_mixed_ordering", unseen)
    async with first.running():
        with pytest.raises(ConfigError, match="ordering"):
            async with second.running():
                pass


async def test_dead_member_with_another_ordering_is_waited_for(broker: Broker) -> None:
    """A killed worker may be started again at once with another ordering: its heartbeat key outlives it a little."""

    @broker.handler("t", group="g", ordering="none")
    async def handle(_order: dict[str, int]) -> None: ...

    async with broker:
        alive = broker.keys.alive("t", "g", "dead")
        await ask(broker, "SADD", broker.keys.members("t", "g"), "dead")
        await ask(broker, "SET", alive, '{"ordering": "key"}', "PX", 1500)
        async with broker.running():
            assert not await ask(broker, "EXISTS", alive)


async def test_shared_distribution_needs_no_partition_of_its_own(
    make_broker: Callable[..., Broker], witness: Witness
) -> None:
    """Four members share one partition: all of them handle messages, each message is handled one time."""

    def member(number: int) -> Broker:
        broker = make_broker(prefetch=4)

        @broker.handler("t", group="g", distribution="shared", concurrency=2, partitions=1)
        async def handle(order: dict[str, int]) -> None:
            await asyncio.sleep(0.01)
            workers.add(number)
            witness.note(order["n"])

        return broker

    workers: set[int] = set()
    async with member(0).running() as first, member(1).running(), member(2).running(), member(3).running():
        await first.publish_many("t", [{"n": n} for n in range(200)])
        await witness.sees(range(200))
        await settled(first, "t")
    assert workers == {0, 1, 2, 3}
    assert len(witness.seen) == 200
