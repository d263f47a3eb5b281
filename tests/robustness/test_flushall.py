"""FLUSHALL under load: every role of a worker begins again by itself, and the log stays short."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial

import anyio
import pytest

from rsmq import Broker, Message, SessionLost
from rsmq.errors import BrokerError
from tests.patience import until
from tests.servers import Server


def reached(seen: Counter[str], kind: str, goal: int) -> bool:
    """Whether so many of a kind were handled."""
    return seen[kind] >= goal


def has(letters: list[int], count: int) -> bool:
    """Whether so many letters have come."""
    return len(letters) >= count


async def test_flushall_under_load_every_role_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    """Handlers, delayed messages, a schedule, a feed and the session of a device: what comes afterwards is handled, the
    session says that it was lost, and no role says more than a few lines."""
    caplog.set_level(logging.INFO, "rsmq")
    seen, letters, lost = Counter[str](), list[int](), 0
    with Server() as server:
        broker = Broker(url=server.url, preflight="warn", partitions=2, lease_ttl=timedelta(seconds=1))

        @broker.handler("orders", group="billing")
        async def bill(order: dict[str, str]) -> None:
            seen[order["kind"]] += 1

        @broker.every(timedelta(seconds=1), "orders")
        def tick() -> dict[str, str]:
            return {"kind": "tick"}

        broker.deliver("alerts", to=lambda alert: "phone")

        async def listen() -> None:
            nonlocal lost
            while True:
                try:
                    async with broker.connect("phone", auto_ack=True) as session:
                        async for letter in session:
                            letters.append(letter.payload["n"])
                except SessionLost:
                    lost += 1

        async def publish() -> None:
            n = 0
            while True:
                n += 1
                with suppress(BrokerError):
                    await broker.publish("orders", {"kind": "plain"}, key=str(n % 7))
                    await broker.publish("orders", {"kind": "delayed"}, delay=timedelta(milliseconds=50))
                    await broker.publish("alerts", {"n": n}, key="phone")
                await anyio.sleep(0.005)

        async with broker.running(), anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            tasks.start_soon(publish)
            for round_number in range(3):
                goals = {kind: seen[kind] + more for kind, more in (("tick", 2), ("plain", 50), ("delayed", 20))}
                for kind, goal in goals.items():
                    await until(partial(reached, seen, kind, goal), f"{kind} messages are handled")
                await until(partial(has, letters, len(letters) + 50), "letters reach the device")
                if round_number < 2:
                    caplog.clear()
                    await broker.client.execute_command("FLUSHALL")
            tasks.cancel_scope.cancel()
    assert lost == 2
    assert letters == sorted(set(letters)), "in order, none twice"
    said = Counter((record.name, record.levelname) for record in caplog.records)
    assert max(said.values()) <= 8, said
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert all("is gone, making it again from the start" in each for each in errors)
    assert 1 <= len(errors) <= 4, "one for each group; a second one if it is found while it is made"


async def test_flushall_a_worker_makes_the_topic_of_its_outputs_again_as_it_was() -> None:
    """It was resized. A process that does not know that would make it with two partitions, while this one goes on to
    store outputs in the four that it knows."""
    handled = list[int]()
    with Server() as server:
        broker = Broker(url=server.url, preflight="warn", partitions=2)

        @broker.handler("orders", group="billing")
        async def bill(order: dict[str, int], message: Message) -> None:
            await message.publish("invoices", order)
            handled.append(order["n"])

        async with broker, Broker(url=server.url, preflight="warn", partitions=2) as other, broker.running():
            await broker.topics.ensure("invoices")
            assert (await broker.topics.resize("invoices", 4)).partitions == 4
            await broker.publish("orders", {"n": 1})
            await until(lambda: handled == [1], "the worker knows the topic of its outputs")
            await broker.client.execute_command("FLUSHALL")

            async def is_made_again() -> bool:
                return await other.topics.find("invoices") is not None

            await until(is_made_again, "the topic is made again, though nothing is published")
            made = await other.topics.ensure("invoices")
            assert made.numbers == (0, 1, 2, 3, 4, 5)
            assert made.layout.sealed_numbers == {0, 1}


async def test_flushall_a_worker_writes_the_layout_of_its_topic_again_though_another_process_has_made_it() -> None:
    """The other one knows only with how many partitions the topic began. The worker goes on, and does not end."""
    handled = list[int]()
    with Server() as server:
        broker = Broker(url=server.url, preflight="warn", partitions=1)

        @broker.handler("orders", group="billing")
        async def bill(order: dict[str, int]) -> None:
            handled.append(order["n"])

        async with broker, broker.running():
            await broker.publish("orders", {"n": 1})
            await until(lambda: handled == [1], "the worker has handled it")
            await broker.topics.resize("orders", 4)
            worker = broker.worker
            assert worker is not None
            await until(lambda: worker.consumers[0].topic.partitions == 4, "the worker knows that the topic has grown")
            topic = broker.keys.topic("orders")
            made = await broker.client.execute_command("HGETALL", topic)
            fields = {name: value for name, value in zip(made[::2], made[1::2], strict=True) if name != b"layout"}
            fields |= {b"partitions": b"1", b"created_ms": b"%d" % (int(fields[b"created_ms"]) + 1)}
            lost = [("FLUSHALL",), ("SADD", broker.keys.topics, "orders")]
            lost += [("HSET", topic, *[part for pair in fields.items() for part in pair])]
            await broker.client.pipelined([("MULTI",), *lost, ("EXEC",)])
            async with Broker(url=server.url, preflight="warn", partitions=1) as other:

                async def is_whole() -> bool:
                    found = await other.topics.find("orders")
                    return found is not None and found.partitions == 4

                await until(is_whole, "the worker has written the layout again")
                await other.publish("orders", {"n": 2})
            await until(lambda: handled == [1, 2], "the worker goes on")
