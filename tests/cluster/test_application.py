"""Schedules, and the harness of a user's tests, on a cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tenacity import wait_fixed

from rsmq import Broker, RetryPolicy
from rsmq.testing import Harness
from tests.cluster.cluster import Cluster
from tests.contract.witness import Witness, until


async def test_the_clock_moves(broker: Broker, cluster: Cluster, prefix: str) -> None:
    """Retries and delayed messages of partitions on all masters."""
    seen: list[tuple[int, int]] = []

    @broker.handler("t", group="g", retry=RetryPolicy(3, wait_fixed(3600)))
    async def handle(order: dict[str, int], message: Any = None) -> None:
        seen.append((order["n"], 1 + sum(n == order["n"] for n, _ in seen)))
        if seen[-1][1] == 1:
            raise ValueError("the first attempt fails")

    async with Harness(broker, url=cluster.url, prefix=prefix) as test:
        for n in range(12):
            await broker.publish("t", {"n": n}, key=f"k{n}")
        await broker.publish("t", {"n": 12}, delay=timedelta(minutes=30))
        await test.handle()
        assert len(seen) == 12
        await test.advance(timedelta(hours=1))
        await test.advance(timedelta(hours=1))
        assert sorted(seen) == [(n, attempt) for n in range(13) for attempt in (1, 2)]


async def test_a_schedule(broker: Broker, witness: Witness) -> None:
    """What notes the ticks is in the slot of the stream."""

    @broker.every(timedelta(milliseconds=100), "ticks")
    def clock() -> str:
        return "tick"

    @broker.handler("ticks", group="g")
    async def handle(text: str) -> None:
        witness.note(text)

    async with broker.running():
        await until(lambda: len(witness.seen) >= 3, "ticks are handled")
