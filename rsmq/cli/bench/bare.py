"""The base of comparison: plain redis-py, without order, retries, recovery or fencing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any

import anyio
import redis.asyncio
from pydantic_core import from_json, to_json

from rsmq.cli.bench.latency import RATE, Measure, Times, measure_with
from rsmq.cli.bench.load import LAYOUTS, TOPIC, BenchLoad, key_of
from rsmq.cli.bench.meter import Cost, CpuReading, Meter
from rsmq.model.clock import now_ms
from rsmq.model.keys import Keys
from rsmq.model.layout import single
from rsmq.model.message import new_message_id
from rsmq.model.partition import partition_for

PIPELINE = COUNT = 100
WEEK_MS = 7 * 24 * 3600 * 1000


def streams_of(load: BenchLoad) -> list[str]:
    """The streams behind the topic."""
    return [Keys(load.prefix).stream(load.topic, partition) for partition in single(load.partitions).numbers]


async def publish(load: BenchLoad, meter: Meter) -> Cost:
    """Write the fields that rsmq writes, with 100 XADD per pipeline."""
    async with redis.asyncio.from_url(load.url, protocol=2) as client:
        await write(client, load, load.warm)
        await meter.start()
        start = CpuReading()
        await write(client, load, load.count)
        return await meter.cost(start, CpuReading(load.count))


async def write(client: redis.asyncio.Redis, load: BenchLoad, count: int) -> None:
    """Publish with the fields of the layout."""
    streams, pipe, is_own = streams_of(load), client.pipeline(transaction=False), load.layout == "own"
    for number, payload in enumerate(load.payloads(count), 1):
        key = key_of(payload)
        fields: dict[Any, Any] = {"data": to_json(payload), "id": new_message_id(), "key": key}
        if not is_own:
            fields = {name: fields[name] for name in LAYOUTS[load.layout]}
        pipe.xadd(streams[partition_for(key, len(streams))], fields)
        if number % PIPELINE == 0 or number == count:
            await pipe.execute()
            check_cancelled()


async def write_letters(load: BenchLoad, meter: Meter) -> Cost:
    """The keys of a letter to a device of its own, written without looking at what is there: 100 letters a pipeline."""
    keys, devices = Keys(load.prefix), itertools.count()
    async with redis.asyncio.from_url(load.url, protocol=2) as client:
        pipe, till = client.pipeline(transaction=False), now_ms() + WEEK_MS

        async def send(count: int) -> None:
            for number, payload in enumerate(load.payloads(count), 1):
                inbox, session, *_ = keys.device(f"device-{next(devices):07d}")
                pipe.set(f"{inbox}_1", to_json(payload), pxat=till)
                pipe.zadd(inbox, {"1": 1})
                pipe.pexpireat(inbox, till)
                pipe.hset(session, mapping={"seq": 1, "source": f"{number:016d}", "until_ms": till})
                pipe.pexpireat(session, till)
                if number % PIPELINE == 0 or number == count:
                    await pipe.execute()
                    check_cancelled()

        await send(load.warm)
        await meter.start()
        start = CpuReading()
        await send(load.count)
        return await meter.cost(start, CpuReading(load.count))


async def fill(load: BenchLoad) -> None:
    """Publish all messages by hand."""
    async with redis.asyncio.from_url(load.url, protocol=2) as client:
        await write(client, load, load.count)


async def consume(load: BenchLoad, meter: Meter, *, suspends: bool = False) -> Cost:
    """XREADGROUP COUNT 100, decode, call, one XACK per batch. `suspends`: concurrent handlers that suspend."""
    streams, group = streams_of(load), f"bare-{token_hex(4)}"
    handle = concurrently if suspends else one_by_one
    async with redis.asyncio.from_url(load.url, protocol=2, socket_timeout=None) as client:
        for stream in streams:
            await client.xgroup_create(stream, group, "0", mkstream=True)
        seen, start = 0, CpuReading()
        while seen < load.count:
            if start.done == 0 and seen >= load.warm:
                await meter.start()
                start = CpuReading(seen)
            reply: Any = await client.xreadgroup(group, "me", dict.fromkeys(streams, ">"), count=COUNT, block=1000)
            for stream, rows in reply:
                await handle(rows, load.concurrency)
                seen += len(rows)
                await client.xack(stream, group, *[entry_id for entry_id, _ in rows])
            check_cancelled()
        return await meter.cost(start, CpuReading(seen))


def check_cancelled() -> None:
    """redis-py's timeouts sometimes swallow a cancellation; Ctrl-C must not be lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def handler(payload: Any) -> None:
    """Does nothing."""


async def one_by_one(rows: list[tuple[bytes, dict[bytes, bytes]]], _concurrency: int) -> None:
    """Await one handler after the other."""
    for _, fields in rows:
        await handler(from_json(fields[b"data"]))


async def concurrently(rows: list[tuple[bytes, dict[bytes, bytes]]], concurrency: int) -> None:
    """Run as many handlers at once as allowed, then the next ones."""
    for at in range(0, len(rows), concurrency):
        await asyncio.gather(*[suspending(fields) for _, fields in rows[at : at + concurrency]])


async def suspending(fields: dict[bytes, bytes]) -> None:
    """A handler that suspends one time."""
    from_json(fields[b"data"])
    await asyncio.sleep(0)


@asynccontextmanager
async def latency(load: BenchLoad, rate: int = RATE) -> AsyncIterator[Measure]:
    """One blocking reader and one XADD per message, each on its own connection."""
    under_way, stream = list[Times](), Keys(load.prefix).stream(f"{TOPIC}-latency-{token_hex(4)}", 0)

    async with (
        redis.asyncio.from_url(load.url, protocol=2, socket_timeout=None) as sender,
        redis.asyncio.from_url(load.url, protocol=2, socket_timeout=None) as reader,
        anyio.create_task_group() as tasks,
    ):
        await sender.xgroup_create(stream, "bare", "0", mkstream=True)

        async def send(payload: dict[str, Any]) -> None:
            await sender.xadd(stream, {"data": to_json(payload), "id": new_message_id()})

        async def read() -> None:
            while True:
                reply: Any = await reader.xreadgroup("bare", "me", {stream: ">"}, count=COUNT, block=1000)
                for _, rows in reply:
                    for _, fields in rows:
                        under_way[-1].note(from_json(fields[b"data"]))
                    await reader.xack(stream, "bare", *[entry_id for entry_id, _ in rows])
                check_cancelled()

        tasks.start_soon(read)
        yield measure_with(send, under_way, rate)
        tasks.cancel_scope.cancel()
