"""The server dies, sleeps, forgets and hangs up, under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from tests.chaos.scene import Scene
from tests.servers import Server

pytestmark = pytest.mark.chaos

Report = Callable[[object], None]
Scenes = Callable[..., Scene]


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that only this scene uses, which keeps what it is told."""
    with Server(aof=True) as server:
        yield server


def ask(server: Server, *command: Any) -> Any:
    """A command behind rsmq's back."""
    with server.client() as client:
        return client.execute_command(*command)


async def test_sigkill_and_restart(scene_on: Scenes, own_server: Server, report: Report) -> None:
    """The server is killed and comes back with its append-only file: all that was confirmed is handled."""
    async with scene_on(own_server) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.005):
            for _ in range(2):
                await scene.handles(200)
                own_server.kill()
                await anyio.sleep(0.5)  # the outage is the fault under test
                await anyio.to_thread.run_sync(own_server.start)
            scene.excuse("the server was restarted")
            await scene.handles(300)
        verdict = await scene.verdict()
        report(f"{len(scene.story.unknown)} of unknown outcome; {verdict}")
        assert not verdict.faults, verdict


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_connections_are_killed(scene_on: Scenes, own_server: Server, report: Report, kind: str) -> None:
    """All connections of a kind are closed ten times, under load."""
    async with scene_on(own_server) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.005):
            for _ in range(10):
                await scene.handles(40)
                ask(own_server, "CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            scene.excuse("connections were killed")
            await scene.handles(100)
        verdict = await scene.verdict()
        report(f"{len(scene.story.unknown)} of unknown outcome; {verdict}")
        assert not verdict.faults, verdict


@pytest.mark.parametrize("how", ["SIGSTOP", "DEBUG SLEEP"])
async def test_server_stands_still(scene_on: Scenes, own_server: Server, report: Report, how: str) -> None:
    """The server answers nobody for two leases: everybody fences itself, nobody takes what is not free, all goes on."""
    async with scene_on(own_server) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.005):
            await scene.handles(200)
            scene.excuse("the server stood still")
            if how == "SIGSTOP":
                own_server.pause()
                await anyio.sleep(2 * scene.job.lease)  # the pause is the fault under test
                own_server.resume()
            else:
                await anyio.to_thread.run_sync(ask, own_server, "DEBUG", "SLEEP", 2 * scene.job.lease)
            await scene.handles(300)
        verdict = await scene.verdict()
        report(f"{len(scene.story.unknown)} of unknown outcome; {verdict}")
        assert not verdict.faults, verdict


async def test_stop_without_the_server(scene_on: Scenes, own_server: Server, report: Report) -> None:
    """Workers that are asked to stop while the server is away end in order; the next ones go on."""
    async with scene_on(own_server) as scene:
        leavers = await scene.crew.hire(2)
        await scene.burst(400, seconds=0.02)
        await scene.handles(50)
        own_server.kill()
        scene.excuse("the server was away")
        for leaver in leavers:
            leaver.terminate()
        assert [await leaver.ended() for leaver in leavers] == [0, 0], scene.crew.log()
        await anyio.to_thread.run_sync(own_server.start)
        await scene.crew.hire(2)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_flushall(scene_on: Scenes, own_server: Server, report: Report, distribution: str) -> None:
    """Everything in the server is deleted under load: what is published afterwards flows, without anybody's help."""
    async with scene_on(own_server, distribution=distribution) as scene:
        await scene.crew.hire(3)
        async with scene.load(seconds=0.005):
            await scene.handles(200)
            ask(own_server, "FLUSHALL")
            await scene.handles(100)
        await scene.until_settled()
        scene.story.unknown |= scene.story.stored  # of what came before nobody can promise anything
        scene.story.stored = set()
        await scene.burst(200)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict
        assert all(hand.exit_code is None for hand in scene.crew.hands), "a worker gave up"


async def test_group_is_destroyed(scene_on: Scenes, own_server: Server, report: Report) -> None:
    """Somebody destroys the group in every partition: it is made again from the start; repeats, but no loss."""
    async with scene_on(own_server) as scene:
        await scene.crew.hire(2)
        async with scene.load(seconds=0.005):
            await scene.handles(200)
            scene.excuse("the group was destroyed")
            for partition in range(8):
                ask(own_server, "XGROUP", "DESTROY", scene.broker.keys.stream("work", partition), "crew")
            await scene.handles(100)
        verdict = await scene.verdict()
        report(verdict)
        assert not verdict.faults, verdict
        assert all(hand.exit_code is None for hand in scene.crew.hands), "a worker gave up"
