"""A limit over the whole group: never more calls at once, in order, nothing lost, and every quota is used."""

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

from rsmq import Broker, Concurrency, ConfigError, Rate, RetryPolicy, Settings
from rsmq.consumer.waiting.limits import ConcurrencyLimit, RateLimit, call_quotas
from rsmq.consumer.waiting.queue import Queue
from rsmq.handler.handler import build_handler
from rsmq.model.partition import partition_for
from rsmq.redis.scripts import TAKE_PERMITS
from tests.consumer.members import consumer_of
from tests.contract.witness import Witness, settled
from tests.patience import until


@given(st.integers(1, 200), st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=40))
def test_call_quotas_add_up_to_the_limit(limit: int, names: set[str]) -> None:
    """They differ by one at most, and every member computes the same."""
    members = tuple(sorted(names))
    calls = call_quotas(limit, members, "t/g")
    assert sum(calls.values()) == limit
    assert max(calls.values()) - min(calls.values()) <= 1
    assert call_quotas(limit, tuple(reversed(members)), "t/g") == calls


async def test_concurrency_limit_admits_as_many_tasks_as_its_quota() -> None:
    """A task that started a message may start the next one; it must stop when the quota has shrunk below the tasks."""
    quota, queue = 2, Queue(is_ordered=False)
    queue.group_limit = limit = ConcurrencyLimit(lambda: quota)
    queue.ready.extend(range(6))

    async def work(hold: anyio.Event, taken: list[Any]) -> None:
        taken.append(queue.take())
        await hold.wait()
        while (message := queue.take()) is not None:
            taken.append(message)
        limit.leave()

    hold, other, taken = anyio.Event(), anyio.Event(), list[Any]()
    assert queue.startable() == 2
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work, hold, taken)
        tasks.start_soon(work, other, taken)
        await until(lambda: len(taken) == 2, "both have started a message")
        assert (queue.startable(), queue.can_take(), queue.take(), len(queue.ready)) == (0, False, None, 4)
        quota = 1
        hold.set()  # there is one task too many: this one may take nothing more
        await until(lambda: repr(limit) == "<ConcurrencyLimit 1 of 1 calls>", "it left")
        assert (len(queue.ready), queue.can_take()) == (4, False)
        other.set()
    assert taken == list(range(6)), "the other one took the rest"
    assert (queue.startable(), len(queue.ready)) == (0, 0)


class Crowd:
    """Counts the calls that run at once, over all members, until it is opened."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.now = self.most = 0
        self.began = 0
        self.witness = Witness()

    async def run(self, orders: list[dict[str, Any]]) -> None:
        """One call."""
        self.now += 1
        self.began += 1
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


async def agree(brokers: list[Broker], owners: int = 2) -> None:
    """Wait until each knows the others, and so many of them own partitions."""
    members = [consumer_of(broker) for broker in brokers]
    await until(lambda: all(len(each.membership.live) == len(members) for each in members), "they see each other")
    await until(lambda: sum(len(each.lanes) for each in members) == 8, "every partition has an owner")
    await until(lambda: sum(1 for each in members if len(each.lanes) == 8 // owners) == owners, "who may call")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"group_concurrency": 5}, 5),
        ({"group_concurrency": 5, "concurrency": 2}, 4),
        ({"group_concurrency": 1}, 1),
        ({"group_concurrency": 3, "batch": 4, "linger": timedelta(milliseconds=5)}, 3),
        ({"group_concurrency": 2, "rate": Rate(10_000)}, 2),
        ({"group_concurrency": 2, "ordering": "none"}, 2),
        ({"group_concurrency": Concurrency(3, by=lambda _: "acme")}, 3),
        ({"group_concurrency": [Concurrency(4), Concurrency(3, by=lambda _: "acme")]}, 3),
    ],
)
async def test_group_limit_bounds_the_calls_of_two_members(make: Make, options: dict[str, Any], most: int) -> None:
    """Two members run exactly the limit together, in order per key, and handle everything once."""
    crowd = Crowd()
    brokers = [make(crowd, **options), make(crowd, **options)]
    async with brokers[0].running(), brokers[1].running():
        await agree(brokers, min(most, 2))
        expected = await publish(brokers[0])
        await until(lambda: crowd.now == most, "as many calls run as may")
        await until(lambda: all(map(_waiting, brokers)), "the rest waits")
        crowd.open.set()
        await crowd.witness.sees(expected)
        await settled(brokers[0], "t")
    assert crowd.most == most
    by_key = defaultdict(list)
    for key, n in crowd.witness.seen:
        by_key[key].append(n)
    assert options.get("ordering") == "none" or all(numbers == sorted(numbers) for numbers in by_key.values())


def _waiting(broker: Broker) -> bool:
    """Whether something waits in a member that owns anything."""
    consumer = consumer_of(broker)
    return not consumer.lanes or len(consumer.queue.ready) + consumer.queue.held > 0


async def test_group_limit_bounds_the_batches_that_start_in_another_task(make: Make) -> None:
    """What may expire is looked at before the call, in a task of its own, which counts like the one before it."""
    crowd = Crowd()
    async with make(crowd, group_concurrency=1, batch=1).running() as broker:
        items = [{"key": f"k{n}", "n": n} for n in range(12)]
        await broker.publish_many("t", items, key=lambda item: str(item["key"]), expires="1h")
        await until(lambda: consumer_of(broker).queue.in_flight == 12 and crowd.now > 0, "all are read, and one runs")
        await broker.publish("t", {"key": "last", "n": 12})
        await until(lambda: consumer_of(broker).queue.in_flight == 13, "one more is read")
        crowd.open.set()
        await settled(broker, "t")
    assert (crowd.most, len(crowd.witness.seen)) == (1, 13)


async def test_remaining_member_uses_the_quota_of_one_that_left(make: Make) -> None:
    """With a limit of one: when the member that may run calls leaves, the other one may."""
    crowd = Crowd()
    async with AsyncExitStack() as stack:
        stay = await stack.enter_async_context(make(crowd, group_concurrency=1).running())
        async with AsyncExitStack() as leaving:
            go = await leaving.enter_async_context(make(crowd, group_concurrency=1).running())
            await agree([stay, go], 1)
            expected = await publish(stay)
            await until(lambda: crowd.now == 1, "one call runs")
            crowd.open.set()
        await crowd.witness.sees(expected)
        await settled(stay, "t")
        assert consumer_of(stay).max_calls == 1
    assert crowd.most == 1


async def test_quota_that_grows_is_used_at_once(make: Make) -> None:
    """Waiting messages start as soon as a member has gone, without a new message coming in."""
    crowd = Crowd()
    async with make(crowd, group_concurrency=4).running() as stay:
        async with make(crowd, group_concurrency=4).running() as go:
            await agree([stay, go])
            await publish(stay)
            await until(lambda: crowd.now == 4, "all permits are in use")
            go.stop(timedelta(0))
        await until(lambda: crowd.now == 4, "the one that is left runs them all")
        crowd.open.set()
        await settled(stay, "t")
    assert crowd.most == 4


@pytest.mark.parametrize("limit", [6, Concurrency(6, by=lambda message: message.key[0] if message.key else None)])
async def test_one_of_two_members_uses_the_whole_limit_while_the_other_is_idle(
    make: Make, limit: int | Concurrency
) -> None:
    """Permits are lent to who has something to call. When the other one has, too, each gets its part."""
    crowds = Crowd(), Crowd()
    brokers = [make(crowd, group_concurrency=limit) for crowd in crowds]
    async with brokers[0].running(), brokers[1].running():
        await agree(brokers)
        mine, theirs = (
            [key for key in (f"k{n}" for n in range(200)) if partition_for(key, 8) in consumer_of(broker).lanes]
            for broker in brokers
        )
        for n, keys in enumerate((mine, theirs)):
            for key in keys[:20]:
                await brokers[0].publish("t", {"key": key, "n": n}, key=key)
            await until(lambda: sum(crowd.now for crowd in crowds) == 6, "all permits are in use")
            assert crowds[0].most == 6, "all of them by the member that had messages"
        crowds[0].open.set()
        await until(lambda: crowds[1].now >= 3, "the other one gets its part")
        crowds[1].open.set()
        await settled(brokers[0], "t")
        assert sum(len(crowd.witness.seen) for crowd in crowds) == 40
        members = [consumer_of(broker).member for broker in brokers]
        holders = await brokers[0].client.execute_command("HKEYS", brokers[0].keys.holders("t", "g"))
        assert {each.decode() for each in holders} == set(members)
    async with brokers[0]:
        holders = await brokers[0].client.execute_command("HKEYS", brokers[0].keys.holders("t", "g"))
        assert holders == [], "a member that leaves gives its permits back"


async def test_name_that_comes_again_gets_its_permit_with_the_first_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member forgets a name without messages; the server knows the member's last call for it a while longer."""
    crowd, replies = Crowd(), list[Any]()
    crowd.open.set()
    async with make(crowd, group_concurrency=Concurrency(2, by=lambda _: "acme")).running() as broker:
        borrower = consumer_of(broker)._borrower
        assert borrower is not None
        ask = borrower._ask

        async def noted(*call: Any) -> Any:
            replies.append(await ask(*call))
            return replies[-1]

        monkeypatch.setattr(borrower, "_ask", noted)
        for n in range(2):
            await until(lambda: borrower.loan("acme") is None, "the name is not in use")
            await broker.publish("t", {"key": "k", "n": n}, key="k")
            await crowd.witness.sees({("k", number) for number in range(n + 1)})
    assert len(replies) > 1
    assert {reply[0] for reply in replies} == {b"OK"}, "no call counts as one that came late"


async def test_lost_permits_cancel_what_runs_and_it_runs_again(make: Make) -> None:
    """Another member has them: what runs is cancelled. It is not an attempt, and nothing is lost."""
    crowd = Crowd()
    async with make(crowd, group_concurrency=2, retry=RetryPolicy(max_attempts=1)).running() as broker:
        expected = await publish(broker, keys=4, each=1)
        await until(lambda: crowd.now == 2, "both permits are in use")
        keys, began = broker.keys, crowd.began
        await broker.client.execute_command("DEL", keys.permits("t", "g"), keys.holders("t", "g"))
        await TAKE_PERMITS(
            broker.client, (keys.permits("t", "g"), keys.holders("t", "g")), ("x", 1, 1, 1, 2, 400, 1, 0, 2)
        )
        await until(lambda: crowd.began > began and crowd.now == 2, "they were cancelled, and wait for new permits")
        crowd.open.set()
        await crowd.witness.sees(expected)
        await settled(broker, "t")
    assert crowd.most == 2


async def test_queue_with_both_limits_starts_what_both_allow() -> None:
    """A rate and a limit over the group: the smaller one decides."""
    quota, queue = 5, Queue(is_ordered=False)
    queue.group_limit = ConcurrencyLimit(lambda: quota)
    queue.rate_limit = RateLimit(Rate(3, per=timedelta(hours=1)), lambda: 1, lambda: None)
    queue.ready.extend(range(9))
    assert (queue.startable(), len(queue.ready)) == (3, 9)
    quota = 2
    assert queue.startable() == 2
    quota = 5
    taken: list[Any] = []
    while (message := queue.take()) is not None:
        taken.append(message)
    assert taken == [0, 1, 2], "the rate is used up, though the quota has room"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"group_concurrency": 0}, "group_concurrency=0 is not a whole number of 1 or more"),
        ({"group_concurrency": "2"}, "group_concurrency='2' is not a whole number of 1 or more"),
        ({"group_concurrency": [Concurrency(2), 3]}, "group_concurrency=3 is not a limit: write"),
        ({"group_concurrency": [Concurrency(2), Concurrency(3)]}, "several limits of one kind"),
        ({"group_concurrency": Concurrency(2, by=str), "batch": 2}, "counts single messages"),
        ({"group_concurrency": 2, "distribution": "shared"}, "cannot enforce a limit over the group: leave"),
    ],
)
def test_impossible_group_limits_are_refused(options: dict[str, Any], problem: str) -> None:
    """What cannot work is refused when it is registered."""

    async def handle(order: dict[str, int]) -> None: ...

    async def handle_all(orders: list[dict[str, int]]) -> None: ...

    with pytest.raises(ConfigError, match=problem):
        build_handler(handle_all if "batch" in options else handle, "t", group="g", **options)
