"""What inboxes weigh and how long they keep the server busy: the server's own figures, beside the published design.

Each measurement empties the throw-away server first and returns its figures by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

import redis.asyncio
from pydantic_core import to_json

from benchmarks.persist import BATCH, payload
from benchmarks.published import Published, published_message
from benchmarks.server import LOGGED_US, ServerMeter, cpu
from rsmq import Broker, Settings

ACKS: Final = 50
"""Acknowledgements in one call, and in one pipeline of the published design."""
AT_ONCE: Final = 100
"""Devices that catch up at the same time."""

Figures = dict[str, float]


class Side(Protocol):
    """One of the two designs, connected."""

    async def store(self, devices: list[str], each: int, size: int) -> None:
        """Store `each` messages of `size` bytes in the inbox of every device, up to 500 in a call."""

    async def catch_up(self, device: str, count: int) -> None:
        """Connect, receive that many messages and acknowledge them."""

    async def acknowledge(self, device: str, count: int, begin: Callable[[], None]) -> None:
        """Receive all, `begin()`, then acknowledge all, 50 at a time."""


class Ours:
    """Through the public API."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def store(self, devices: list[str], each: int, size: int) -> None:
        item = payload(size)
        for device in devices:
            await self._broker.send_many((device, item) for _ in range(each))

    async def catch_up(self, device: str, count: int) -> None:
        async with self._broker.connect(device) as session:
            seen = 0
            async for letter in session:
                await session.ack(letter)
                seen += 1
                if seen % ACKS == 0:
                    await session.flush()
                if seen == count:
                    return

    async def acknowledge(self, device: str, count: int, begin: Callable[[], None]) -> None:
        async with self._broker.connect(device, window=count) as session:
            letters = [await anext(session) for _ in range(count)]
            begin()
            for number, letter in enumerate(letters, 1):
                await session.ack(letter)
                if number % ACKS == 0:
                    await session.flush()


class Theirs:
    """The published design: the whole backlog in one call, one script for each acknowledgement, 50 in a pipeline."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._store = Published(client)

    async def store(self, devices: list[str], each: int, size: int) -> None:
        message = published_message(to_json(payload(size)))
        for device in devices:
            for at in range(0, each, BATCH):
                await self._store.add(device, [message] * min(BATCH, each - at))

    async def catch_up(self, device: str, count: int) -> None:
        await self.acknowledge(device, count, lambda: None)

    async def acknowledge(self, device: str, count: int, begin: Callable[[], None]) -> None:
        messages = await self._store.read(device)
        assert len(messages) == count, f"{len(messages)} messages instead of {count}"
        begin()
        for at in range(0, count, ACKS):
            pipe = self._client.pipeline(transaction=False)
            for message in messages[at : at + ACKS]:
                pipe.execute_command(*self._store.remove_command(device, message["packetId"]))
            await pipe.execute()


@asynccontextmanager
async def side(name: str, url: str) -> AsyncIterator[Side]:
    """`rsmq` or `published`, connected; its scripts are loaded."""
    async with AsyncExitStack() as stack:
        if name == "rsmq":
            yield Ours(await stack.enter_async_context(Broker(Settings(url=url))))
            return
        client = await stack.enter_async_context(redis.asyncio.from_url(url))
        await Published(client).load()
        yield Theirs(client)


async def one_device(name: str, url: str, count: int, size: int) -> Figures:
    """Many messages in one inbox: weight, server time to add and acknowledge, and the longest call of a reconnect."""
    meter, device = ServerMeter(url), "device-0000000"
    meter.start(empty=True)
    async with side(name, url) as tested:
        await tested.store(["warm"], 2, size)
        meter.start()
        await tested.store([device], count, size)
        added, weight = meter.cpu_us, meter.memory
        meter.start(log=True)
        await tested.catch_up(device, count)
        longest = meter.longest_us
        await tested.store([device], count, size)
        await tested.acknowledge(device, count, meter.start)
        acked = meter.cpu_us
    meter.close()
    return {
        "add_us": added / count,
        "bytes": weight / count,
        "longest_ms": max(longest, LOGGED_US) / 1000,
        "ack_us": acked / count,
    }


async def many_devices(name: str, url: str, devices: int, each: int, size: int) -> Figures:
    """A few messages in each of many inboxes: what an inbox itself weighs is in it."""
    meter = ServerMeter(url)
    meter.start(empty=True)
    async with side(name, url) as tested:
        await tested.store(["warm"], 1, size)
        meter.start()
        await tested.store([f"device-{n:07d}" for n in range(devices)], each, size)
        weight = meter.memory
    meter.close()
    return {"bytes": weight / devices / each}


async def catch_up(name: str, url: str, devices: int, each: int, size: int) -> Figures:
    """Devices come back, a hundred at a time, and take and acknowledge everything."""
    meter, total = ServerMeter(url), devices * each
    meter.start(empty=True)
    async with side(name, url) as tested:
        names = [f"device-{n:07d}" for n in range(devices)]
        await tested.store(names, each, size)
        meter.start()
        began, started, source = cpu(), time.perf_counter(), iter(names)

        async def line() -> None:
            for device in source:
                await tested.catch_up(device, each)

        await asyncio.gather(*[line() for _ in range(AT_ONCE)])
        took, used, served = time.perf_counter() - started, cpu() - began, meter.cpu_us
    meter.close()
    return {"seconds": took, "rate": total / took, "cpu_us": used / total * 1e6, "server_us": served / total}
