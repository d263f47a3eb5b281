"""The line between workers, publishers and their server is cut, breaks, is slow or is narrow."""

from __future__ import annotations

from dataclasses import replace

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.stage import Stage


@scenario("36", injection="the line of one of three workers is a black hole for three leases",
          bound="it fences itself; what arrives late is refused", is_cheap=True)  # fmt: skip
async def black_hole(stage: Stage) -> Verdict:
    """Half open: no end says farewell."""
    server = await stage.server(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=2)
    (far,) = await scene.crew.hire(1, replace(scene.job, url=line.url))
    async with scene.load(seconds=0.01):
        await scene.until(lambda: far.pid in scene.ledger.pids("commit"), "the far worker has work")
        await scene.handles(200)
        line.cut()
        scene.excuse("cut off", far)
        await anyio.sleep(3 * scene.job.lease)  # the outage is the fault under test
        begun = scene.starts_of(far)
        await scene.handles(100)
        assert scene.starts_of(far) == begun, "it has not fenced itself"
        line.mend()
        await scene.heals()
        await scene.handles(300)
    return await scene.verdict()


@scenario("36", injection="all workers are cut off for a third of a lease, five times", is_cheap=True)
async def short_cut(stage: Stage) -> Verdict:
    """What was on its way arrives late, or twice."""
    server = await stage.server(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=2, url=line.url)
    scene.excuse("cut off")
    async with scene.load(seconds=0.005):
        for _ in range(5):
            await scene.handles(80)
            line.cut()
            await anyio.sleep(0.3 * scene.job.lease)  # the outage is the fault under test
            line.mend()
            await scene.heals()
        await scene.handles(100)
    return await scene.verdict()


@scenario("34", injection="every connection of every worker is reset (RST), twenty times", is_cheap=True)
async def reset_storm(stage: Stage) -> Verdict:
    """Over and over."""
    server = await stage.server(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=2, url=line.url)
    scene.excuse("connections were reset")
    async with scene.load(seconds=0.005):
        for _ in range(20):
            await scene.handles(20)
            line.reset()
            await scene.heals()
        await scene.handles(100)
    return await scene.verdict()


@scenario("34", injection="every connection of the publisher is reset (RST) each 50 ms, forty times",
          bound="no message is stored twice", is_cheap=True)  # fmt: skip
async def publisher_under_a_reset_storm(stage: Stage) -> Verdict:
    """redis-py alone stores 9 to 33 % twice here."""
    server = await stage.server(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=2, publish_url=line.url)
    async with scene.load(seconds=0.001):
        for _ in range(40):
            line.reset()
            await anyio.sleep(0.05)  # the rhythm of the storm
        await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("37", injection="every piece takes 200 ms, give or take 100, in each direction",
          bound="no false death: no duplicate at all")  # fmt: skip
async def slow_line(stage: Stage) -> Verdict:
    """A lease of 4 s over a slow line."""
    server = await stage.server(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=0, url=line.url, lease=4)
    line.delay = lambda: 0.1 + 0.2 * scene.random.random()
    await scene.crew.hire(2)
    async with scene.load(burst=4, seconds=0.005):
        await scene.handles(200)
    verdict = await scene.verdict(seconds=120)
    assert not verdict.repeats, verdict
    return verdict


@scenario("37", injection="20 000 bytes a second in each direction of each connection", bound="no duplicate at all")
async def narrow_line(stage: Stage) -> Verdict:
    """It takes seconds to fetch what is published in one."""
    server = await stage.server(tcp=True)
    line = await stage.line(server)
    scene = await stage.on(server, workers=2, url=line.url, lease=4)
    async with scene.load(burst=4, seconds=0.005):
        await scene.handles(100)
        line.bytes_per_second = 20_000
        await scene.handles(200)
        line.bytes_per_second = 0
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict
