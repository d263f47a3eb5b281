"""A retry that is taken over behind an earlier message of its key: it starts when it is due, not when that is done."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, Message, Retry, Settings
from rsmq.redis.client.connector import Client
from tests.patience import until

HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 10}, {"ordering": "partition"}, {"ordering": "partition", "batch": 2}],
    ids=["key", "key-in-batches", "partition", "partition-in-batches"],
)
@pytest.mark.parametrize("is_moved", [False, True], ids=["as-parked", "rescheduled"])
async def test_retry_behind_an_unsettled_message_waits_until_it_is_due(
    settings: Settings, client: Client, options: dict[str, Any], *, is_moved: bool
) -> None:
    """The settlement of the first message is lost, as in a failover, and the second waits for its retry. The next owner
    handles the first one again. Then the second one waits, with what follows, until it is rescheduled to now."""
    started = list[tuple[int, int]]()

    def fails(n: int, message: Message) -> Retry | None:
        started.append((n, message.attempt))
        return Retry("later", after=HOUR) if n == 2 and message.attempt == 1 else None

    async def bill(order: dict[str, int], message: Message) -> None:
        if error := fails(order["n"], message):
            raise error

    async def bill_all(orders: list[dict[str, int]], messages: list[Message]) -> list[Exception | None]:
        outcomes = list[Exception | None]()
        for order, message in zip(orders, messages, strict=True):
            is_behind = any(outcomes)
            outcomes.append(Retry("behind") if is_behind else fails(order["n"], message))
        return outcomes

    def worker() -> Broker:
        broker = Broker(replace(settings, partitions=1))
        broker.handler("orders", group="billing", **options)(bill_all if "batch" in options else bill)
        return broker

    async def count_parked() -> int:
        return int(await client.execute_command("ZCARD", publisher.keys.retry("orders", 0, "billing")))

    async with Broker(replace(settings, partitions=1)) as publisher:
        async with worker().running():
            await publisher.publish("orders", {"n": 1}, key="k")
            await until(lambda: started == [(1, 1)], "the first one is handled")
            second = await publisher.publish("orders", {"n": 2}, key="k")
            await until(count_parked, "the second one waits for its retry")
        await publisher.publish("orders", {"n": 3}, key="k")
        if is_moved:
            await publisher.reschedule(second, delay=2 * HOUR)
        stream = publisher.keys.stream("orders", 0)
        ((first, _),) = await client.execute_command("XRANGE", stream, "-", "+", "COUNT", 1)
        again = ("RETRYCOUNT", 1, "FORCE", "JUSTID")
        await client.execute_command("XCLAIM", stream, "billing", "gone", 0, first, *again)
        started.clear()
        async with (other := worker()).running():
            await until(lambda: (1, 2) in started, "the first one is handled again")
            assert other.worker is not None
            (consumer,) = other.worker.consumers
            await until(lambda: consumer.work.waiting_for_retry == 1 or len(started) > 1, "the second one is looked at")
            assert started == [(1, 2)]
            assert await count_parked() == 1
            await publisher.reschedule(second, delay="0s")
            await until(lambda: len(started) == 3, "the others are handled")
        assert started == [(1, 2), (2, 2), (3, 1)]
        assert await count_parked() == 0


async def test_retry_behind_a_running_message_is_rescheduled(settings: Settings, client: Client) -> None:
    """It has no timer yet, and starts when the one before it is done."""
    started, may_end = list[tuple[int, int]](), anyio.Event()

    def worker() -> Broker:
        broker = Broker(replace(settings, partitions=1))

        @broker.handler("orders", group="billing")
        async def bill(order: dict[str, int], message: Message) -> None:
            started.append((order["n"], message.attempt))
            if order["n"] == 2 and message.attempt == 1:
                raise Retry("later", after=HOUR)
            if order["n"] == 1 and message.attempt == 2:
                await may_end.wait()

        return broker

    async with Broker(replace(settings, partitions=1)) as publisher:
        retries, stream = publisher.keys.retry("orders", 0, "billing"), publisher.keys.stream("orders", 0)
        async with worker().running():
            await publisher.publish("orders", {"n": 1}, key="k")
            await until(lambda: started == [(1, 1)], "the first one is handled")
            second = await publisher.publish("orders", {"n": 2}, key="k")
            await until(lambda: client.execute_command("ZCARD", retries), "the second one waits for its retry")
        ((first, _),) = await client.execute_command("XRANGE", stream, "-", "+", "COUNT", 1)
        again = ("RETRYCOUNT", 1, "FORCE", "JUSTID")
        await client.execute_command("XCLAIM", stream, "billing", "gone", 0, first, *again)
        async with (other := worker()).running():
            await until(lambda: (1, 2) in started, "the first one is handled again")
            assert other.worker is not None
            (consumer,) = other.worker.consumers
            await until(lambda: consumer.work.waiting_for_key == 1, "the second one waits behind it")
            await publisher.reschedule(second, delay="0s")
            may_end.set()
            await until(lambda: started[-1] == (2, 2), "the second one is tried again")
        assert not await client.execute_command("ZCARD", retries)


@pytest.mark.parametrize("how", ["due", "moved to now", "moved away and back"])
async def test_call_of_a_key_behind_a_lost_settlement_waits_until_its_retry_is_due(
    settings: Settings, client: Client, how: str
) -> None:
    """The first message of a call is done, and the second waits for its retry with the third. The settlement of the
    first one is lost. The next owner handles all of them together, when the retry is due, and not before."""
    calls, started, delay = list[tuple[list[int], int]](), list[float](), timedelta(seconds=2) if how == "due" else HOUR

    def worker() -> Broker:
        broker = Broker(replace(settings, partitions=1))

        @broker.handler("orders", group="billing", batch=3, by="key", linger=HOUR)
        async def bill_all(orders: list[dict[str, int]], messages: list[Message]) -> list[Exception | None]:
            seconds, micros = await client.execute_command("TIME")
            started.append(1000 * int(seconds) + int(micros) / 1000)
            calls.append(([order["n"] for order in orders], messages[0].attempt))
            is_first = len(calls) == 1
            return [Retry("later", after=delay) if is_first and order["n"] == 2 else None for order in orders]

        return broker

    async with Broker(replace(settings, partitions=1)) as publisher:
        stream, retries = publisher.keys.stream("orders", 0), publisher.keys.retry("orders", 0, "billing")

        async def is_settled() -> bool:
            return (await client.execute_command("XPENDING", stream, "billing"))[0] == 0

        async with worker().running():
            refs = [await publisher.publish("orders", {"n": n}, key="k") for n in (1, 2, 3)]
            await until(lambda: client.execute_command("ZCARD", retries), "the second one waits for its retry")
        if how == "moved away and back":
            await publisher.reschedule(refs[1], delay=2 * HOUR)
        _, due = await client.execute_command("ZRANGE", retries, 0, 0, "WITHSCORES")
        ((first, _),) = await client.execute_command("XRANGE", stream, "-", "+", "COUNT", 1)
        again = ("RETRYCOUNT", 1, "FORCE", "JUSTID")
        await client.execute_command("XCLAIM", stream, "billing", "gone", 0, first, *again)
        async with (other := worker()).running():
            assert other.worker is not None
            (consumer,) = other.worker.consumers
            if how != "due":
                await until(lambda: consumer.work.waiting_for_retry == 1 or len(calls) > 1, "the call is looked at")
                assert calls == [([1, 2, 3], 1)]
                assert await client.execute_command("ZCARD", retries) == 1
                await publisher.reschedule(refs[1], delay="0s")
            await until(is_settled, "the call is repeated, and settled")
        assert calls == [([1, 2, 3], 1), ([1, 2, 3], 2)]
        assert how != "due" or started[1] >= float(due)
        assert not await client.execute_command("ZCARD", retries)


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_retry_that_holds_its_partition_waits_under_another_ordering_until_it_is_due(
    settings: Settings, client: Client, ordering: Any
) -> None:
    """With `ordering="partition"` a message without a key holds its partition while it waits. The next owner has
    another ordering: there it holds up nothing."""
    started = list[tuple[int, int]]()

    def worker(ordering: Any) -> Broker:
        broker = Broker(replace(settings, partitions=1))

        @broker.handler("orders", group="billing", ordering=ordering)
        async def bill(order: dict[str, int], message: Message) -> None:
            started.append((order["n"], message.attempt))
            if order["n"] == 1 and message.attempt == 1:
                raise Retry("later", after=HOUR)

        return broker

    async with Broker(replace(settings, partitions=1)) as publisher:
        retries = publisher.keys.retry("orders", 0, "billing")
        async with worker("partition").running():
            first = await publisher.publish("orders", {"n": 1})
            await until(lambda: client.execute_command("ZCARD", retries), "it waits for its retry")
        async with worker(ordering).running():
            await publisher.publish("orders", {"n": 2})
            await until(lambda: (2, 1) in started, "the other one is handled")
            assert started == [(1, 1), (2, 1)]
            await publisher.reschedule(first, delay="0s")
            await until(lambda: len(started) == 3, "it is tried again")
        assert started == [(1, 1), (2, 1), (1, 2)]
