"""Memory is bounded by settings, in the worker and in the server: promise 7."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy, TooLarge, TopicFull
from tests.contract.witness import Witness, ask, lengths, patient, settled

TIDY: dict[str, Any] = {
    "retention_interval": timedelta(milliseconds=50),
    "retention_age": timedelta(0),
    "retention_length": 0,
}


async def delivered(broker: Broker, partitions: int) -> int:
    """How many messages the members have in flight."""
    replies = [
        await ask(broker, "XPENDING", broker.keys.stream("t", partition), "g") for partition in range(partitions)
    ]
    return sum(reply[0] for reply in replies)


@pytest.mark.parametrize("partitions", [1, 4])
async def test_prefetch_bounds_what_a_worker_holds(
    make_broker: Callable[..., Broker], witness: Witness, partitions: int
) -> None:
    """A member never has more messages in flight than its prefetch."""
    broker, began, gate = make_broker(prefetch=20), anyio.Event(), anyio.Event()

    @broker.handler("t", group="g", concurrency=3)
    async def handle(order: dict[str, int]) -> None:
        began.set()
        await gate.wait()
        witness.note(order["n"])

    async with broker:
        await patient(broker.topics.ensure)("t", partitions)
        await broker.publish_many("t", [{"n": n} for n in range(300)])
        async with broker.running():
            await began.wait()
            await anyio.sleep(0.5)  # it could read on and on: that it does not is the thing under test
            assert 3 <= await delivered(broker, partitions) <= 20 + partitions
            gate.set()
            await witness.sees(range(300))
            await settled(broker, "t")


async def test_one_stuck_key_does_not_fill_the_worker(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """More messages than the prefetch wait behind a key with a retry: other keys are still handled."""
    broker, gate = make_broker(prefetch=20), anyio.Event()

    @broker.handler("t", group="g", partitions=1, retry=RetryPolicy(max_attempts=10_000, wait=wait_fixed(0.2)))
    async def handle(order: dict[str, int], message: Message) -> None:
        if message.key == "stuck" and order["n"] == 0 and not gate.is_set():
            raise ValueError("not yet")
        witness.note((message.key, order["n"]))

    async with broker.running():
        for n in range(100):
            await broker.publish("t", {"n": n}, key="stuck")
        for n in range(20):
            await broker.publish("t", {"n": n}, key="free")
        await witness.sees([("free", n) for n in range(20)])
        assert not [name for name in witness.seen if name[0] == "stuck"]
        gate.set()
        await witness.sees([("stuck", n) for n in range(100)])
        await settled(broker, "t")
    assert [n for key, n in witness.seen if key == "stuck"] == list(range(100))


async def test_retention_never_passes_what_a_group_needs(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """A message is kept until all groups have received and settled it; then it is trimmed."""
    broker, gate = make_broker(**TIDY), anyio.Event()

    @broker.handler("t", group="quick", partitions=1)
    async def quick(order: dict[str, int]) -> None:
        witness.note(("quick", order["n"]))

    @broker.handler("t", group="failing", ordering="none", retry=RetryPolicy(1000, wait=wait_fixed(0.05)))
    async def failing(order: dict[str, int]) -> None:
        if order["n"] == 30 and not gate.is_set():
            raise ValueError("not yet")
        witness.note(("failing", order["n"]))

    async with broker:
        await patient(broker.topics.ensure)("t", 1)
        await broker.publish_many("t", [{"n": n} for n in range(500)])
        async with broker.running():
            await witness.sees([("quick", n) for n in range(500)])
            await witness.sees([("failing", n) for n in range(500) if n != 30])
            with anyio.fail_after(30):
                while await lengths(broker, "t") > 31:  # what is parked stays, and what is in one node with it
                    await anyio.sleep(0.02)
            entries = await ask(broker, "XRANGE", broker.keys.stream("t", 0), "-", "+")
            assert b'{"n":30}' in [fields[1] for _, fields in entries]
            gate.set()
            await witness.sees([("failing", 30)])
            await settled(broker, "t")


async def test_a_full_topic_is_an_error_to_the_publisher(broker: Broker, witness: Witness) -> None:
    """on_full=reject: accepted messages are kept, others are refused until the consumers have caught up."""
    async with broker:
        await patient(broker.topics.ensure)("t", 1)
        await patient(broker.topics.change)("t", max_length=10, retention_length=0, retention_age=timedelta(0))
        for n in range(10):
            await broker.publish("t", {"n": n})
        with pytest.raises(TopicFull) as full:
            await broker.publish("t", {"n": 10})
        assert (full.value.topic, full.value.max_length) == ("t", 10)
        assert await lengths(broker, "t") == 10

        @broker.handler("t", group="g")
        async def handle(order: dict[str, int]) -> None:
            witness.note(order["n"])

        async with broker.running():
            await witness.sees(range(10))
            await settled(broker, "t")
            await broker.publish("t", {"n": 10})  # makes room by itself: what is settled need not be kept
            await witness.sees(range(11))


async def test_a_full_topic_with_on_full_trim_drops_the_oldest(broker: Broker) -> None:
    """on_full=trim: the newest messages are kept, and the publisher never waits."""
    async with broker:
        await patient(broker.topics.ensure)("t", 1)
        await patient(broker.topics.change)("t", max_length=100, on_full="trim")
        await broker.publish_many("t", [{"n": n} for n in range(2000)])
        assert 100 <= await lengths(broker, "t") <= 200
        newest = await ask(broker, "XREVRANGE", broker.keys.stream("t", 0), "+", "-", "COUNT", 1)
        assert b'{"n":1999}' in newest[0][1]


async def test_too_large_is_refused_before_sending(make_broker: Callable[..., Broker]) -> None:
    """The limit is a setting, by default 256 KiB, and nothing is sent to the server."""
    async with make_broker() as broker:
        with pytest.raises(TooLarge):
            await broker.publish("t", b"x" * (256 * 1024 + 1))
        await broker.publish("t", b"x" * (256 * 1024))
        assert await lengths(broker, "t") == 1
    async with make_broker(payload_limit="1KiB") as broker:
        with pytest.raises(TooLarge):
            await broker.publish("t", b"x" * 1025)


async def test_dead_letters_are_bounded(make_broker: Callable[..., Broker]) -> None:
    """dlq_length keeps the newest; the count may differ by a node of the stream."""
    broker = make_broker(dlq_length=10)

    @broker.handler("t", group="g", partitions=1, retry=RetryPolicy(max_attempts=1))
    async def handle(_order: dict[str, int]) -> None:
        raise ValueError("no")

    async with broker:
        await patient(broker.topics.ensure)("t", 1)
        await broker.publish_many("t", [{"n": n} for n in range(400)])
        async with broker.running():
            await settled(broker, "t")
            kept = await ask(broker, "XLEN", broker.keys.dlq("t", 0, "g"))
    assert 10 <= kept <= 120
