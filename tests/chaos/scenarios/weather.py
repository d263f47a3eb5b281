"""Power is lost, the disk is full, clocks step: what no signal can do (see `fault.c`)."""

from __future__ import annotations

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.publisher import Errand
from tests.chaos.stage import Stage
from tests.chaos.weather import Weather

EVERYSEC = 2.0
"""Seconds of confirmed messages that a power loss may cost with appendfsync everysec."""


@scenario("25", injection="power loss under load, twice: bytes that were not fsynced are gone; appendfsync everysec",
          bound="at most the last 2 s of confirmed messages are lost, and said so", is_cheap=True)  # fmt: skip
async def power_loss_everysec(stage: Stage) -> Verdict:
    """The promise is the server's: up to two seconds."""
    server = await stage.weathered()
    scene, lost = await stage.on(server, workers=2), 0
    scene.excuse("the power went")
    scene.story.rewound = "the power went"
    await scene.crew.send(Errand(scene.job, many=20, seed=stage.seed))
    for _ in range(2):
        await scene.handles(300)
        await anyio.sleep(1.2)  # so that something is old enough to be safe
        down, late = scene.now(), server.weather.synced
        lost += server.lose_power()
        await anyio.to_thread.run_sync(server.start)
        # a machine that is too busy to sync each second is no fault of the server: then they count from its last one
        scene.forgive(down - EVERYSEC - (late if late > EVERYSEC / 2 else 0), down)
        await scene.heals()
    await scene.handles(200)
    assert lost > 0, "everything was on the disk: nothing was tested"
    return await scene.verdict()


@scenario("26", injection="power loss under load, three times; appendfsync always", bound="nothing confirmed is lost",
          is_cheap=True)  # fmt: skip
async def power_loss_always(stage: Stage) -> Verdict:
    """What was confirmed is on the disk."""
    server = await stage.weathered("--appendfsync", "always")
    scene = await stage.on(server, workers=2)
    scene.excuse("the power went")
    await scene.crew.send(Errand(scene.job, many=20, seed=stage.seed))
    for _ in range(3):
        await scene.handles(200)
        server.lose_power()
        await anyio.to_thread.run_sync(server.start)
        await scene.heals()
    await scene.handles(200)
    return await scene.verdict()


@scenario("43", injection="the disk is full for two leases (ENOSPC for every write); appendfsync everysec",
          bound="publishers are told, workers wait, all goes on", is_cheap=True)  # fmt: skip
async def disk_full(stage: Stage) -> Verdict:
    """MISCONF to every write, once the server has noticed."""
    server = await stage.weathered()
    scene = await stage.on(server)
    scene.excuse("the disk was full")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        with server.weather.full_disk():
            await anyio.sleep(2 * scene.job.lease)  # the shortage is the fault under test
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


@scenario("43", injection="the disk is full; with appendfsync always the server ends itself, and is restarted",
          bound="nothing confirmed is lost")  # fmt: skip
async def disk_full_always(stage: Stage) -> Verdict:
    """It cannot keep what it has said, so it stops to say anything."""
    server = await stage.weathered("--appendfsync", "always")
    scene = await stage.on(server)
    scene.excuse("the server was restarted")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        with server.weather.full_disk():
            await scene.until(lambda: not server.is_running, "the server gives up")
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        await scene.heals()
        await scene.handles(200)
    return await scene.verdict()


@scenario("45", injection="the server's clock steps: an hour ahead, three hours back, and right again",
          bound="delayed messages neither come all at once nor never; nothing lost")  # fmt: skip
async def server_clock_steps(stage: Stage) -> Verdict:
    """Ahead everybody's heartbeat is over at once; back all leases last for hours."""
    server = await stage.weathered()
    scene = await stage.on(server)
    scene.excuse("the clock stepped")
    async with scene.load(seconds=0.005):
        for off in (3600, -7200, 0):
            await scene.handles(200)
            server.weather.step_clock(off)
            await scene.heals()
        await scene.handles(300)
    return await scene.verdict()


@scenario("46, A11", injection="the clock of one worker is an hour ahead, then two behind", bound="no duplicate at all",
          is_cheap=True)  # fmt: skip
async def worker_clock_steps(stage: Stage) -> Verdict:
    """Only the server's clock counts, and locally the monotonic one."""
    scene = await stage.on(await stage.common(), workers=2)
    weather = Weather(scene.ledger.path.parent)
    weather.step_clock(3600)
    await scene.crew.hire(1, environment=weather.environment)
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        weather.step_clock(-7200)
        await scene.handles(200)
        weather.step_clock(0)
        await scene.handles(100)
    verdict = await scene.verdict()
    weather.close()
    assert not verdict.findings, verdict
    return verdict
