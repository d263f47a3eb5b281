"""MQTT gateways behind Sentinel: they are killed, and the master is replaced, under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.checker import Name, disorder
from tests.chaos.gateway_run import GatewayRun
from tests.patience import until
from tests.sentinel.sentinels import Sentinels

pytestmark = pytest.mark.long_chaos("half a minute")


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


async def test_a_master_is_killed_under_gateways(tmp_path: Path) -> None:
    """No handover: what it had not replicated is lost. All that the next master has arrives, and sessions go on.

    The ledger knows what was acknowledged. What is missing in the streams afterwards, the server has lost; every other
    message reaches the handler and each subscriber, in the order of its publisher.
    """
    sentinels = await asyncio.to_thread(Sentinels().__enter__)
    try:
        async with GatewayRun(tmp_path, sentinels.url, 1) as run:
            await run.processes.start_workers(1)
            await run.start_gateways(2)
            count = 150
            await run.publish_all(count)
            readers = list(run.subscribers.values())
            for turn in range(2):
                await run.reaches(count * (turn + 1))
                before = sentinels.master_port()
                victim = next(each for each in sentinels.members if each.port == before)
                await asyncio.to_thread(victim.kill)
                await until(lambda before=before: sentinels.master_port() not in (0, before), "another one is named")
                await asyncio.to_thread(victim.start)
                await until(sentinels.is_whole, "both others are its replicas")
            await run.published()
            names, lost = await run.stored()

            def are_there(seen: set[Name]) -> bool:
                return names <= seen

            for each in readers:
                await run.until(
                    lambda each=each: are_there({(e.key, e.n) for e in each.events}), f"{each.client_id}", 60
                )
            await run.until(lambda: are_there(run.ledger.commits()), "all is handled", 60)
            print(f"lost by the server: {len(lost)} of {4 * count}")
            assert len(lost) < count
            for each in readers:
                assert not disorder(each.events, lost), each.client_id
    finally:
        await asyncio.to_thread(sentinels.__exit__, None, None, None)
