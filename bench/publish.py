"""CPU per message of publishing, beside redis-py's pipeline."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator

import redis.asyncio
from pydantic_core import to_json

from bench.consume import PARTITIONS, TOPIC, cpu
from rsmq import Broker, Settings
from rsmq.message import new_message_id
from rsmq.partition import partition_for


def payloads(count: int) -> Iterator[dict[str, object]]:
    """What is published: 200 bytes of JSON, a thousand keys."""
    return ({"n": n, "pad": "x" * 180} for n in range(count))


def key_of(payload: dict[str, object]) -> str:
    """The ordering key."""
    return f"k{int(str(payload['n'])) % 1000}"


async def pipeline(url: str, prefix: str, count: int) -> None:
    """What one would write by hand: the same fields, a hundred XADDs a pipeline."""
    client = redis.asyncio.from_url(url, protocol=2)
    pipe = client.pipeline(transaction=False)
    for n, payload in enumerate(payloads(count), 1):
        key = key_of(payload)
        stream = f"{prefix}:{{{TOPIC}.{partition_for(key, PARTITIONS)}}}"
        pipe.xadd(stream, {"data": to_json(payload), "id": new_message_id(), "key": key})
        if n % 100 == 0 or n == count:
            await pipe.execute()
    await client.aclose()


async def many(url: str, prefix: str, count: int) -> None:
    """`publish_many`."""
    async with Broker(Settings(url=url, prefix=prefix)) as broker:
        await broker.publish_many(TOPIC, payloads(count), key=key_of)


async def concurrent(url: str, prefix: str, count: int) -> None:
    """64 tasks that await one publish after the other."""
    source = payloads(count)
    async with Broker(Settings(url=url, prefix=prefix)) as broker:

        async def publisher() -> None:
            for payload in source:
                await broker.publish(TOPIC, payload, key=key_of(payload))

        await asyncio.gather(*[publisher() for _ in range(64)])


if __name__ == "__main__":
    variant, url, prefix, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    began, started = cpu(), time.perf_counter()
    asyncio.run({"pipeline": pipeline, "many": many, "concurrent": concurrent}[variant](url, prefix, count))
    used, took = cpu() - began, time.perf_counter() - started
    print(json.dumps({"cpu_us": used / count * 1e6, "rate": count / took}))
