"""Shared distribution: whose messages may be adopted, and what their owner does when it has lost them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, Message, Settings
from rsmq.handler.options import Distribution
from tests.chaos.system_faults import FaultyServer
from tests.contract.witness import ask, settled
from tests.patience import until


def member_settings(settings: Settings, lease: float, **more: Any) -> Settings:
    """One partition, no presence: only idle times decide."""
    short = {"partitions": 1, "preflight": "warn", "lease_ttl": timedelta(seconds=lease), **more}
    return replace(settings, **(short | {"presence_grace": timedelta(0)}))


async def test_slow_messages_of_a_member_with_a_longer_lease_stay_with_it(settings: Settings) -> None:
    """It touches them every quarter of its own lease, which is longer than the lease of the other member."""
    slow, quick = Broker(member_settings(settings, 12)), Broker(member_settings(settings, 1))
    starts, go = Counter[int](), anyio.Event()

    async def handle(order: dict[str, int]) -> None:
        starts[order["n"]] += 1
        await go.wait()

    for broker in (slow, quick):
        broker.handler("t", group="g", distribution="shared", concurrency=8)(handle)
    async with slow.running():
        await slow.publish_many("t", [{"n": n} for n in range(8)])
        await until(lambda: len(starts) == 8, "all run")
        async with quick.running():
            stream = quick.keys.stream("t", 0)

            async def idle_ms() -> int:
                rows = await ask(quick, "XPENDING", stream, "g", "-", "+", 1)
                return int(rows[0][2])

            async def is_due() -> bool:
                return await idle_ms() > 1500 or starts != Counter(range(8))

            async def is_touched() -> bool:
                return await idle_ms() < 1000

            await until(is_due, "the quick one has looked several times")
            await until(is_touched, "the slow one touches them")
            assert starts == Counter(range(8))
            go.set()
            await settled(quick, "t")
    assert starts == Counter(range(8))


async def test_messages_of_a_live_member_stay_with_it_when_the_servers_clock_is_set_forward() -> None:
    """They all seem to be idle until it touches them. What a dead member has left is adopted later all the same."""
    starts, go = Counter[int](), anyio.Event()

    async def handle(order: dict[str, int]) -> None:
        starts[order["n"]] += 1
        await go.wait()

    with FaultyServer() as server:
        slow, quick = (Broker(member_settings(Settings(url=server.url), lease)) for lease in (4, 1))
        for broker in (slow, quick):
            broker.handler("t", group="g", distribution="shared", concurrency=8)(handle)
        stream = slow.keys.stream("t", 0)

        async def idle_ms() -> int:
            rows = await ask(slow, "XPENDING", stream, "g", "-", "+", 10)
            return max((int(row[2]) for row in rows), default=0)

        async def is_due() -> bool:
            return await idle_ms() > 500 or starts != Counter(range(8))

        async def is_touched() -> bool:
            return await idle_ms() < 250 or starts != Counter(range(8))

        async with slow.running():
            await slow.publish_many("t", [{"n": n} for n in range(8)])
            await until(lambda: len(starts) == 8, "all run")
            async with quick.running():
                assert quick.worker is not None
                lanes = quick.worker.consumers[0].lanes
                await until(lambda: lanes, "the quick one looks for abandoned messages")
                (lane,) = lanes.values()
                await until(lambda: lane.recovery.claims, "it has begun")
                await until(lambda: not lane.recovery.claims, "it knows the clock")
                for hours in range(1, 7):  # one of them comes before a search, and that before a touch
                    await until(is_due, "the slow one is about to touch them")
                    await until(is_touched, "its next touch is as far away as it can be")
                    server.faults.step_clock(3600 * hours)
                    await until(is_touched, "the slow one touches them")
                assert starts == Counter(range(8))
                (oldest,) = await ask(slow, "XRANGE", stream, "-", "+", "COUNT", 1)
                await ask(slow, "XCLAIM", stream, "g", "dead", 0, oldest[0], "JUSTID")
                await until(lambda: starts[0] == 2, "what the dead one has is adopted")
                go.set()
                await settled(quick, "t")
    assert starts == Counter(range(8)) + Counter([0])


@pytest.mark.parametrize("batch", [None, 4])
async def test_messages_that_another_member_took_over_are_dropped_by_their_owner(
    settings: Settings, batch: int | None
) -> None:
    """The touch reports them: what runs is cancelled, what waits is not started, and the rest goes on."""
    broker = Broker(member_settings(settings, 2))
    starts, ends, go = list[int](), list[int](), anyio.Event()

    async def handle(orders: list[dict[str, int]]) -> None:
        starts.extend(order["n"] for order in orders)
        await go.wait()
        ends.extend(order["n"] for order in orders)

    async def handle_one(order: dict[str, int]) -> None:
        await handle([order])

    decorate = broker.handler("t", group="g", distribution="shared", concurrency=4 if batch is None else 1, batch=batch)
    decorate(handle_one if batch is None else handle)
    async with broker.running():
        stream = broker.keys.stream("t", 0)
        await broker.publish_many("t", [{"n": n} for n in range(8)])
        await until(lambda: len(starts) == 4, "four run and four wait")
        assert broker.worker is not None
        (lane,) = broker.worker.consumers[0].lanes.values()
        await until(lambda: len(lane.in_flight) == 8, "all are read")
        ids = [entry_id for entry_id, _ in await ask(broker, "XRANGE", stream, "-", "+")]
        taken = [ids[0], ids[7]]
        await ask(broker, "XCLAIM", stream, "g", "other", 0, *taken, "JUSTID")
        await until(lambda: lane.in_flight == set(ids[1:7]), "it has dropped both")
        go.set()
        await until(lambda: not lane.in_flight, "the rest is settled")
        assert set(ends) == set(range(1, 7))
        rows = await ask(broker, "XPENDING", stream, "g", "-", "+", 10)
        assert [(row[0], row[1]) for row in rows] == [(each, b"other") for each in taken]
        assert 7 not in starts


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("distribution", ["shared", "hash"])
async def test_group_that_is_made_again_gives_messages_in_flight_to_one_handler_only(
    settings: Settings, distribution: Distribution, batch: int | None
) -> None:
    """They are read again while they run. The first call is cancelled, and the second one settles them, once."""
    broker = Broker(member_settings(settings, 2))
    running, starts, go = Counter[int](), Counter[int](), anyio.Event()

    async def handle(messages: list[Message]) -> None:
        numbers = [int(message.data) for message in messages]
        running.update(numbers)
        starts.update(numbers)
        assert max(running.values()) == 1
        try:
            for message in messages:
                await message.publish("out", int(message.data))
            await go.wait()
        finally:
            running.subtract(numbers)

    async def handle_one(message: Message) -> None:
        await handle([message])

    register = broker.handler("t", group="g", ordering="none", distribution=distribution, concurrency=4, batch=batch)
    register(handle_one if batch is None else handle)
    async with broker.running():
        stream = broker.keys.stream("t", 0)
        await broker.publish_many("t", range(4))
        await until(lambda: len(running) == 4, "all run")
        again = "redis.call('XGROUP', 'DESTROY', KEYS[1], 'g') redis.call('XGROUP', 'CREATE', KEYS[1], 'g', '0')"
        await ask(broker, "EVAL", again, 1, stream)
        await until(lambda: min(starts.values()) == 2, "each has started again")
        go.set()
        await settled(broker, "t")
        assert starts == dict.fromkeys(range(4), 2)
        assert await ask(broker, "XLEN", broker.keys.stream("out", 0)) == 4
