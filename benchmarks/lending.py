"""The rows of `python -m benchmarks.fairness` about limits: what they let through, beside what is possible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from tenacity import wait_fixed

from rsmq.broker import Broker
from rsmq.consumer.consumer import Consumer
from rsmq.handler.breaker import Breaker
from rsmq.handler.concurrency import Concurrency
from rsmq.handler.rate_limit import Rate
from rsmq.handler.retry import Hold, RetryPolicy
from rsmq.model.message import Message
from rsmq.model.partition import partition_for
from rsmq.model.settings import Settings
from rsmq.testing import ThrowawayServer

PARTITIONS: Final = 8
CALLS: Final = 10
WORK: Final = 0.05
MESSAGES: Final = 200


@dataclass
class Members:
    """Two members of a group, and when their handlers have started."""

    url: str
    options: dict[str, Any]
    work: float = WORK
    starts: list[float] = field(default_factory=list)
    done: int = 0

    def make(self) -> Broker:
        """One of them."""
        broker = Broker(Settings(url=self.url, partitions=PARTITIONS, preflight="warn"))

        @broker.handler("t", group="g", concurrency=64, **self.options)
        async def handle(_order: dict[str, Any]) -> None:
            self.starts.append(time.monotonic())
            await asyncio.sleep(self.work)
            self.done += 1

        return broker


def consumer_of(broker: Broker) -> Consumer:
    """The consumer of its only handler."""
    assert broker.worker is not None
    return broker.worker.consumers[0]


async def until(is_true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until it is true, for so long."""
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        await asyncio.sleep(0.002)


async def one_busy_member(server: ThrowawayServer) -> str:
    """All messages are in the partitions of one of two members."""
    members = Members(server.url, {"group_concurrency": CALLS})
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(members.make().running()) for _ in range(2)]
        await until(lambda: all(len(consumer_of(each).lanes) == PARTITIONS // 2 for each in brokers))
        mine = consumer_of(brokers[0]).lanes
        keys = [key for key in (f"k{n}" for n in range(5000)) if partition_for(key, PARTITIONS) in mine][:MESSAGES]
        await brokers[0].publish_many("t", [{"k": key} for key in keys], key=lambda item: str(item["k"]))
        await until(lambda: members.done >= MESSAGES)
        return f"{time.monotonic() - members.starts[0]:.2f} s"


async def even_rate(server: ThrowawayServer) -> str:
    """The most starts within 100 ms of a rate of 20 a second, for two seconds, over two members."""
    members = Members(server.url, {"rate": Rate(20, per="1s", burst=1)}, work=0.0)
    async with members.make().running() as one, members.make().running() as two:
        await until(lambda: all(len(consumer_of(each).lanes) == PARTITIONS // 2 for each in (one, two)))
        await one.publish_many("t", [{"k": f"k{n}"} for n in range(40)], key=lambda item: str(item["k"]))
        await until(lambda: members.done >= 40)
    most = max(sum(1 for other in members.starts if at <= other < at + 0.1) for at in members.starts)
    return f"{most}, all in {members.starts[-1] - members.starts[0]:.2f} s"


async def busy_provider(server: ThrowawayServer) -> str:
    """Calls of a provider that says "not now" for two seconds, with 200 messages for it, and how many of them were
    attempts that counted."""
    members, attempts, began = Members(server.url, {}), list[int](), time.monotonic()
    broker = Broker(Settings(url=server.url, partitions=PARTITIONS, preflight="warn"))

    @broker.handler("t", group="g", concurrency=16, rate=Rate(1000, by=lambda _: "twilio"))
    async def handle(_order: dict[str, Any], message: Message) -> None:
        if time.monotonic() < began + 2:
            members.starts.append(time.monotonic())
            await asyncio.sleep(0.01)
            raise Hold("2s")
        attempts.append(message.attempt)

    async with broker.running():
        began = time.monotonic()
        await broker.publish_many("t", [{"k": f"k{n}"} for n in range(MESSAGES)], key=lambda item: str(item["k"]))
        await until(lambda: len(attempts) >= MESSAGES)
    counted = sum(each > 1 for each in attempts)
    return f"{len(members.starts)} calls, {counted} counted, {len(attempts)} handled"


async def provider_is_down(server: ThrowawayServer) -> str:
    """Calls of a provider that fails for two seconds, with a breaker of five failures and half a second."""
    calls, handled, began = 0, 0, time.monotonic()
    broker = Broker(Settings(url=server.url, partitions=PARTITIONS, preflight="warn"))
    breaker = Breaker(failures=5, hold="500ms", by=lambda _: "twilio")

    @broker.handler("t", group="g", concurrency=5, breaker=breaker, retry=RetryPolicy(wait=wait_fixed(0.01)))
    async def handle(_order: dict[str, Any]) -> None:
        nonlocal calls, handled
        if time.monotonic() < began + 2:
            calls += 1
            raise ConnectionError("down")
        handled += 1

    async with broker.running():
        began = time.monotonic()
        await broker.publish_many("t", [{"k": f"k{n}"} for n in range(MESSAGES)], key=lambda item: str(item["k"]))
        await until(lambda: handled >= MESSAGES)
    return f"{calls} calls, {handled} handled"


async def costs(server: ThrowawayServer) -> str:
    """The most tokens within a second of messages that cost ten each, and say afterwards that they have cost five."""
    spent, broker = list[float](), Broker(Settings(url=server.url, partitions=PARTITIONS, preflight="warn"))

    @broker.handler("t", group="g", concurrency=16, rate=Rate(100, per="1s", by=lambda _: "gpt", cost=lambda _: 10))
    async def handle(_order: dict[str, Any], message: Message) -> None:
        message.spent(5)
        spent.append(time.monotonic())

    async with broker.running():
        await broker.publish_many("t", [{"k": f"k{n}"} for n in range(60)], key=lambda item: str(item["k"]))
        await until(lambda: len(spent) >= 60)
    most = max(sum(1 for other in spent if at <= other < at + 1) for at in spent)
    return f"{5 * most} spent, all in {spent[-1] - spent[0]:.2f} s"


async def late_permits(server: ThrowawayServer) -> str:
    """Ten permits for calls of 50 ms behind 50 ms of other work: how long, and the most calls at once."""
    broker = Broker(Settings(url=server.url, partitions=PARTITIONS, preflight="warn"))
    running, most, ends = 0, 0, list[float]()

    @broker.handler("t", group="g", concurrency=64, permits={"twilio": Concurrency(CALLS)})
    async def handle(_order: dict[str, Any], message: Message) -> None:
        nonlocal running, most
        await asyncio.sleep(WORK)
        async with message.permit("twilio"):
            running += 1
            most = max(most, running)
            await asyncio.sleep(WORK)
            running -= 1
        ends.append(time.monotonic())

    async with broker.running():
        began = time.monotonic()
        await broker.publish_many("t", [{"k": f"k{n}"} for n in range(MESSAGES)], key=lambda item: str(item["k"]))
        await until(lambda: len(ends) >= MESSAGES)
    return f"{ends[-1] - began:.2f} s, {most} at once"


Measure = Callable[[ThrowawayServer], Awaitable[str]]
ROWS: Final[tuple[tuple[str, str, Measure], ...]] = (
    (f"{MESSAGES} calls of 50 ms, `group_concurrency={CALLS}`, all on one of two members", "≤ 1.1 s", one_busy_member),
    ('most starts within 100 ms of `Rate(20, per="1s", burst=1)`, two members', "≤ 3", even_rate),
    ("a provider is busy for 2 s: `raise Hold`, 200 messages, 16 at once", "≤ 16 calls, 0 counted", busy_provider),
    (
        "a provider is down for 2 s: a breaker of 5 failures and 500 ms, 200 messages, 5 at once",
        "≤ 20 calls",
        provider_is_down,
    ),
    ("most tokens within a second: `Rate(100, cost=10)`, 60 messages that have spent 5", "≤ 100 spent", costs),
    (
        f"{MESSAGES} calls of 50 ms with {CALLS} permits, each behind 50 ms of other work",
        "≤ 1.2 s, 10 at once",
        late_permits,
    ),
)


async def show_limits(only: str) -> None:
    """Print the table."""
    print("\n| limits | measured | goal |\n|---|--:|--:|")
    for what, goal, measure in ROWS:
        if only in what:
            with ThrowawayServer(tcp=True) as server:
                print(f"| {what} | {await measure(server)} | {goal} |", flush=True)
