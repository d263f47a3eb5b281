"""Messages persisted point to point, each for a device of its own: `python -m benchmarks.persist VARIANT URL COUNT`.

End to end: from the payload as an object to the server's confirmation, in one client process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, Final

import redis.asyncio
from pydantic_core import to_json

from benchmarks.postgres import Tables
from benchmarks.published import Published, published_message
from benchmarks.server import cpu
from rsmq import Broker, Settings

BATCH: Final = 500
SENDERS: Final = 256
TOPIC: Final = "alerts"
PARTITIONS: Final = 8
SMALL: Final = 62
"""Bytes of a payload."""

Finished = Callable[[], None]


def payload(size: int = SMALL) -> dict[str, Any]:
    """An object of that many bytes as JSON."""
    return {"n": 1000000, "pad": "x" * (size - len(to_json({"n": 1000000, "pad": ""})))}


def pairs(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Devices, and what each gets."""
    one = payload()
    return ((f"device-{n:07d}", one) for n in range(count))


async def published(url: str, count: int, begin: Finished) -> None:
    """The published design: one script a message, 500 in a pipeline, the next one packed while one is under way."""
    client = redis.asyncio.from_url(url)
    store = Published(client)
    await store.load()
    begin()
    source, under_way = pairs(count), None
    while batch := list(islice(source, BATCH)):
        pipe = client.pipeline(transaction=False)
        for device, item in batch:
            pipe.execute_command(*store.add_command(device, [published_message(to_json(item), topic=TOPIC)]))
        if under_way:
            await under_way
        under_way = asyncio.ensure_future(pipe.execute())
        await asyncio.sleep(0)
    if under_way:
        await under_way
    await client.aclose()


async def postgres(socket: str, count: int, begin: Finished) -> None:
    """Two tables on PostgreSQL: 500 messages a transaction, two connections."""
    tables = [await Tables.connect(socket, create=n == 0) for n in range(2)]
    begin()
    source = pairs(count)

    async def store(table: Tables) -> None:
        while batch := list(islice(source, BATCH)):
            await table.add([device for device, _ in batch], [to_json(item) for _, item in batch])

    await asyncio.gather(*[store(table) for table in tables])
    for table in tables:
        await table.close()


async def send(url: str, count: int, begin: Finished) -> None:
    """`broker.send`, 256 tasks that await one after the other."""
    source = pairs(count)
    async with Broker(Settings(url=url)) as broker:
        begin()

        async def sender() -> None:
            for device, item in source:
                await broker.send(device, item)

        await asyncio.gather(*[sender() for _ in range(SENDERS)])


async def send_many(url: str, count: int, begin: Finished) -> None:
    """`broker.send_many`."""
    async with Broker(Settings(url=url)) as broker:
        begin()
        await broker.send_many(pairs(count))


async def deliver(url: str, count: int, begin: Finished) -> None:
    """`broker.deliver`: from a topic that holds the messages already, until the last is in its inbox and settled."""
    broker = Broker(Settings(url=url))
    broker.deliver(TOPIC, to=lambda payload: payload["to"], group="devices", partitions=PARTITIONS)
    async with broker:
        items = ({"to": device} | item for device, item in pairs(count))
        await broker.publish_many(TOPIC, items, key=lambda item: str(item["to"]))
        begin()
        async with broker.running():
            await settled(broker, count)


async def settled(broker: Broker, count: int) -> None:
    """Until the group has nothing left: looks ten times a second, which costs nothing beside the work."""
    streams = [broker.keys.stream(TOPIC, partition) for partition in range(PARTITIONS)]
    while await in_flight(broker, streams, count):
        await asyncio.sleep(0.1)


async def in_flight(broker: Broker, streams: list[str], count: int) -> bool:
    """Whether something is unread or unsettled."""
    read = 0
    for stream in streams:
        for row in await broker.client.execute_command("XINFO", "GROUPS", stream):
            fields = dict(zip(row[::2], row[1::2], strict=True))
            read += fields[b"entries-read"] or 0
            if fields[b"pending"]:
                return True
    return read < count


VARIANTS: Final[dict[str, Callable[[str, int, Finished], Coroutine[Any, Any, None]]]] = {
    "published": published,
    "postgres": postgres,
    "send": send,
    "send_many": send_many,
    "deliver": deliver,
}


def main() -> None:
    """Run one, and print its figures."""
    variant, url, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    began = started = 0.0

    def begin() -> None:
        nonlocal began, started
        print("begin", flush=True)  # the parent process reads the figures of the server now, then lets this one go on
        sys.stdin.readline()
        began, started = cpu(), time.perf_counter()

    asyncio.run(VARIANTS[variant](url, count, begin))
    used, took = cpu() - began, time.perf_counter() - started
    print(json.dumps({"cpu_us": used / count * 1e6, "rate": count / took}))


if __name__ == "__main__":
    main()
