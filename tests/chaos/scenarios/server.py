"""The server dies, sleeps, loads, forgets, fills up and hangs up, under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import anyio
import redis

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.crew import Hand
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage, ask
from tests.servers import Server


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


@scenario("40", injection="somebody's script runs for two leases: everybody is told BUSY", is_cheap=True)
async def server_is_busy(stage: Stage) -> Verdict:
    """Killed by SCRIPT KILL in the end."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server was busy")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        ask(server, "CONFIG", "SET", "busy-reply-threshold", 100)
        script = threading.Thread(target=_run_for_ever, args=(server,))
        script.start()
        await anyio.sleep(2 * scene.job.lease)  # the script is the fault under test
        ask(server, "SCRIPT", "KILL")
        await anyio.to_thread.run_sync(script.join)
        await scene.heals()
        await scene.handles(200)
    all_alive(scene)
    return await scene.verdict()


def _run_for_ever(server: Server) -> None:
    with suppress(redis.ResponseError):
        ask(server, "EVAL", "while true do end", 0)


@contextmanager
def configured(server: Server, name: str, value: object, back: object) -> Iterator[None]:
    """A setting of the server during the block."""
    ask(server, "CONFIG", "SET", name, value)
    try:
        yield
    finally:
        ask(server, "CONFIG", "SET", name, back)


@scenario("41", injection="maxmemory 1 with noeviction for two leases",
          bound="what is in hand is settled, members stay, publishers are told", is_cheap=True)  # fmt: skip
async def out_of_memory(stage: Stage) -> Verdict:
    """Nothing can be added; what needs no memory works."""
    server = await stage.server()
    scene = await stage.on(server)
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        with configured(server, "maxmemory", 1, 0):
            await anyio.sleep(2 * scene.job.lease)  # the shortage is the fault under test
            members = ask(server, "SCARD", scene.broker.keys.members("work", "crew"))
            assert members == 3, f"{members} members are left"
        await scene.heals()
        await scene.handles(200)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("42", injection="the eviction policy becomes allkeys-lru under load, without need to evict", servers=ONE,
          bound="nothing changes; new workers are refused at their start")  # fmt: skip
async def wrong_eviction_policy(stage: Stage) -> Verdict:
    """A server that may delete messages is not served."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    async with scene.load(seconds=0.005):
        await scene.handles(100)
        with configured(server, "maxmemory-policy", "allkeys-lru", "noeviction"):
            newcomer = Hand(replace(scene.job, more={"preflight": "refuse"}), scene.crew.path)
            assert await newcomer.ended() != 0, "it serves"
            newcomer.close()
            assert "noeviction" in scene.crew.log(), "it does not say why"
            await scene.handles(200)
    verdict = await scene.verdict()
    assert not verdict.findings, verdict
    return verdict


@scenario("A5", injection="the server becomes a read-only replica of nobody for two leases, and a master again")
async def server_is_demoted(stage: Stage) -> Verdict:
    """READONLY to every write."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server was read-only")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        ask(server, "REPLICAOF", "127.0.0.1", 1)
        await anyio.sleep(2 * scene.job.lease)  # the demotion is the fault under test
        ask(server, "REPLICAOF", "NO", "ONE")
        await scene.heals()
        await scene.handles(200)
    all_alive(scene)
    return await scene.verdict()


@scenario("A6", injection="SCRIPT FLUSH, twenty times under load", bound="no duplicate", is_cheap=True)
async def scripts_are_forgotten(stage: Stage) -> Verdict:
    """NOSCRIPT is answered with the script."""
    server = await stage.server()
    scene = await stage.on(server, workers=2)
    async with scene.load(seconds=0.005):
        for _ in range(20):
            await scene.handles(20)
            ask(server, "SCRIPT", "FLUSH")
        await scene.handles(100)
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("A7", injection="maxclients is reached: killed connections cannot come back for two leases")
async def no_room_for_clients(stage: Stage) -> Verdict:
    """The server refuses new connections."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("it had no connection")
    with server.client() as operator:
        operator.ping()
        async with scene.load(seconds=0.005):
            await scene.handles(200)
            operator.config_set("maxclients", 1)
            operator.client_kill_filter(_type="normal", skipme=True)
            operator.client_kill_filter(_type="pubsub", skipme=True)
            await anyio.sleep(2 * scene.job.lease)  # the shortage is the fault under test
            operator.config_set("maxclients", 1000)
            await scene.heals()
            await scene.handles(200)
    all_alive(scene)
    return await scene.verdict()


@scenario(
    "A8", injection="a password is set on the live server, connections are killed, after two leases it is removed"
)
async def credentials_are_refused(stage: Stage) -> Verdict:
    """A rotation that went wrong, and was taken back."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("it was not let in")
    with server.client() as operator:
        operator.ping()
        async with scene.load(seconds=0.005):
            await scene.handles(200)
            operator.config_set("requirepass", "secret")
            operator.client_kill_filter(_type="normal", skipme=True)
            operator.client_kill_filter(_type="pubsub", skipme=True)
            await anyio.sleep(2 * scene.job.lease)  # the refusal is the fault under test
            operator.config_set("requirepass", "")
            await scene.heals()
            await scene.handles(200)
    all_alive(scene)
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


@scenario("A10", injection="the server closes connections that are idle for a second (timeout 1)", bound="no duplicate")
async def idle_connections_are_closed(stage: Stage) -> Verdict:
    """An impatient server, or a proxy in between."""
    server = await stage.server("--timeout", "1")
    scene = await stage.on(server, workers=2)
    scene.excuse("its connections were closed")
    for _ in range(3):
        async with scene.load(seconds=0.005):
            await scene.handles(100)
        await anyio.sleep(2.5)  # long enough to be idle
    verdict = await scene.verdict()
    assert not verdict.repeats, verdict
    return verdict
