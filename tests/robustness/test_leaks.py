"""A worker leaves nothing behind when it stops, and does not grow while it works.

Thirty starts and some ten thousand messages in every run; `CHAOS=long`: 500 starts and a million messages.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest

from benchmarks.footprint import Footprint
from rsmq import Broker, Message, Settings
from tests.contract.witness import settled
from tests.patience import until
from tests.servers import Server

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")]
IS_LONG = os.environ.get("CHAOS") == "long"
CYCLES, WARM = (500, 50) if IS_LONG else (30, 10)
MESSAGES = 1_000_000 if IS_LONG else 12_000
CHUNK = 1_500
if IS_LONG:
    pytestmark += [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker on the shared server; the overrides are settings."""
    return lambda **changes: Broker(Settings(url=server_url, prefix=prefix, preflight="warn", **changes))


def working(broker: Broker) -> list[int]:
    """Register handlers of both kinds; returns their counters."""
    done = [0, 0]

    @broker.handler("t", group="single", partitions=2)
    async def handle(payload: dict[str, Any]) -> None:
        done[0] += 1

    @broker.handler("t", group="batch", partitions=2, batch=200)
    async def handle_all(payloads: list[dict[str, Any]]) -> None:
        done[1] += len(payloads)

    return done


async def cycle(broker: Broker) -> None:
    """Start a worker, use it and stop it."""
    done = working(broker)
    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(10)])
        await until(lambda: min(done) >= 10, "ten messages are handled twice")
        async with broker.connect("phone") as session:
            await broker.send("phone", "hello")
            await session.ack(await anext(session))


def is_back(before: Footprint) -> bool:
    """Whether nothing more is open or running than before."""
    now = Footprint.now()
    return now.files <= before.files and now.threads <= before.threads and now.tasks <= before.tasks


async def test_worker_started_and_stopped_many_times_leaves_nothing(
    make_broker: Callable[..., Broker], server: Server, prefix: str, no_task_left: None
) -> None:
    """No task, thread, file, connection, key, consumer or member is left beyond those after the first few cycles."""
    with server.client() as plain:

        def held_by_server() -> tuple[int, ...]:
            # the audit adds one key for each partition, once a worker has run long enough
            keys = [key for key in plain.scan_iter(f"{prefix}:*", count=1000) if not key.endswith(b":removed")]
            streams = [key for key in keys if plain.type(key) == b"stream" and not key.endswith(b":dlq")]
            consumers = sum(len(plain.xinfo_consumers(key, group)) for key in streams for group in ("single", "batch"))
            members = sum(plain.scard(key) for key in keys if key.endswith(b":nodes:set"))
            return len(keys), consumers, members, len(plain.client_list())

        for _ in range(WARM):
            await cycle(make_broker())
        before_there, before = held_by_server(), Footprint.now()  # in this order: the first opens a connection
        for _ in range(CYCLES - WARM):
            await cycle(make_broker())
        # a closed socket disappears a moment later, on both sides
        await until(lambda: is_back(before), "no file, thread or task more than before")
        assert before_there[1] == 0, "a worker that stops deletes its consumers"
        await until(
            lambda: held_by_server() == before_there, f"no key, consumer, member, connection: {before_there}", 10
        )
        after = Footprint.now()
    assert after.objects - before.objects < 40 * (CYCLES - WARM), "a worker has thousands of objects: none of it stays"


async def test_worker_memory_after_many_messages_does_not_grow(
    make_broker: Callable[..., Broker], no_task_left: None
) -> None:
    """After a warm-up a busy worker keeps its memory and its number of objects."""
    tight = {"retention_age": timedelta(0), "retention_length": 500, "retention_interval": timedelta(milliseconds=100)}
    broker = make_broker(**tight)
    done = working(broker)
    samples: list[Footprint] = []
    async with broker.running():
        for at in range(0, MESSAGES, CHUNK):
            await broker.publish_many(
                "t", [{"n": n, "pad": "x" * 200} for n in range(CHUNK)], key=lambda each: str(each["n"])
            )
            await until(lambda aim=at + CHUNK: min(done) >= aim, "all so far is handled", 60)
            if at % (MESSAGES // 8) == 0:
                samples.append(Footprint.now())
    middle, end = samples[len(samples) // 2], samples[-1]
    assert end.rss < 1.05 * middle.rss, [sample.rss >> 10 for sample in samples]
    slots = end.tasks - middle.tasks  # of the pool, which grows to its size with the load
    assert end.objects < middle.objects + 1000 + 30 * slots, [sample.objects for sample in samples]
    assert end.threads == middle.threads
    # on a busy machine more calls meet, and the pool opens a connection more; a leak would be one for each chunk
    assert end.files - middle.files < MESSAGES // CHUNK // 2


async def test_idle_worker_keeps_no_batch_in_memory(make_broker: Callable[..., Broker], no_task_left: None) -> None:
    """Its pool tasks drop their last batch instead of keeping it until the next one."""
    broker, done = make_broker(), [0]

    @broker.handler("t", group="g", partitions=2, batch=100)
    async def handle(messages: list[Message]) -> None:
        done[0] += len(messages)
        await anyio.sleep(0.01)  # so that many of them work at the same time

    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(5000)])
        await until(lambda: done[0] >= 5000, "all are handled")
        await settled(broker, "t")
        gc.collect()
        assert sum(type(each) is Message for each in gc.get_objects()) < 100
