"""A limit over the whole group: never more calls at once than it says, in order, nothing lost, nobody left without."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq import Broker, ConfigError, Rate, Settings
from rsmq.consumer.consumer import Consumer
from rsmq.consumer.turnstile import GatedTurnstile, Turnstile, shares
from rsmq.handler import build_handler
from tests.contract.witness import Witness, settled
from tests.patience import until


@given(st.integers(1, 200), st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=40))
def test_the_shares_are_the_limit(limit: int, names: set[str]) -> None:
    """All together, equal up to one, the same whoever computes them."""
    members = tuple(sorted(names))
    calls = shares(limit, members, "t/g")
    assert sum(calls.values()) == limit
    assert max(calls.values()) - min(calls.values()) <= 1
    assert shares(limit, tuple(reversed(members)), "t/g") == calls


async def test_a_turnstile() -> None:
    """Closed for others when the share runs; who is inside takes the next one without leaving; a smaller share ends."""
    share = 2
    line = Turnstile(lambda: share)
    line.extend(range(6))  # type: ignore[arg-type]

    async def enter(hold: anyio.Event, taken: list[Any]) -> None:
        taken.append(line.popleft())
        await hold.wait()
        while line:
            taken.append(line.popleft())
        line.leave()

    hold, other, taken = anyio.Event(), anyio.Event(), list[Any]()
    assert len(line) == 2, "so many may start"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter, hold, taken)
        tasks.start_soon(enter, other, taken)
        await until(lambda: len(taken) == 2, "both are inside")
        assert (len(line), bool(line), line.waiting) == (0, False, 4)
        share = 1
        hold.set()  # one too many is inside: this one may take nothing more
        await until(lambda: repr(line) == "<Turnstile 4 waiting, 1 of 1 inside>", "it left")
        assert not line
        other.set()
    assert taken == list(range(6)), "the other one took the rest"
    assert (len(line), line.waiting) == (0, 0)


class Crowd:
    """Counts the calls that run at once, over all members, until it is opened."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.now = self.most = 0
        self.witness = Witness()

    async def run(self, orders: list[dict[str, Any]]) -> None:
        """One call."""
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.open.wait()
            await asyncio.sleep(0)
            for order in orders:
                self.witness.note((order["key"], order["n"]))
        finally:
            self.now -= 1


Make = Callable[..., Broker]


@pytest.fixture
def make(server_url: str, prefix: str) -> Make:
    """Makes members of one group."""

    def member(crowd: Crowd, **options: Any) -> Broker:
        broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

        async def one(order: dict[str, Any]) -> None:
            await crowd.run([order])

        async def many(orders: list[dict[str, Any]]) -> None:
            await crowd.run(orders)

        broker.handler("t", group="g", **options)(many if "batch" in options else one)
        return broker

    return member


async def publish(broker: Broker, keys: int = 40, each: int = 3) -> set[tuple[str, int]]:
    """So many messages of so many keys."""
    items = [{"key": f"k{key}", "n": n} for n in range(each) for key in range(keys)]
    await broker.publish_many("t", items, key=lambda item: str(item["key"]))
    return {(str(item["key"]), int(str(item["n"]))) for item in items}


def consumer_of(broker: Broker) -> Consumer:
    """The consumer of its only handler."""
    assert broker.worker is not None
    (consumer,) = broker.worker.consumers
    return consumer


async def agree(brokers: list[Broker], calls: list[int]) -> None:
    """Wait until each knows the others, and owns partitions exactly if it may make calls."""
    members = [consumer_of(broker) for broker in brokers]
    await until(lambda: all(len(each.membership.live) == len(members) for each in members), "they see each other")
    assert sorted(each.most_calls for each in members) == calls
    await until(lambda: sum(len(each.lanes) for each in members) == 8, "every partition has an owner")
    await until(lambda: all(bool(each.lanes) == bool(each.most_calls) for each in members), "who may call")


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"group_concurrency": 5}, [2, 3]),
        ({"group_concurrency": 5, "concurrency": 2}, [2, 2]),
        ({"group_concurrency": 1}, [0, 1]),
        ({"group_concurrency": 3, "batch": 4, "linger": timedelta(milliseconds=5)}, [1, 2]),
        ({"group_concurrency": 2, "rate": Rate(10_000)}, [1, 1]),
        ({"group_concurrency": 2, "ordering": "none"}, [1, 1]),
    ],
)
async def test_the_group_is_limited(make: Make, options: dict[str, Any], calls: list[int]) -> None:
    """Two members run exactly the limit together, in order per key, and handle everything once."""
    crowd = Crowd()
    brokers = [make(crowd, **options), make(crowd, **options)]
    async with brokers[0].running(), brokers[1].running():
        await agree(brokers, calls)
        expected = await publish(brokers[0])
        await until(lambda: crowd.now == sum(calls), "as many calls run as may")
        await until(lambda: all(_waiting(broker) for broker, _ in zip(brokers, calls, strict=True)), "the rest waits")
        crowd.open.set()
        await crowd.witness.sees(expected)
        await settled(brokers[0], "t")
    assert crowd.most == sum(calls)
    by_key = defaultdict(list)
    for key, n in crowd.witness.seen:
        by_key[key].append(n)
    assert options.get("ordering") == "none" or all(numbers == sorted(numbers) for numbers in by_key.values())


def _waiting(broker: Broker) -> bool:
    """Whether something waits in a member that owns anything."""
    consumer = consumer_of(broker)
    line = consumer.queue.ready
    assert isinstance(line, Turnstile)
    return not consumer.lanes or line.waiting > 0


async def test_who_stays_takes_over(make: Make) -> None:
    """When a member leaves, the others run its share too; when the only one that may leaves, another one may."""
    crowd = Crowd()
    async with AsyncExitStack() as stack:
        stay = await stack.enter_async_context(make(crowd, group_concurrency=1).running())
        async with AsyncExitStack() as leaving:
            go = await leaving.enter_async_context(make(crowd, group_concurrency=1).running())
            await agree([stay, go], [0, 1])
            expected = await publish(stay)
            await until(lambda: crowd.now == 1, "one call runs")
            crowd.open.set()
        await crowd.witness.sees(expected)
        await settled(stay, "t")
        assert consumer_of(stay).most_calls == 1
    assert crowd.most == 1


async def test_a_growing_share_is_used(make: Make) -> None:
    """What waits for a place starts as soon as a member has gone, without a message coming in."""
    crowd = Crowd()
    async with make(crowd, group_concurrency=4).running() as stay:
        async with make(crowd, group_concurrency=4).running() as go:
            await agree([stay, go], [2, 2])
            await publish(stay)
            await until(lambda: crowd.now == 4, "each runs its half")
            go.stop(timedelta(0))
        await until(lambda: crowd.now == 4, "the one that is left runs all")
        crowd.open.set()
        await settled(stay, "t")
    assert crowd.most == 4


async def test_both_limits() -> None:
    """A rate and a limit over the group: what may start is what both allow."""
    inside = 5
    line = GatedTurnstile(lambda: inside, Rate(3, per=timedelta(hours=1)), lambda: 1, lambda: None)
    line.extend(range(9))  # type: ignore[arg-type]
    assert (len(line), line.waiting) == (3, 9)
    inside = 2
    assert len(line) == 2
    inside = 5
    taken = []
    while line:
        taken.append(line.popleft())
    assert taken == [0, 1, 2], "the rate is used up, though there is room"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"group_concurrency": 0}, "group_concurrency=0 is not a whole number of 1 or more"),
        ({"group_concurrency": 2, "distribution": "shared"}, "a limit over the group cannot hold: leave"),
    ],
)
def test_mistakes(options: dict[str, Any], problem: str) -> None:
    """What cannot work is refused when it is registered."""

    async def handle(order: dict[str, int]) -> None: ...

    with pytest.raises(ConfigError, match=problem):
        build_handler(handle, "t", group="g", **options)
