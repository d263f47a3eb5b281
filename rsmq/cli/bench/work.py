"""The work of the bench done by rsmq, with all guarantees."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex
from typing import Any, Final

from rsmq.broker import Broker
from rsmq.cli.bench.load import BenchLoad, key_of
from rsmq.cli.bench.meter import Cost, CpuReading, Meter
from rsmq.handler.rate_limit import Rate
from rsmq.model.settings import Settings

BATCH: Final = 500
FREE: Final = 100_000
"""A limit that holds nothing back."""
BY_KEY: Final[dict[str, Any]] = {"rate": Rate(FREE, by="key")}
OVER_GROUP: Final[dict[str, Any]] = {"rate": Rate(FREE, per=timedelta(milliseconds=100))}
AT_ONCE: Final[dict[str, Any]] = {"group_concurrency": FREE}
WORK: Final = 30
BLOCK: Final = bytes(2048)
"""What a handler that works hashes, and how often."""
SENDERS: Final = 256
"""Tasks that send letters at once."""


def settings_of(load: BenchLoad) -> Settings:
    """Defaults, with the URL and prefix of the measurement."""
    return Settings(url=load.url, prefix=load.prefix, partitions=load.partitions)


async def publish_many(load: BenchLoad, meter: Meter) -> Cost:
    """All messages in one call."""
    async with Broker(settings_of(load)) as broker:

        async def send(count: int) -> None:
            await broker.publish_many(load.topic, load.payloads(count), key=key_of)

        return await published(load, meter, send)


async def publish_concurrently(load: BenchLoad, meter: Meter) -> Cost:
    """Many tasks, each of which awaits one publish after the other."""
    async with Broker(settings_of(load)) as broker:

        async def send(count: int) -> None:
            payloads = load.payloads(count)

            async def publisher() -> None:
                for payload in payloads:
                    await broker.publish(load.topic, payload, key=key_of(payload))

            await asyncio.gather(*[publisher() for _ in range(load.concurrency)])

        return await published(load, meter, send)


async def send_to_devices(load: BenchLoad, meter: Meter) -> Cost:
    """Many tasks, each of which awaits one letter after the other; every letter is for a device of its own."""
    async with Broker(settings_of(load)) as broker:
        devices = itertools.count()

        async def send(count: int) -> None:
            payloads = load.payloads(count)

            async def sender() -> None:
                for payload in payloads:
                    await broker.send(f"device-{next(devices):07d}", payload)

            await asyncio.gather(*[sender() for _ in range(SENDERS)])

        return await published(load, meter, send)


async def published(load: BenchLoad, meter: Meter, send: Callable[[int], Any]) -> Cost:
    """The cost of publishing, after the warm-up."""
    await send(load.warm)
    await meter.start()
    start = CpuReading()
    await send(load.count)
    return await meter.cost(start, CpuReading(load.count))


class Count:
    """Counts handled messages. After the warm-up the handlers wait until the meter has been read."""

    def __init__(self, load: BenchLoad) -> None:
        self._warm = load.warm
        self._count = load.count
        self.done = 0
        self.start = self.end = CpuReading()
        self.is_held = False
        self.warmed = asyncio.Event()
        self._released = asyncio.Event()
        self.finished = asyncio.Event()

    def add(self, count: int) -> None:
        """Add handled messages."""
        self.done += count
        if self.done >= self._warm and not self.warmed.is_set():
            self.is_held = True
            self.warmed.set()
        if self.done >= self._count and not self.finished.is_set():
            self.end = CpuReading(self.done)
            self.finished.set()

    def release(self) -> None:
        """Start counting from here."""
        self.is_held = False
        self.start = CpuReading(self.done)
        self._released.set()

    async def hold(self) -> None:
        """Wait until `release`."""
        await self._released.wait()


Kind = Callable[..., Callable[..., Any]]
"""Makes a handler from a Count."""


async def consume(load: BenchLoad, meter: Meter, kind: Kind, *, group: str = "", **options: Any) -> Cost:
    """One handler of a kind, in its own group, from the first message of the topic on."""
    count, broker = Count(load), Broker(settings_of(load))
    register(broker, kind, count, group or f"ours-{token_hex(4)}", load, **options)
    async with broker.running():
        await count.warmed.wait()
        await meter.start()
        count.release()
        await count.finished.wait()
        return await meter.cost(count.start, count.end)


def register(broker: Broker, kind: Kind, count: Count, group: str, load: BenchLoad, **options: Any) -> None:
    """Register a handler of a kind. No batch is larger than the warm-up, or one could hold all messages."""
    batch = min(BATCH, load.warm) if kind is batches else None
    broker.handler(load.topic, group=group, concurrency=load.concurrency, batch=batch, **options)(kind(count))


def single(count: Count, payload_type: Any = dict[str, Any]) -> Callable[..., Any]:
    """One payload per call."""

    async def handle(payload: Any) -> None:
        if count.is_held:
            await count.hold()
        count.add(1)

    handle.__annotations__["payload"] = payload_type
    return handle


def working(count: Count) -> Callable[..., Any]:
    """One payload per call, which costs about 50 µs of CPU, like a little parsing and a template."""

    async def handle(payload: dict[str, Any]) -> None:
        if count.is_held:
            await count.hold()
        count.add(1)
        for _ in range(WORK):
            sha256(BLOCK).digest()

    return handle


def suspending(count: Count) -> Callable[..., Any]:
    """One payload per call, and the handler suspends one time."""

    async def handle(payload: dict[str, Any]) -> None:
        if count.is_held:
            await count.hold()
        count.add(1)
        await asyncio.sleep(0)

    return handle


def batches(count: Count) -> Callable[..., Any]:
    """Many payloads per call."""

    async def handle(payloads: list[dict[str, Any]]) -> None:
        if count.is_held:
            await count.hold()
        count.add(len(payloads))

    return handle
