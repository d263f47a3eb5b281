"""Workers that die, sleep, stop, come and go, under load."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import pytest

from tests.chaos.scene import Scene
from tests.servers import Server

pytestmark = pytest.mark.chaos

Report = Callable[[object], None]
Scenes = Callable[..., Scene]


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_sigkill(scene_on: Scenes, server: Server, report: Report, distribution: str) -> None:
    """A killed worker's messages run elsewhere long before its lease of 30 s is over; nothing is lost or reordered."""
    async with scene_on(server, lease=30, distribution=distribution, prefetch=4000) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.01):
            await scene.handles(200)
            await scene.burst(6000, seconds=0.004)
            victim = scene.busiest()
            victim.kill()
            killed = time.monotonic()
            scene.excuse("killed", victim)
            await scene.handles(600)
        verdict = await scene.verdict(seconds=20)
        report(f"work elsewhere after {scene.recovery(victim, killed):.2f} s; {verdict}")
        assert not verdict.faults, verdict


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_pause_longer_than_the_lease(scene_on: Scenes, server: Server, report: Report, distribution: str) -> None:
    """A worker that sleeps for two leases under load is replaced; awake again it spoils nothing."""
    async with scene_on(server, distribution=distribution) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.01):
            await scene.handles(200)
            victim = scene.busiest()
            victim.pause()
            paused = time.monotonic()
            scene.excuse("paused", victim)
            await anyio.sleep(2 * scene.job.lease)  # the pause is the fault under test
            victim.resume()
            await scene.handles(300)
        verdict = await scene.verdict()
        report(f"work elsewhere after {scene.recovery(victim, paused):.2f} s of a 2 s lease; {verdict}")
        assert not verdict.faults, verdict


async def test_pause_shorter_than_the_lease(scene_on: Scenes, server: Server, report: Report) -> None:
    """A nap costs nothing: not even a duplicate."""
    async with scene_on(server) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.01):
            await scene.handles(200)
            for _ in range(2):
                victim = scene.busiest()
                victim.pause()
                await anyio.sleep(0.35 * scene.job.lease)  # the pause is the fault under test
                victim.resume()
                await scene.handles(100)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_sigterm(scene_on: Scenes, server: Server, report: Report, distribution: str) -> None:
    """A worker that is asked to stop finishes what runs and hands back the rest: no duplicate at all."""
    async with scene_on(server, distribution=distribution) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.02):
            for _ in range(2):
                await scene.handles(150)
                leaver = scene.busiest()
                leaver.terminate()
                assert await leaver.ended() == 0, scene.crew.log()
                await scene.crew.hire()
            await scene.handles(150)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.findings, verdict
        starts = [(e.key, e.n, e.attempt) for e in scene.ledger.events() if e.what == "start"]
        assert len(starts) == len(set(starts)), "a message was started twice"


async def test_scale_up_and_down(scene_on: Scenes, server: Server, report: Report) -> None:
    """From one worker to four and back to one, under ordered load: no duplicate, no disorder, everybody works."""
    async with scene_on(server) as scene:
        await scene.crew.hire(1)
        async with scene.load(seconds=0.005):
            await scene.handles(100)
            await scene.crew.hire(3)
            await scene.until(lambda: scene.ledger.pids("commit") == scene.crew.pids, "all four have work")
            await scene.handles(100)
            for leaver in scene.crew.hands[:3]:
                leaver.terminate()
            for leaver in scene.crew.hands[:3]:
                assert await leaver.ended() == 0, scene.crew.log()
            await scene.handles(200)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.findings, verdict


async def test_crash_loop(scene_on: Scenes, server: Server, report: Report) -> None:
    """Two messages that kill their process, among sixty: they are the dead letters, and nobody else is."""
    async with scene_on(server, concurrency=8) as scene:
        await scene.crew.hire(2)
        poison = scene.random.sample(range(60), 2)
        async with scene.crew.supervised():
            for n in range(60):
                if n in poison:
                    await scene.publish_poison(f"k{n % 7}", do="exit")
                else:
                    await scene.publish(f"k{n % 7}", seconds=0.005)
            await scene.until_settled()
        dead = [hand for hand in scene.crew.hands if hand.exit_code == 1]
        scene.excuse("crashed", *dead)
        verdict = await scene.verdict()
        report(f"{len(dead)} processes died; {verdict}")
        assert not verdict.faults, verdict


async def test_blocked_event_loop(scene_on: Scenes, server: Server, report: Report) -> None:
    """A handler that blocks its event loop for two leases keeps its messages: a slow handler is not a dead one."""
    async with scene_on(server) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.005):
            await scene.handles(100)
            slow = await scene.publish("k0", do="block", seconds=2 * scene.job.lease)
            await scene.until(lambda: slow in scene.ledger.commits(), "the slow handler ends")
            await scene.handles(100)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.findings, verdict


async def test_hung_handler(scene_on: Scenes, server: Server, report: Report) -> None:
    """A handler that hangs is ended by its timeout and tried again; one that always hangs becomes a dead letter."""
    async with scene_on(server, timeout=0.5, attempts=3) as scene:
        await scene.crew.hire(2)
        async with scene.load():
            await scene.handles(100)
            await scene.publish("k1", do="hang once")
            await scene.publish_poison("k2", do="hang")
            await scene.handles(200)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.findings, verdict
        assert [reason for _, reason in scene.story.dead] == ["timeout"]
