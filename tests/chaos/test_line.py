"""The line between a worker and its server is cut, or breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import anyio
import pytest

from tests.chaos.proxy import Proxy
from tests.chaos.scene import Scene
from tests.servers import Server

pytestmark = pytest.mark.chaos

Report = Callable[[object], None]
Scenes = Callable[..., Scene]


@pytest.fixture
def tcp_server() -> Iterator[Server]:
    """A server that listens where a proxy can reach it."""
    with Server(tcp=True) as server:
        yield server


@pytest.fixture
async def line(tcp_server: Server) -> AsyncIterator[Proxy]:
    """The line of one worker."""
    async with Proxy(tcp_server.port) as proxy:
        yield proxy


async def test_black_hole(scene_on: Scenes, tcp_server: Server, line: Proxy, report: Report) -> None:
    """A worker that is cut off for three leases fences itself and is replaced; what arrives late is refused."""
    async with scene_on(tcp_server) as scene:
        await scene.crew.hire(2)
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
            await scene.handles(300)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict


async def test_short_cut(scene_on: Scenes, tcp_server: Server, line: Proxy, report: Report) -> None:
    """All workers are cut off, again and again, for less than a lease: what was on its way arrives late, or twice."""
    async with scene_on(tcp_server, url=line.url) as scene:
        await scene.crew.hire(2)
        async with scene.load(seconds=0.005):
            for _ in range(5):
                await scene.handles(80)
                line.cut()
                await anyio.sleep(0.3 * scene.job.lease)  # the outage is the fault under test
                line.mend()
            scene.excuse("cut off")
            await scene.handles(100)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict


async def test_reset_storm(scene_on: Scenes, tcp_server: Server, line: Proxy, report: Report) -> None:
    """Every connection of every worker is reset twenty times."""
    async with scene_on(tcp_server, url=line.url) as scene:
        await scene.crew.hire(2)
        async with scene.load(seconds=0.005):
            for _ in range(20):
                await scene.handles(20)
                line.reset()
            scene.excuse("connections were reset")
            await scene.handles(100)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict
