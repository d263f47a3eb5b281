"""The server dies, sleeps, loads long, forgets everything and hangs up, under load."""

from __future__ import annotations

import time

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage, ask


def all_alive(scene: Scene) -> None:
    """Nobody has given up."""
    assert all(hand.exit_code is None for hand in scene.crew.hands), f"a worker gave up: {scene.crew.log(20_000)}"


@scenario("24", injection="SIGKILL and restart of the server, twice", bound="nothing confirmed is lost", is_cheap=True)
async def server_is_killed(stage: Stage) -> Verdict:
    """It comes back with its append-only file."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server was restarted")
    async with scene.load(seconds=0.005):
        for _ in range(2):
            await scene.handles(200)
            server.kill()
            await anyio.sleep(0.5)  # the outage is the fault under test
            await anyio.to_thread.run_sync(server.start)
            await scene.heals()
        await scene.handles(300)
    return await scene.verdict()


@scenario("27", injection="SIGKILL and restart of a server that keeps nothing",
          bound="what is published afterwards flows without anybody's help", is_cheap=True)  # fmt: skip
async def server_forgets_all(stage: Stage) -> Verdict:
    """No append-only file: everything is gone, and nobody hangs."""
    server = await stage.server(aof=False)
    scene = await stage.on(server, workers=2)
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        await scene.heals()
        await scene.handles(100)
    return await after_all_is_lost(scene)


async def after_all_is_lost(scene: Scene) -> Verdict:
    """Of what came before nobody can promise anything; what comes now must be handled."""
    await scene.until_settled()
    scene.story.rewound = "the server has lost everything"
    scene.excuse("the server has lost everything")
    scene.story.unknown |= scene.story.stored
    scene.story.stored = set()
    await scene.burst(200)
    verdict = await scene.verdict()
    all_gave = [hand for hand in scene.crew.hands if hand.exit_code]
    assert not all_gave, f"a worker gave up: {scene.crew.log(20_000)}"
    return verdict


@scenario(
    "29", injection="SIGKILL; the restarted server says LOADING for some seconds", bound="no crash, few log lines"
)
async def server_loads_long(stage: Stage) -> Verdict:
    """It accepts connections, and answers everything with LOADING."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server was restarted")
    async with scene.load(seconds=0.005):
        await scene.handles(400)
        server.kill()
        size = max(1, len(scene.ledger.commits()))
        server._args = ("--key-load-delay", str(int(1.5e6 / size)))
        lines = scene.crew.log(10**9).count("\n")
        began = time.monotonic()
        await anyio.to_thread.run_sync(server.start)
        took = time.monotonic() - began
        lines = scene.crew.log(10**9).count("\n") - lines
        assert took > 1, f"it was loaded in {took:.1f} s: too fast to show anything"
        assert lines < 100 * took + 200, f"{lines} log lines in {took:.1f} s"
        await scene.heals()
        await scene.handles(300)
    return await scene.verdict()


@scenario("30", injection="FLUSHALL under load", bound="what is published afterwards flows",
          variants=({"distribution": "hash"}, {"distribution": "shared"}), is_cheap=True)  # fmt: skip
async def flushall(stage: Stage, distribution: str) -> Verdict:
    """Everything is deleted: topic, groups, leases, members."""
    server = await stage.server()
    scene = await stage.on(server, distribution=distribution)
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        ask(server, "FLUSHALL")
        await scene.heals()
        await scene.handles(100)
    return await after_all_is_lost(scene)


@scenario("33", injection="CLIENT KILL of all connections of a kind, ten times",
          variants=({"kind": "normal"}, {"kind": "pubsub"}), is_cheap=True)  # fmt: skip
async def connections_are_killed(stage: Stage, kind: str) -> Verdict:
    """Again and again."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("connections were killed")
    async with scene.load(seconds=0.005):
        for _ in range(10):
            await scene.handles(40)
            ask(server, "CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            await scene.heals()
        await scene.handles(100)
    return await scene.verdict()


@scenario("39", injection="the server answers nobody for two leases", bound="nothing published twice, nobody gives up",
          variants=({"how": "SIGSTOP"}, {"how": "DEBUG SLEEP"}, {"how": "CLIENT PAUSE"}), is_cheap=True)  # fmt: skip
async def server_stands_still(stage: Stage, how: str) -> Verdict:
    """Everybody fences itself, nobody takes what is not free, all goes on."""
    server = await stage.server()
    scene = await stage.on(server)
    seconds = 2 * scene.job.lease
    scene.excuse("the server stood still")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        if how == "SIGSTOP":
            server.pause()
            await anyio.sleep(seconds)  # the pause is the fault under test
            server.resume()
        elif how == "DEBUG SLEEP":
            await anyio.to_thread.run_sync(ask, server, "DEBUG", "SLEEP", seconds)
        else:
            ask(server, "CLIENT", "PAUSE", int(seconds * 1000), "ALL")
            await anyio.sleep(seconds)  # the pause is the fault under test
        await scene.heals()
        await scene.handles(300)
    all_alive(scene)
    return await scene.verdict()


@scenario(
    "39", injection="workers are asked to stop while the server is away", bound="they end in order", is_cheap=True
)
async def stop_without_the_server(stage: Stage) -> Verdict:
    """The next ones go on."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    leavers = list(scene.crew.hands)
    await scene.burst(400, seconds=0.02)
    await scene.handles(50)
    server.kill()
    scene.excuse("the server was away")
    for leaver in leavers:
        leaver.terminate()
    assert [await leaver.ended() for leaver in leavers] == [0, 0], scene.crew.log()
    await anyio.to_thread.run_sync(server.start)
    await scene.crew.hire(2)
    return await scene.verdict()


@scenario("A9", injection="SIGKILL in the middle of an AOF rewrite, three times", bound="nothing confirmed is lost")
async def killed_while_it_rewrites(stage: Stage) -> Verdict:
    """BGREWRITEAOF, and death a moment later."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server was restarted")
    async with scene.load(seconds=0.005):
        for _ in range(3):
            await scene.handles(200)
            ask(server, "BGREWRITEAOF")
            await anyio.sleep(scene.random.random() * 0.1)  # somewhere in the rewrite
            server.kill()
            await anyio.to_thread.run_sync(server.start)
            await scene.heals()
        await scene.handles(200)
    return await scene.verdict()
