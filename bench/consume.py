"""CPU per message of handling: rsmq with every guarantee on, beside the bare redis-py loop one would write by hand.

Each measurement is a process of its own on the same server and the same messages; CPU time, unlike wall-clock time,
holds still on a noisy machine.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable

import redis.asyncio
from pydantic import BaseModel
from pydantic_core import from_json

from rsmq import Broker, Settings

TOPIC = "bench"
PARTITIONS = 8
PAYLOAD = {"n": 1, "pad": "x" * 180}


class Item(BaseModel):
    """The payload as a model, for the typed variant."""

    n: int
    pad: str


def cpu() -> float:
    """User and system CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def bare(url: str, prefix: str, count: int) -> dict[str, float]:
    """XREADGROUP COUNT 100, decode, inline call, one XACK a batch: no order, no retries, no recovery."""
    client = redis.asyncio.from_url(url, socket_timeout=None, protocol=2)
    streams = [f"{prefix}:{{{TOPIC}.{partition}}}" for partition in range(PARTITIONS)]
    group = f"bare{time.time_ns()}"
    for stream in streams:
        await client.xgroup_create(stream, group, "0")

    async def handle(payload: object) -> None:
        pass

    began, started, seen = cpu(), time.perf_counter(), 0
    while seen < count:
        for stream, rows in await client.xreadgroup(group, "c", dict.fromkeys(streams, ">"), count=100, block=1000):
            for _, fields in rows:
                await handle(from_json(fields[b"data"]))
                seen += 1
            await client.xack(stream, group, *[entry_id for entry_id, _ in rows])
    used, took = cpu() - began, time.perf_counter() - started
    await client.aclose()
    return {"cpu_us": used / count * 1e6, "rate": count / took}


async def suspending_bare(url: str, prefix: str, count: int) -> dict[str, float]:
    """The bare loop with a handler that suspends once, 64 at a time."""
    client = redis.asyncio.from_url(url, socket_timeout=None, protocol=2)
    streams = [f"{prefix}:{{{TOPIC}.{partition}}}" for partition in range(PARTITIONS)]
    group = f"bare{time.time_ns()}"
    for stream in streams:
        await client.xgroup_create(stream, group, "0")

    async def handle(fields: dict[bytes, bytes]) -> None:
        from_json(fields[b"data"])
        await asyncio.sleep(0)

    began, started, seen = cpu(), time.perf_counter(), 0
    while seen < count:
        for stream, rows in await client.xreadgroup(group, "c", dict.fromkeys(streams, ">"), count=100, block=1000):
            for at in range(0, len(rows), 64):
                await asyncio.gather(*[handle(fields) for _, fields in rows[at : at + 64]])
            seen += len(rows)
            await client.xack(stream, group, *[entry_id for entry_id, _ in rows])
    used, took = cpu() - began, time.perf_counter() - started
    await client.aclose()
    return {"cpu_us": used / count * 1e6, "rate": count / took}


Register = Callable[[Broker, str, Callable[[int], None]], None]
Measurement = Callable[..., Awaitable[dict[str, float]]]


def rsmq_run(register: Register) -> Measurement:
    """A measurement of one kind of handler."""

    async def run(url: str, prefix: str, count: int) -> dict[str, float]:
        broker = Broker(Settings(url=url, prefix=prefix))
        done, finished = 0, asyncio.Event()

        def count_up(n: int) -> None:
            nonlocal done
            done += n
            if done >= count:
                finished.set()

        register(broker, f"g{time.time_ns()}", count_up)
        async with broker:
            began, started = cpu(), time.perf_counter()
            async with broker.running():
                await finished.wait()
                used, took = cpu() - began, time.perf_counter() - started
        return {"cpu_us": used / count * 1e6, "rate": count / took}

    return run


def single(broker: Broker, group: str, count_up: Callable[[int], None]) -> None:
    """One dict a call."""

    @broker.handler(TOPIC, group=group)
    async def handle(payload: dict) -> None:  # type: ignore[type-arg]
        count_up(1)


def typed(broker: Broker, group: str, count_up: Callable[[int], None]) -> None:
    """One pydantic model a call."""

    @broker.handler(TOPIC, group=group)
    async def handle(payload: Item) -> None:
        count_up(1)


def suspending(broker: Broker, group: str, count_up: Callable[[int], None]) -> None:
    """A handler that suspends once."""

    @broker.handler(TOPIC, group=group)
    async def handle(payload: dict) -> None:  # type: ignore[type-arg]
        count_up(1)
        await asyncio.sleep(0)


def batch(broker: Broker, group: str, count_up: Callable[[int], None]) -> None:
    """Five hundred dicts a call."""

    @broker.handler(TOPIC, group=group, batch=500)
    async def handle(payloads: list[dict]) -> None:  # type: ignore[type-arg]
        count_up(len(payloads))


VARIANTS: dict[str, Measurement] = {
    "bare": bare,
    "single": rsmq_run(single),
    "typed": rsmq_run(typed),
    "batch": rsmq_run(batch),
    "bare-suspending": suspending_bare,
    "suspending": rsmq_run(suspending),
}

if __name__ == "__main__":
    variant, url, prefix, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    print(json.dumps(asyncio.run(VARIANTS[variant](url, prefix, count))))
