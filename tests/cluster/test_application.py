"""Schedules and the test harness on a cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio.to_thread
import pytest
from tenacity import wait_fixed

from rsmq import Broker, RetryPolicy
from rsmq.broker import requests
from rsmq.testing import Harness
from rsmq.testing.server import remove_keys
from tests.cluster.cluster import Cluster
from tests.contract.witness import Witness
from tests.patience import until


async def test_harness_clock_on_a_cluster_moves_retries_and_delays(
    broker: Broker, cluster: Cluster, prefix: str
) -> None:
    """Retries and delayed messages of partitions on all masters become due."""
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


async def test_schedule_on_a_cluster_publishes_ticks(broker: Broker, witness: Witness) -> None:
    """The record of the ticks is in the slot of the stream."""

    @broker.every(timedelta(milliseconds=100), "ticks")
    def clock() -> str:
        return "tick"

    @broker.handler("ticks", group="g")
    async def handle(text: str) -> None:
        witness.note(text)

    async with broker.running():
        await until(lambda: len(witness.seen) >= 3, "ticks are handled")


async def test_cleaning_of_a_cluster_removes_only_keys_of_the_prefix(
    broker: Broker, cluster: Cluster, prefix: str
) -> None:
    """The plugin removes the keys of a test from all masters, and no others."""
    async with broker:
        await broker.publish_many("t", range(40))
        await broker.client.execute_command("SET", f"{prefix}x:y", 1)
        assert await anyio.to_thread.run_sync(remove_keys, cluster.url, prefix) > 8
        assert await broker.topics.names() == []
        assert await broker.client.execute_command("DEL", f"{prefix}x:y") == 1


async def test_requests_on_all_nodes_get_their_answers(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key and the channel of a request are in one slot; the rings alone bring the answers."""
    monkeypatch.setattr(requests, "POLL", 3600)

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(number: int) -> int:
        return number + 1

    async with broker.running():
        for number in range(30):
            assert await broker.request("quotes", number, timeout="60s") == number + 1
        for node in broker.client.nodes:
            await node.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert await broker.request("quotes", 1, timeout="60s") == 2
