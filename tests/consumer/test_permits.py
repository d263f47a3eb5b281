"""Costs, even rates, and permits that a handler takes itself: over two members, in threads, cancelled, held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from rsmq import Broker, Concurrency, ConfigError, Message, Rate, RetryPolicy, Settings
from rsmq.consumer.waiting.allowance import EvenAllowance
from rsmq.handler.handler import build_handler
from rsmq.model.message import MessageOrigin
from tests.consumer.members import consumer_of
from tests.contract.witness import settled
from tests.patience import until

HOUR = timedelta(hours=1)
Make = Callable[..., Broker]


@pytest.fixture
def make(server_url: str, prefix: str) -> Make:
    """Makes members of one group that run a function."""

    def member(function: Callable[..., Any], **options: Any) -> Broker:
        broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
        broker.handler("t", group="g", **options)(function)
        return broker

    return member


async def publish(broker: Broker, *tokens: int) -> None:
    """A message with so many tokens each."""
    for n, number in enumerate(tokens):
        await broker.publish("t", {"tokens": number}, key=f"k{n}", headers={"tokens": str(number)})


def tokens_of(message: Message) -> int:
    """The cost of a message."""
    return int(message.headers["tokens"])


async def test_cost_counts_and_what_was_not_spent_is_free_again(make: Make) -> None:
    """Of a hundred in an hour, over two members. Less than it had said is free; more is a debt."""
    seen, spent = list[int](), dict[int, int]()

    async def handle(order: dict[str, int], message: Message) -> None:
        seen.append(order["tokens"])
        if order["tokens"] in spent:
            message.spent(spent[order["tokens"]])

    rate = Rate(100, per=HOUR, cost=tokens_of)
    async with make(handle, rate=rate).running() as one, make(handle, rate=rate).running() as two:
        members = [consumer_of(one), consumer_of(two)]
        await until(lambda: all(each.lanes for each in members), "both have partitions")
        spent[60] = 10
        await publish(one, 60)
        await until(lambda: seen == [60], "it starts, and has spent 10")
        await publish(one, 80)
        await until(lambda: seen == [60, 80], "so 80 are free")
        spent[5] = 20
        await publish(one, 5)
        await until(lambda: seen == [60, 80, 5], "it starts, and has spent 20: more than there were")
        await publish(one, 20)
        await until(lambda: sum(each.queue.limited for each in members) == 1, "so much is not left")
        assert seen == [60, 80, 5]
        with pytest.raises(ConfigError, match="is not counted by a cost"):
            next(iter(members[0].lanes.values())).spent(
                Message(MessageOrigin("t", 0, "g"), b"1-0", [b"data", b"{}"]), 1
            )


async def test_cost_above_the_limit_or_a_function_that_fails_stops_nothing(make: Make) -> None:
    """It costs the limit, or one."""
    seen = list[int]()

    async def handle(order: dict[str, int]) -> None:
        seen.append(order["tokens"])

    async with make(handle, rate=Rate(5, per="50ms", cost=tokens_of)).running() as broker:
        await publish(broker, 1000, 3)
        await broker.publish("t", {"tokens": -1})
        await until(lambda: sorted(seen) == [-1, 3, 1000], "all are handled")
        await settled(broker, "t")


async def test_burst_of_one_starts_messages_evenly(make: Make) -> None:
    """Twenty a second come one every 50 ms: between any two starts in one member there is nearly that much."""
    starts = list[float]()

    async def handle(order: dict[str, int]) -> None:
        starts.append(time.monotonic())

    async with make(handle, rate=Rate(20, per="1s", burst=1)).running() as broker:
        await publish(broker, *range(8))
        await until(lambda: len(starts) == 8, "all are handled")
        await settled(broker, "t")
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert min(gaps) > 0.045, gaps


def test_even_allowance_gives_no_more_than_its_burst_after_a_pause() -> None:
    """What was granted for ten moments that have passed does not come at once."""
    allowance = EvenAllowance(0.1, 2)
    question = allowance.ask(100.0, 20, 20, 20)
    allowance.answered(question, [0, 0, 2, *[part for n in range(1, 11) for part in (100 * n, 1)]], 100.0, 60.0)
    assert allowance.take(100.0, 9) == 2
    assert allowance.take(100.05, 9) == 0
    assert allowance.next_begin(100.0) == pytest.approx(100.1)
    assert allowance.take(101.0, 9) == 2, "not the ten that have passed"
    assert allowance.take(101.11, 9) == 1
    allowance.put_back(101.11, 1)
    assert allowance.take(101.11, 9) == 1


class Calls:
    """Counts the calls inside a permit, over all members."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0
        self.lock = threading.Lock()

    def begin(self) -> None:
        """One more."""
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def end(self) -> None:
        """One less."""
        with self.lock:
            self.now -= 1
            self.done += 1


async def test_permit_limits_the_calls_and_not_what_the_handler_does_before(make: Make) -> None:
    """Two members run all handlers at once; only two of them are in the call."""
    calls, gate, entered = Calls(), asyncio.Event(), list[int]()

    async def handle(order: dict[str, int], message: Message) -> None:
        entered.append(order["tokens"])
        async with message.permit("twilio"):
            calls.begin()
            await gate.wait()
            calls.end()

    options: dict[str, Any] = {"permits": {"twilio": [Concurrency(2), Rate(1000)], "smtp": Rate(1)}}
    async with make(handle, **options).running() as one, make(handle, **options).running():
        await publish(one, *range(12))
        await until(lambda: len(entered) == 12 and calls.now == 2, "all have begun, and two call")
        gate.set()
        await until(lambda: calls.done == 12, "all have called")
        await settled(one, "t")
    assert calls.most == 2


async def test_permit_in_a_thread_is_held_by_the_call_that_runs_on(make: Make) -> None:
    """A thread cannot be stopped: its message times out, and the permit stays with its call."""
    calls, gate, attempts = Calls(), threading.Event(), list[int]()

    def handle(order: dict[str, int], message: Message) -> None:
        attempts.append(message.attempt)
        with message.permit("twilio"):
            calls.begin()
            gate.wait(30)
            calls.end()

    options: dict[str, Any] = {"permits": {"twilio": Concurrency(1)}, "retry": RetryPolicy(max_attempts=1)}
    async with make(handle, timeout="200ms", **options).running() as broker:
        await publish(broker, 1)
        await until(lambda: calls.now == 1, "it calls")
        found = broker.dead_letters
        topic = await broker.topics.existing("t")

        async def dead() -> int:
            return len([each async for each in found.iterate(topic, "g")])

        await until(lambda: _is(dead, 1), "it has timed out")
        await publish(broker, 2)
        await until(lambda: _is(dead, 2), "the next one waits for the permit until it times out, too")
        assert calls.most == 1
        gate.set()
        await until(lambda: calls.now == 0, "the call has ended")
        await publish(broker, 3)
        await until(lambda: calls.done == 2, "its permit is free again")
        await settled(broker, "t")


async def _is(count: Callable[[], Any], number: int) -> bool:
    return bool(await count() == number)


async def test_permit_of_a_held_name_lets_its_message_wait_uncounted(make: Make) -> None:
    """Those that call find the name held; those that wait for a permit, too. None is an attempt."""
    attempts, calls = list[int](), list[int]()

    async def handle(order: dict[str, int], message: Message) -> None:
        attempts.append(message.attempt)
        async with message.permit("twilio"):
            calls.append(order["tokens"])

    retry = RetryPolicy(max_attempts=1)
    async with make(handle, retry=retry, permits={"twilio": Rate(1000)}).running() as broker:
        await publish(broker, 0)
        await until(lambda: calls == [0], "it calls")
        await broker.hold("t", "twilio", "300ms")
        await until(lambda: consumer_of(broker).holds.names, "it knows it")  # type: ignore[union-attr]
        await publish(broker, 1, 2)
        await until(lambda: sorted(calls) == [0, 1, 2], "they call when it is over")
        await settled(broker, "t")
    assert set(attempts) == {1}
    assert len(attempts) >= 5


@pytest.mark.parametrize("style", ["async", "thread"])
async def test_permit_inside_its_own_block_is_refused(make: Make, style: str) -> None:
    """It would wait for itself, and with it every handler that needs the name. One after the other is fine."""
    problems, ends = list[str](), list[int]()

    async def nest(order: dict[str, int], message: Message) -> None:
        async with message.permit("twilio"), message.permit("smtp"):
            with pytest.raises(ConfigError) as found:
                await message.permit("twilio").__aenter__()
            problems.append(str(found.value))
        async with message.permit("twilio"):
            ends.append(order["tokens"])

    def nest_in_thread(order: dict[str, int], message: Message) -> None:
        with message.permit("twilio"), message.permit("smtp"):
            with pytest.raises(ConfigError) as found:
                message.permit("twilio").__enter__()
            problems.append(str(found.value))
        with message.permit("twilio"):
            ends.append(order["tokens"])

    permits = {"twilio": Concurrency(1), "smtp": Concurrency(1)}
    handler: Any = nest if style == "async" else nest_in_thread
    async with make(handler, permits=permits, timeout="20s").running() as broker:
        await publish(broker, 1, 2)
        await until(lambda: sorted(ends) == [1, 2], "both have called twice")
        await settled(broker, "t")
    assert len(problems) == 2
    assert "'twilio' is taken inside its own block" in problems[0]


def bad_order(order: dict[str, int]) -> None:
    """A handler for another process."""


async def test_permit_that_is_not_declared_or_not_possible_is_refused(make: Make) -> None:
    """With what to write instead."""
    problems = list[str]()

    async def handle(order: dict[str, int], message: Message) -> None:
        for wrong in (lambda: message.permit("smtp"), lambda: message.permit("twilio").__enter__()):
            with pytest.raises(ConfigError) as found:
                wrong()
            problems.append(str(found.value))
        with pytest.raises(ConfigError) as found:
            message.spent(3)
        problems.append(str(found.value))

    async with make(handle, permits={"twilio": Rate(5)}).running() as broker:
        await publish(broker, 1)
        await until(lambda: len(problems) == 3, "it was refused")
    assert "there is no permit 'smtp': the handler declares twilio" in problems[0]
    assert "writes `async with message.permit('twilio'):`" in problems[1]
    assert "is not counted by a cost" in problems[2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"permits": "twilio"}, "permits='twilio' are none"),
        ({"permits": {"": Rate(5)}}, "a permit with the name ''"),
        ({"permits": {"a": 5}}, "the permit 'a' is 5: write Rate"),
        ({"permits": {"a": Rate(5, by="key")}}, "the permit 'a' has a limit with `by`"),
        ({"permits": {"a": [Rate(5), Rate(6)]}}, "the permit 'a' needs a Rate, a Concurrency, or one of each"),
        ({"permits": {"a": Concurrency(5)}, "distribution": "shared"}, "cannot enforce the Concurrency of the permit"),
        ({"rate": [Rate(5, cost=tokens_of), Rate(5, by=str)]}, "several rates of one kind"),
    ],
)
def test_impossible_permits_are_refused(options: dict[str, Any], problem: str) -> None:
    """When the handler is registered."""

    async def handle(order: dict[str, int]) -> None: ...

    with pytest.raises(ConfigError, match=problem):
        build_handler(handle, "t", group="g", **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cost": 5}, "cost=5 is not possible"),
        ({"burst": 0}, "burst=0 is not possible"),
        ({"burst": 6}, "burst=6 is not possible"),
        ({"burst": 1, "by": "key"}, "has neither cost nor burst"),
        ({"cost": tokens_of, "over": "member"}, "hold over the whole group"),
        ({"cost": tokens_of, "burst": 2}, "a cost or a burst, not both"),
    ],
)
def test_impossible_rates_are_refused(options: dict[str, Any], problem: str) -> None:
    """With what to write instead."""
    with pytest.raises(ConfigError, match=problem):
        Rate(5, **options)
