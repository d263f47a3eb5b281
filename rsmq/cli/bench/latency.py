"""Latency at a low rate: from before the publish until the handler has the message, measured with one clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex
from statistics import median
from time import perf_counter
from typing import Any, Final

import anyio

from rsmq.broker import Broker
from rsmq.cli.bench.load import TOPIC, BenchLoad
from rsmq.cli.bench.work import settings_of

RATE: Final = 200
PATIENCE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    p50: float
    p99: float


Measure = Callable[[int], Awaitable[Latency]]
"""Sends so many messages and returns their latency."""


class Times:
    """How long each message took."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.seconds: list[float] = []
        self.finished = asyncio.Event()

    def note(self, payload: dict[str, Any]) -> None:
        """Record a message that has arrived."""
        self.seconds.append(perf_counter() - payload["sent"])
        if len(self.seconds) >= self._expected:
            self.finished.set()

    def latency(self) -> Latency:
        """Median and 99th percentile."""
        ordered = sorted(self.seconds)
        return Latency(
            ordered[len(ordered) // 2] * 1000, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000
        )


async def send_steadily(count: int, rate: int, send: Callable[[dict[str, Any]], Coroutine[Any, Any, None]]) -> None:
    """Send at a steady rate, however long each send takes."""
    began = perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - perf_counter()))
            tasks.start_soon(send, {"n": number, "sent": perf_counter()})


@asynccontextmanager
async def ours(load: BenchLoad, rate: int = RATE) -> AsyncIterator[Measure]:
    """A handler in the publisher's process, with its own topic."""
    topic, broker, under_way = f"{TOPIC}-latency-{token_hex(4)}", Broker(settings_of(load)), list[Times]()

    async def handle(payload: dict[str, Any]) -> None:
        under_way[-1].note(payload)

    broker.handler(topic, group="latency")(handle)

    async def send(payload: dict[str, Any]) -> None:
        await broker.publish(topic, payload, key=f"k{payload['n']}")

    async with broker, broker.running():
        yield measure_with(send, under_way, rate)


def measure_with(
    send: Callable[[dict[str, Any]], Coroutine[Any, Any, None]], under_way: list[Times], rate: int
) -> Measure:
    """Sends messages and waits for them; the handler records each in the last element of `under_way`."""

    async def measure(count: int) -> Latency:
        times = Times(count)
        under_way.append(times)
        await send_steadily(count, rate, send)
        with anyio.fail_after(PATIENCE):
            await times.finished.wait()
        return times.latency()

    return measure


def middle(rounds: Sequence[Latency]) -> Latency:
    """The median of each figure, so that a busy moment of the machine affects one round only."""
    return Latency(median(each.p50 for each in rounds), median(each.p99 for each in rounds))
