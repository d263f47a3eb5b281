"""Bands that are added to a topic while its workers die."""

from __future__ import annotations

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.testbed import Testbed, paused
from tests.chaos.worker import TOPIC

BANDS = ("urgent", "normal", "bulk")


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
    await run.until(lambda: are_open(run), "the bands are open")
    run.use_bands(BANDS)
    async with run.load(seconds=0.01):
        await run.handles(100)
        victim = run.busiest()
        victim.kill()
        run.excuse("killed", victim)
        await run.processes.start_workers(1)
        await run.handles(100)
    return await run.verdict()


async def are_open(run: ScenarioRun) -> bool:
    """Whether publishers use all of them."""
    topic = await run.broker.topics.existing(TOPIC)
    return topic.layout.has_bands and all(block.state == "open" for block in topic.layout.blocks)
