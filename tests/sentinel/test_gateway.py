"""MQTT gateways behind Sentinel: they are killed, and the master is replaced, under load."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.chaos.gateway_run import GatewayRun
from tests.patience import until
from tests.sentinel.sentinels import Sentinels

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.environ.get("CHAOS") != "long", reason="runs with `make chaos`"),
]


async def test_gateways_are_killed_and_the_master_is_replaced(tmp_path: Path) -> None:
    """The master hands over in order: it stops writing, and its replica has everything. Nothing confirmed is lost."""
    sentinels = await asyncio.to_thread(Sentinels().__enter__)
    try:
        async with GatewayRun(tmp_path, sentinels.url, 1) as run:
            await run.processes.start_workers(1)
            await run.start_gateways(2)
            count = 100
            await run.publish_all(count)
            for turn in range(3):
                await run.reaches(count * (turn + 1))
                if turn == 1:
                    before = sentinels.master_port()
                    master = next(each for each in sentinels.members if each.port == before)
                    replica = next(each for each in sentinels.members if each is not master)
                    with master.client() as client:
                        await asyncio.to_thread(
                            client.execute_command, "FAILOVER", "TO", "127.0.0.1", replica.port, "TIMEOUT", "5000"
                        )
                    await until(
                        lambda before=before: sentinels.master_port() not in (0, before),
                        "another one is named",
                    )
                else:
                    await run.kill(await run.routing())
                    await run.start_gateways(1)
                await run.recovers()
            verdict = await run.judge()
            assert not verdict.faults, verdict
    finally:
        await asyncio.to_thread(sentinels.__exit__, None, None, None)
