"""MQTT gateways on a cluster: they are killed while slots move, under load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from tests.chaos.gateway_run import GatewayRun
from tests.chaos.worker import TOPIC
from tests.cluster.cluster import Cluster

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.environ.get("CHAOS") != "long", reason="runs with `make chaos`"),
]


async def test_gateways_are_killed_while_slots_move(cluster: Cluster, run_on: Callable[..., GatewayRun]) -> None:
    """QoS 1 loses nothing and keeps the order, QoS 2 comes once. Streams and inboxes move to another master."""
    async with run_on(GatewayRun) as run:
        await run.processes.start_workers(1)
        await run.start_gateways(2)
        count = 40
        await run.publish_all(count)
        keys = run.broker.keys
        for turn, key in enumerate((keys.stream(TOPIC, 0), keys.inbox("reader-1"))):
            await run.reaches(count * (turn + 1))
            await asyncio.to_thread(cluster.migrate, key)
            victim = await run.routing()
            await run.kill(victim)
            await run.recovers()
            await run.start_gateways(1)
        verdict = await run.judge()
        assert not verdict.faults, verdict
