"""A server that closes connections with large answers (`client-output-buffer-limit`): every page that breaks is asked
for again, smaller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from rsmq import Broker, Reject
from rsmq.model.settings import Settings
from rsmq.pipeline.format.options import Access
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.streams import read_entries
from rsmq.redis.topics import lookup_topic
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

COUNT = 60
BODY = "x" * 20_000
LIMIT = 100_000
"""Bytes: five bodies."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its limit is set by the tests."""
    with Server(tcp=True) as running:
        yield running


@asynccontextmanager
async def limited(broker: Broker) -> AsyncIterator[None]:
    """The limit counts."""
    name, none = "client-output-buffer-limit", "normal 0 0 0"
    await broker.client.execute_command("CONFIG", "SET", name, f"normal {LIMIT} {LIMIT} 0")
    try:
        yield
    finally:
        await broker.client.execute_command("CONFIG", "SET", name, none)


def settings_of(server: Server, prefix: str, **others: Any) -> Settings:
    """Few partitions: each has many large messages."""
    return Settings(url=server.url, prefix=prefix, preflight="warn", partitions=2, **others)


async def test_worker_handles_large_messages(server: Server, prefix: str, no_task_left: None) -> None:
    """What is new, what a lost answer has delivered, and its dead letters."""
    broker, handled = Broker(settings=settings_of(server, prefix)), set[int]()

    @broker.handler("t", group="g")
    async def handle(order: dict[str, Any]) -> None:
        handled.add(order["n"])
        raise Reject("no")

    async with broker:
        for number in range(COUNT):
            await broker.publish("t", {"n": number, "body": BODY}, key=str(number % 7))
        async with limited(broker):
            task = asyncio.create_task(broker.run())
            await until(lambda: len(handled) == COUNT, "all are handled")
            letters = broker.dead_letters
            topic = await lookup_topic(broker.topics, "t")
            listed = [each async for each in letters.iterate(topic, "g")]
            broker.stop(timedelta(0))
            await task
        assert len({each.id for each in listed}) == COUNT


async def test_entries_of_a_range_come_in_several_answers(server: Server, prefix: str, no_task_left: None) -> None:
    """The same entries in the same order, forwards and backwards, and as Spark reads them."""
    async with Broker(settings=settings_of(server, prefix)) as broker:
        call, stream = broker.client.execute_command, f"{prefix}:stream"
        ids = [await call("XADD", stream, "*", "body", BODY) for _ in range(COUNT)]
        async with limited(broker):
            found = await read_entries(broker.client, "XRANGE", stream, "-", "+", 50)
            back = await read_entries(broker.client, "XREVRANGE", stream, "+", "-", 500)
            access = Access(server.url, prefix)
            spark = list[bytes]()
            with TaskConnection(access) as connection:
                while page := await asyncio.to_thread(
                    connection.page, "XRANGE", stream, f"({spark[-1].decode()}" if spark else "-", "+", 1000
                ):
                    spark += [each[0] for each in page]
    assert [each[0] for each in found] == ids[:50]
    assert [each[0] for each in back] == ids[::-1]
    assert spark == ids


async def test_device_reads_a_large_inbox(server: Server, prefix: str, no_task_left: None) -> None:
    """A session of the library, and an MQTT client at a gateway."""
    options: dict[str, Any] = {"clean": False, "raw_props": b"\x11\0\0\1\0"}
    with GatewayProcess(server.url, prefix) as gateway:
        async with Broker(settings=settings_of(server, prefix)) as broker:
            for number in range(COUNT):
                await broker.send("phone", {"n": number, "body": BODY})
            reader = await RawClient(gateway.port, 5).connect("reader", **options)
            await reader.subscribe(("large", 1))
            reader.abort()
            sender = await RawClient(gateway.port, 5).connect("sender")
            for number in range(COUNT):
                await sender.publish("large", f"{number} {BODY}".encode(), 1)
            sender.abort()
            async with limited(broker):
                async with broker.connect("phone") as session:
                    letters = [await anext(session) for _ in range(COUNT)]
                assert [each.payload["n"] for each in letters] == [*range(COUNT)]
                reader = await RawClient(gateway.port, 5).connect("reader", **options)
                got = [await reader.message() for _ in range(COUNT)]
                assert [int(each.payload.split()[0]) for each in got] == [*range(COUNT)]
                reader.abort()
