"""Workers killed, slots moved and masters lost under load: the verdict is that of the chaos tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rsmq import BrokerError
from rsmq.errors import BrokerUnavailable
from tests.chaos.checker import Name
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.outputs import wrong_outputs
from tests.chaos.worker import GROUP, OUTPUT_TOPIC, TOPIC
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.chaos


class Replicated(ScenarioRun):
    """Waits for a replica on each publish, so that confirmed messages survive the loss of a master."""

    async def publish(self, key: str, **order: Any) -> Name:
        """Only a success or BrokerUnavailable is definite; any other error leaves the outcome unknown."""
        n = self._next.get(key, 0)
        self._next[key] = n + 1
        try:
            await self.broker.publish(TOPIC, {"key": key, "n": n, **order}, key=key, wait_replicas=1)
            self.history.stored.add((key, n))
        except BrokerUnavailable:
            pass
        except BrokerError:  # PublishUnknown, or stored on too few
            self.history.unknown.add((key, n))
        return key, n


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_messages_of_a_killed_worker_run_elsewhere_in_order(
    run_on: Callable[..., ScenarioRun], distribution: str
) -> None:
    """They run elsewhere long before its lease of 30 s ends; no message is lost or reordered."""
    async with run_on(lease=30, distribution=distribution) as run:
        await run.processes.start_workers(2)
        async with run.load(seconds=0.01):
            await run.handles(200)
            victim = run.busiest()
            victim.kill()
            killed = time.monotonic()
            run.excuse("killed", victim)
            await run.handles(400)
        verdict = await run.verdict(seconds=20)
        assert not verdict.faults, verdict
        assert run.recovery(victim, killed) < 20


@pytest.mark.parametrize(
    ("distribution", "how"), [("hash", "migrate"), ("shared", "migrate"), ("hash", "migrate_at_once")]
)
async def test_moving_slots_under_load_loses_no_message(
    run_on: Callable[..., ScenarioRun], cluster: Cluster, distribution: str, how: str
) -> None:
    """Partitions, leases and members move to other nodes, key by key or at once; order per key is kept."""
    migrate = getattr(cluster, how)
    async with run_on(distribution=distribution) as run:
        await run.processes.start_workers(2)
        keys = run.broker.keys
        async with run.load(seconds=0.005):
            await run.handles(100)
            run.excuse("slots were moved")
            for partition in range(8):
                await anyio.to_thread.run_sync(migrate, keys.stream(TOPIC, partition))
                await run.handles(20)
            for key in (keys.members(TOPIC, "workers"), keys.topic(TOPIC), keys.topics):
                await anyio.to_thread.run_sync(migrate, key)
            await run.handles(200)
        verdict = await run.verdict(seconds=30)
        assert not verdict.faults, verdict
        assert not any(worker.exit_code for worker in run.processes.workers), (
            f"a worker has ended: {run.processes.log(20_000)}"
        )


async def test_moving_slots_under_outputs_stores_each_once(
    run_on: Callable[..., ScenarioRun], cluster: Cluster
) -> None:
    """Slots of inputs and of targets move while outputs are relayed, and a worker is killed."""
    async with run_on(output="message", lease=2) as run:
        await run.processes.start_workers(2)
        keys = run.broker.keys
        async with run.load(seconds=0.005):
            await run.handles(100)
            run.excuse("slots were moved")
            for partition in range(3):
                await anyio.to_thread.run_sync(cluster.migrate, keys.stream(TOPIC, partition))
                await anyio.to_thread.run_sync(cluster.migrate, keys.stream(OUTPUT_TOPIC, partition))
                await run.handles(20)
            run.busiest().kill()
            await run.processes.start_workers(1)
            run.excuse("killed")
            await run.handles(100)
        verdict = await run.verdict(seconds=30)
        assert not verdict.faults, verdict
        topic = await run.broker.topics.existing(TOPIC)
        with anyio.fail_after(60):  # the relay is the last step
            while any([
                await run.broker.client.execute_command("XLEN", keys.out(TOPIC, number, GROUP))
                for number in topic.numbers
            ]):  # fmt: skip
                await anyio.sleep(0.05)
        assert await wrong_outputs(run) == []


LONG = pytest.mark.long_chaos("20 seconds for what a killed master shows almost as well")


@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=LONG)])
async def test_loss_of_a_master_under_load_loses_no_confirmed_message(
    run_on: Callable[..., ScenarioRun], cluster: Cluster, how: str
) -> None:
    """Its replica takes over, and workers and publishers continue; messages that a replica confirmed are handled."""
    async with run_on(Replicated) as run:
        await run.processes.start_workers(2)
        stream = run.broker.keys.stream(TOPIC, 0)
        victim = cluster.owner(stream)
        try:
            async with run.load(seconds=0.005):
                await run.handles(150)
                run.excuse("a master was lost")
                run.history.rewound = "a master was lost"
                getattr(victim, how)()
                others = [member for member in cluster.members if member is not victim]
                await run.until(lambda: cluster.owner(stream, others) is not victim, "the replica has taken over")
                # it comes back as a replica: else no publish would be confirmed by one any more
                await anyio.to_thread.run_sync(victim.start if how == "kill" else victim.resume)
                await run.handles(400)
            verdict = await run.verdict(seconds=30)
        finally:
            await anyio.to_thread.run_sync(cluster.heal)
        assert not verdict.faults, verdict
        assert not any(worker.exit_code for worker in run.processes.workers), (
            f"a worker has ended: {run.processes.log(20_000)}"
        )
