"""The rows of `python -m benchmarks.fairness` about tenants: how long a quiet one waits, and who gets how much."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rsmq.broker import Broker
from rsmq.model.message import Message
from rsmq.model.settings import Settings
from rsmq.testing import ThrowawayServer

WORK: Final = 0.005
SLOTS: Final = 16
LONGEST: Final = 60.0
QUIET: Final = 200
"""Messages of the quiet tenant, one every 20 ms."""


class Shared:
    """A handler that several tenants share: 16 calls at once, 5 ms each. `waits` are those of quiet tenants."""

    def __init__(self, server: ThrowawayServer, prefix: str, *, is_fair: bool, **options: Any) -> None:
        self.broker = Broker(Settings(url=server.url, prefix=prefix, partitions=1))
        self.waits: list[float] = []
        self.served: list[str] = []
        if is_fair:
            options["tenant"] = lambda message: message.headers["tenant"]

        @self.broker.handler("t", group="g", concurrency=SLOTS, **options)
        async def handle(order: dict[str, Any], message: Message) -> None:
            who = message.headers["tenant"]
            self.served.append(who)
            if who.startswith("quiet"):
                self.waits.append(time.monotonic() - order["at"])
            await asyncio.sleep(WORK)

    async def send(self, who: str, count: int = 1) -> None:
        """Messages of a tenant, of different keys."""
        now = time.monotonic()
        for at in range(0, count, 5000):
            orders = [{"at": now, "n": at + n} for n in range(min(5000, count - at))]
            await self.broker.publish_many("t", orders, key=lambda order: f"{who}{order['n']}", headers={"tenant": who})

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Or until it has taken too long."""
        end = time.monotonic() + LONGEST
        while not is_true() and time.monotonic() < end:
            await asyncio.sleep(0.005)


def ms(waits: list[float], share: float = 1.0) -> str:
    """A quantile."""
    if not waits:
        return f"> {LONGEST:.0f} s"
    return f"{1000 * sorted(waits)[min(len(waits) - 1, int(share * len(waits)))]:.0f} ms"


async def growing(server: ThrowawayServer, prefix: str, waiting: int, *, is_fair: bool) -> str:
    """The p99 of a quiet tenant while the backlog of another grows to so many, beside the same alone."""
    found = []
    for noisy in (0, waiting):
        shared = Shared(server, f"{prefix}{noisy}", is_fair=is_fair)
        async with shared.broker.running():
            for n in range(QUIET):
                if noisy and n % 10 == 0:
                    await shared.send("noisy", noisy // (QUIET // 10))
                await shared.send("quiet")
                await asyncio.sleep(0.02)
            if is_fair or not noisy:
                await shared.until(lambda: len(shared.waits) == QUIET)  # noqa: B023
            found.append(ms(shared.waits, 0.99))
    return f"{found[1]} (alone {found[0]})"


async def burst(server: ThrowawayServer, prefix: str, waiting: int, *, is_fair: bool) -> str:
    """One message of each of a hundred tenants, behind a backlog that is there when the worker starts: the longest."""
    shared = Shared(server, prefix, is_fair=is_fair)
    async with shared.broker:
        await shared.send("noisy", waiting)
    async with shared.broker.running():
        for n in range(100):
            await shared.send(f"quiet{n}")
        await shared.until(lambda: len(shared.waits) == 100)
    return ms(shared.waits)


async def by_weight(server: ThrowawayServer, prefix: str, waiting: int, *, is_fair: bool) -> str:
    """Jain's index of what four tenants get for their weights 1, 1, 2 and 4, while all have a backlog."""
    weights = {"a": 1, "b": 1, "c": 2, "d": 4}
    shared = Shared(server, prefix, is_fair=is_fair, **({"weights": weights} if is_fair else {}))
    async with shared.broker:
        for who in weights:
            await shared.send(who, waiting // 4)
    async with shared.broker.running():
        (consumer,) = shared.broker.worker.consumers if shared.broker.worker else ()
        if is_fair:
            await shared.until(lambda: len(consumer.queue.tenants(consumer.lanes.values())) == 4)
        seen = len(shared.served)
        await shared.until(lambda: len(shared.served) >= seen + 4000)
        served = Counter(shared.served[seen:])
    shares = [served[who] / weight for who, weight in weights.items()]
    return f"{sum(shares) ** 2 / (4 * sum(share * share for share in shares)):.3f}"


Measure = Callable[..., Awaitable[str]]
ROWS: Final[tuple[tuple[str, str, Measure], ...]] = (
    ("p99 of a quiet tenant while the backlog of another grows", "≤ 2 x alone + 50 ms", growing),
    ("longest wait of 100 quiet tenants behind a backlog that is there at the start", "≤ 1 s", burst),
    ("Jain's index by weight", "≥ 0.99", by_weight),
)


async def show_tenants(only: str, waiting: int) -> None:
    """Print the table."""
    print("\n| tenants | without `tenant=` | with it | goal |\n|---|--:|--:|--:|")
    for what, goal, measure in ROWS:
        if only in what:
            found = []
            for is_fair in (False, True):
                with ThrowawayServer(tcp=True) as server:
                    found.append(await measure(server, "b", waiting, is_fair=is_fair))
            print(f"| {what} | {found[0]} | {found[1]} | {goal} |", flush=True)
