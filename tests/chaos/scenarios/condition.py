"""Conditions of a server that lives: busy, full, read-only, impatient, without its scripts, with another password."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import anyio
import redis

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.crew import Hand
from tests.chaos.scenarios.server import all_alive
from tests.chaos.stage import Stage, ask
from tests.servers import Server


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
          bound="nothing changes; each worker says it in a critical line; new ones are refused")  # fmt: skip
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
            told = "maxmemory-policy has become allkeys-lru"
            await scene.until(lambda: scene.crew.log(10**8).count(told) == 2, "each worker says so, once", 20)
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


@scenario("A25", injection="the server becomes a replica without its master, and serves nothing stale, for two leases")
async def replica_without_a_master(stage: Stage) -> Verdict:
    """MASTERDOWN to everything, reads too."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server had no master")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        ask(server, "CONFIG", "SET", "replica-serve-stale-data", "no")
        ask(server, "REPLICAOF", "127.0.0.1", 1)
        await anyio.sleep(2 * scene.job.lease)  # the lost master is the fault under test
        ask(server, "REPLICAOF", "NO", "ONE")
        await scene.heals()
        await scene.handles(200)
    all_alive(scene)
    return await scene.verdict()


@scenario("A26", injection="the server wants a replica that there is not (min-replicas-to-write 1), for two leases",
          bound="publishers are told")  # fmt: skip
async def too_few_replicas(stage: Stage) -> Verdict:
    """NOREPLICAS to every write, the renewal of leases included."""
    server = await stage.server()
    scene = await stage.on(server)
    scene.excuse("the server refused to write")
    async with scene.load(seconds=0.005):
        await scene.handles(200)
        with configured(server, "min-replicas-to-write", 1, 0):
            await anyio.sleep(2 * scene.job.lease)  # the refusal is the fault under test
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
