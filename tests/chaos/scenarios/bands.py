"""Bands that are added to a topic while its workers die."""

from __future__ import annotations

import time
from typing import Final

import anyio

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.release import NEW, release_before
from tests.chaos.scenario_run import PATIENCE, ScenarioRun
from tests.chaos.scenarios.upgrade import LEASE, UpgradeRun, of_both
from tests.chaos.testbed import Testbed, paused
from tests.chaos.worker import TOPIC

BANDS = ("urgent", "normal", "bulk")
NEWEST: Final = "rsmq/consumer/waiting/ready_bands.py"
"""The file that came with bands."""


@scenario("A39", injection="bands are added under load to the topic of three workers; meanwhile the busiest of them is "
          "killed (SIGKILL) and another one sleeps for two leases; then messages of all bands, and a kill again",
          bound="the bands open, and each message is handled, in order per key and band",
          servers=ONE, is_cheap=True)  # fmt: skip
async def bands_while_workers_die(testbed: Testbed) -> Verdict:
    """A group is complete in a band before anything is stored there, also if a process dies meanwhile."""
    run = await testbed.start(await testbed.shared_server(), lease=2)
    async with run.load(seconds=0.01):
        await run.handles(100)
        victim, sleeper = run.busiest(), None
        await run.broker.topics.set_bands(TOPIC, BANDS)
        victim.kill()
        run.excuse("killed", victim)
        await run.processes.start_workers(1)
        sleeper = run.busiest()
        run.excuse("paused", sleeper)
        await paused(sleeper, 4)
        await run.handles(100)
    await until_open(run)
    run.use_bands(BANDS)
    async with run.load(seconds=0.01):
        await run.handles(100)
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        await run.processes.start_workers(1)
        await run.handles(100)
    return await run.verdict()


@scenario("52", injection="workers and publishers of the commit before bands and of this one; bands are added, open "
          "when the last old worker has gone; an old and a new one are killed (SIGKILL); another old one comes later",
          bound="the late one is refused; nothing lost, in order per key and band")  # fmt: skip
async def rolling_upgrade_to_bands(testbed: Testbed) -> Verdict:
    """An old worker keeps the bands closed, or is refused; an old publisher stores in `normal`."""
    old = await anyio.to_thread.run_sync(release_before, NEWEST)
    run = await testbed.begin(UpgradeRun, (await testbed.shared_server()).url, workers=0, lease=LEASE)
    run.set_out("hash", old)
    first, second = [await run.serve(old) for _ in range(2)]
    await run.publish_with(old)
    await run.handles(100)
    await run.broker.topics.set_bands(TOPIC, BANDS)
    await run.publish_with(NEW)
    await run.serve(NEW)
    await run.handles(100)
    assert len(await run.broker.topics.open_bands(TOPIC)) >= 2
    first.kill()
    run.excuse("killed", first)
    await run.serve(NEW)
    await run.handles(100)
    assert (await run.broker.topics.existing(TOPIC)).layout.waits
    second.terminate()
    assert await second.ended() == 0, run.processes.log()
    await until_open(run)
    late = run.processes.start_worker(run.order_for("worker"), old.environment)
    assert await late.ended() != 0
    assert "bands: upgrade this worker" in run.processes.log(10**8)
    run.use_bands(BANDS)
    async with run.load(seconds=0.01):
        await run.handles(100)
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        await run.serve(NEW)
        await run.handles(100)
    of_both(run)
    return await run.verdict()


async def until_open(run: ScenarioRun) -> None:
    """Wait until publishers use all bands."""
    deadline = time.monotonic() + PATIENCE
    while (topic := await run.broker.topics.existing(TOPIC)).layout.waits or not topic.layout.has_bands:
        assert time.monotonic() < deadline, f"the bands are not open: {topic.layout}\n{run.processes.log()}"
        await anyio.sleep(0.05)
