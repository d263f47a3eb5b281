"""The server's clock is set back, as by a step or by a failover to a master whose clock is behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal

import pytest
from tenacity import wait_fixed

from rsmq import Broker, RetryPolicy, Settings
from tests.chaos.system_faults import FaultyServer
from tests.contract.witness import ask
from tests.patience import until

HOUR = 3600


@pytest.mark.parametrize(
    ("ordering", "distribution", "is_replaced"),
    [("key", "hash", True), ("none", "hash", False), ("none", "shared", False), ("none", "shared", True)],
)
async def test_retry_after_the_servers_clock_was_set_back_comes(
    ordering: Literal["key", "none"], distribution: Literal["hash", "shared"], is_replaced: bool
) -> None:
    """By the worker that has parked the message, or by the next one: it does not wait for an hour."""
    seen = Counter[int]()

    @asynccontextmanager
    async def worker(url: str) -> AsyncIterator[Broker]:
        settings: Any = {"lease_ttl": timedelta(seconds=2), "stop_grace": timedelta(0), "preflight": "warn"}
        broker = Broker(Settings(url=url, **settings))
        policy = RetryPolicy(wait=wait_fixed(2))

        @broker.handler("t", group="g", retry=policy, ordering=ordering, distribution=distribution, partitions=1)
        async def handle(n: int) -> None:
            seen[n] += 1
            if seen[n] == 1:
                raise ValueError("the first attempt")

        async with broker.running():
            yield broker

    async def is_settled(broker: Broker) -> bool:
        pending = await ask(broker, "XPENDING", broker.keys.stream("t", 0), "g")
        return not pending[0] and not await ask(broker, "ZCARD", broker.keys.retry("t", 0, "g"))

    with FaultyServer() as server:
        async with worker(server.url) as broker:
            await broker.publish("t", 1, key="k")
            parked = broker.keys.retry("t", 0, "g")
            await until(lambda: ask(broker, "ZCARD", parked), "it waits for its retry")
            server.faults.step_clock(-HOUR)
            if not is_replaced:
                await until(lambda: seen[1] == 2, "it is handled again")
                await until(lambda: is_settled(broker), "it is settled")
        if is_replaced:
            async with worker(server.url) as broker:
                await until(lambda: seen[1] == 2, "it is handled again")
                await until(lambda: is_settled(broker), "it is settled")
    assert seen == {1: 2}


async def test_partition_whose_lease_was_deleted_is_owned_again_after_the_servers_clock_was_set_back() -> None:
    """The partition waits for the longest lease of a member, and not until the time that the clock showed before."""
    with FaultyServer() as server:
        broker = Broker(Settings(url=server.url, lease_ttl=timedelta(seconds=2), preflight="warn", partitions=1))
        broker.handler("t", group="g")(ignore)
        lease = broker.keys.lease("t", 0, "g")

        async def owner() -> bytes | None:
            return await ask(broker, "HGET", lease, "owner")  # type: ignore[no-any-return]

        async def is_owned() -> bool:
            assert broker.worker is not None
            return await owner() == broker.worker.member.encode()

        async def is_waiting() -> bool:
            return await owner() == b""

        async with broker.running():
            await until(is_owned, "the worker has the partition")
            await ask(broker, "XGROUP", "CREATECONSUMER", broker.keys.stream("t", 0), "g", "another")
            server.faults.step_clock(HOUR)
            await ask(broker, "DEL", lease)
            await until(is_waiting, "the partition waits")
            server.faults.step_clock(0)
            await until(is_owned, "the worker has the partition again")


async def ignore(order: dict[str, int]) -> None:
    """Nothing is published."""


@pytest.mark.parametrize("is_replaced", [False, True], ids=["same-owner", "next-owner"])
async def test_window_of_a_key_after_the_servers_clock_was_set_back_ends(*, is_replaced: bool) -> None:
    """Its end was noted an hour ahead of the new time: the window begins anew, and does not wait for that."""
    calls = list[list[int]]()

    @asynccontextmanager
    async def worker(url: str) -> AsyncIterator[Broker]:
        settings: Any = {"lease_ttl": timedelta(seconds=2), "stop_grace": timedelta(0), "preflight": "warn"}
        broker = Broker(Settings(url=url, partitions=1, **settings))

        @broker.handler("t", group="g", by="key", linger=timedelta(seconds=5), batch=10)
        async def handle(numbers: list[int]) -> None:
            calls.append(numbers)

        async with broker.running():
            yield broker

    with FaultyServer() as server:
        async with worker(server.url) as broker:
            await broker.publish("t", 1, key="k")
            waits = f"{broker.keys.stream('t', 0)}:g:waits"
            await until(lambda: ask(broker, "ZCARD", waits), "its window has begun")
            if not is_replaced:
                server.faults.step_clock(-HOUR)
                await until(lambda: calls == [[1]], "the window ends")
        if is_replaced:
            server.faults.step_clock(-HOUR)
            async with worker(server.url):
                await until(lambda: calls == [[1]], "the window ends")
