"""MQTT gateways on a cluster: they are killed while slots move, under load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.chaos.checker import disorder
from tests.chaos.gateway_run import GatewayRun
from tests.chaos.worker import TOPIC
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.long_chaos("half a minute")


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


@pytest.mark.parametrize("of", ["messages", "inbox"])
async def test_a_master_is_killed_under_gateways(cluster: Cluster, run_on: Callable[..., GatewayRun], of: str) -> None:
    """No handover: what its replica did not have is lost, of the messages or of the letters of a subscriber. Everything
    is acknowledged in the end, whatever was not lost arrives in the order of its publisher, and sessions go on.
    """
    count = 300
    async with run_on(GatewayRun) as run:
        await run.processes.start_workers(1)
        await run.start_gateways(2)
        await run.publish_all(count)
        await run.reaches(count)
        key = run.broker.keys.stream(TOPIC, 0) if of == "messages" else run.broker.keys.inbox("reader-2")
        victim = cluster.owner(key)
        try:
            victim.kill()
            others = [member for member in cluster.members if member is not victim]
            await run.until(lambda: cluster.owner(key, others) is not victim, "its replica has taken over")
            await asyncio.to_thread(victim.start)
            await run.recovers()
            await run.published()
            names, lost = await run.stored()
            readers = list(run.subscribers.values())
            last = {(key, n) for key, n in names if n >= count - 20}
            for each in readers:
                await run.until(
                    lambda each=each: last <= {(e.key, e.n) for e in each.events}, f"the end at {each.client_id}", 60
                )
            await run.until(lambda: names <= run.ledger.commits(), "all is handled", 60)
            missing = {each.client_id: names - {(e.key, e.n) for e in each.events} for each in readers}
            print(f"{of}: the server has lost {len(lost)} of {4 * count} messages,",
                  {name: len(found) for name, found in missing.items()}, "letters of those that it has")  # fmt: skip
            assert len(lost) < count
            for each in readers:
                assert len(missing[each.client_id]) < count
                assert not disorder(each.events, lost | missing[each.client_id]), each.client_id
        finally:
            await asyncio.to_thread(cluster.heal)
