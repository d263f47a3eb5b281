"""A server that runs but refuses commands: busy, full, read-only, without scripts, with another password."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import anyio
import redis

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.processes import ChaosProcess
from tests.chaos.scenarios.server import all_alive
from tests.chaos.testbed import CALM, Testbed, ask
from tests.servers import Server


@scenario("40", injection="another client's script runs for two leases: every command gets BUSY", is_cheap=True)
async def server_is_busy(testbed: Testbed) -> Verdict:
    """SCRIPT KILL ends the script."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server was busy")
    async with run.load(seconds=0.005):
        await run.handles(200)
        ask(server, "CONFIG", "SET", "busy-reply-threshold", 100)
        script = threading.Thread(target=_run_for_ever, args=(server,))
        script.start()
        await anyio.sleep(2 * run.job.lease)  # the script is the fault under test
        ask(server, "SCRIPT", "KILL")
        await anyio.to_thread.run_sync(script.join)
        await run.recovers()
        await run.handles(200)
    all_alive(run)
    return await run.verdict()


def _run_for_ever(server: Server) -> None:
    with suppress(redis.ResponseError):
        ask(server, "EVAL", "while true do end", 0)


@contextmanager
def configured(server: Server, name: str, value: object, back: object) -> Iterator[None]:
    """Set a server option during the block."""
    ask(server, "CONFIG", "SET", name, value)
    try:
        yield
    finally:
        ask(server, "CONFIG", "SET", name, back)


@scenario("41", injection="maxmemory 1 with noeviction for two leases",
          bound="messages in flight are settled, members stay, publishers get errors", is_cheap=True)  # fmt: skip
async def out_of_memory(testbed: Testbed) -> Verdict:
    """Writes that need memory fail; all others work."""
    server = await testbed.server()
    run = await testbed.start(server, lease=CALM)
    async with run.load(seconds=0.005):
        await run.handles(200)
        with configured(server, "maxmemory", 1, 0):
            await anyio.sleep(2 * run.job.lease)  # the shortage is the fault under test
            members = ask(server, "SCARD", run.broker.keys.members("work", "workers"))
            assert members == 3, f"{members} members are left"
        await run.recovers()
        await run.handles(200)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("42", injection="the eviction policy becomes allkeys-lru under load; nothing is evicted", servers=ONE,
          bound="each worker logs it as critical and goes on; new workers refuse to start")  # fmt: skip
async def wrong_eviction_policy(testbed: Testbed) -> Verdict:
    """A worker does not start on a server that may evict messages."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    async with run.load(seconds=0.005):
        await run.handles(100)
        with configured(server, "maxmemory-policy", "allkeys-lru", "noeviction"):
            newcomer = ChaosProcess(replace(run.job, more={"preflight": "refuse"}), run.processes.path)
            assert await newcomer.ended() != 0, "it started"
            assert "noeviction" in run.processes.log(), "its log does not name the reason"
            await run.handles(200)
            message = "maxmemory-policy has become allkeys-lru"
            await run.until(lambda: run.processes.log(10**8).count(message) == 2, "each worker logs it, one time", 20)
    verdict = await run.verdict()
    assert not verdict.findings, verdict
    return verdict


@scenario("A5", injection="the server becomes a read-only replica without a master for two leases, then a master again")
async def server_is_demoted(testbed: Testbed) -> Verdict:
    """The server answers READONLY to every write."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server was read-only")
    async with run.load(seconds=0.005):
        await run.handles(200)
        ask(server, "REPLICAOF", "127.0.0.1", 1)
        await anyio.sleep(2 * run.job.lease)  # the demotion is the fault under test
        ask(server, "REPLICAOF", "NO", "ONE")
        await run.recovers()
        await run.handles(200)
    all_alive(run)
    return await run.verdict()


@scenario("A25", injection="the server becomes a replica without a master that serves no stale data, for two leases")
async def replica_without_a_master(testbed: Testbed) -> Verdict:
    """The server answers MASTERDOWN to everything, also to reads."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server had no master")
    async with run.load(seconds=0.005):
        await run.handles(200)
        ask(server, "CONFIG", "SET", "replica-serve-stale-data", "no")
        ask(server, "REPLICAOF", "127.0.0.1", 1)
        await anyio.sleep(2 * run.job.lease)  # the lost master is the fault under test
        ask(server, "REPLICAOF", "NO", "ONE")
        await run.recovers()
        await run.handles(200)
    all_alive(run)
    return await run.verdict()


@scenario("A26", injection="the server requires a replica (min-replicas-to-write 1) for two leases",
          bound="publishers get errors")  # fmt: skip
async def too_few_replicas(testbed: Testbed) -> Verdict:
    """The server answers NOREPLICAS to every write, also to lease renewals."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server refused to write")
    async with run.load(seconds=0.005):
        await run.handles(200)
        with configured(server, "min-replicas-to-write", 1, 0):
            await anyio.sleep(2 * run.job.lease)  # the refusal is the fault under test
        await run.recovers()
        await run.handles(200)
    all_alive(run)
    return await run.verdict()


@scenario("A6", injection="SCRIPT FLUSH, twenty times under load", bound="no duplicate", is_cheap=True)
async def scripts_are_forgotten(testbed: Testbed) -> Verdict:
    """The client answers NOSCRIPT by sending the script."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2, lease=CALM)
    async with run.load(seconds=0.005):
        for _ in range(20):
            await run.handles(20)
            ask(server, "SCRIPT", "FLUSH")
        await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("A7", injection="maxclients is reached: killed connections cannot reconnect for two leases")
async def no_room_for_clients(testbed: Testbed) -> Verdict:
    """The server refuses new connections."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("it had no connection")
    with server.client() as operator:
        operator.ping()
        async with run.load(seconds=0.005):
            await run.handles(200)
            operator.config_set("maxclients", 1)
            operator.client_kill_filter(_type="normal", skipme=True)
            operator.client_kill_filter(_type="pubsub", skipme=True)
            await anyio.sleep(2 * run.job.lease)  # the shortage is the fault under test
            operator.config_set("maxclients", 1000)
            await run.recovers()
            await run.handles(200)
    all_alive(run)
    return await run.verdict()


@scenario(
    "A8", injection="a password is set on the running server and connections are killed; it is removed after two leases"
)
async def credentials_are_refused(testbed: Testbed) -> Verdict:
    """A failed password rotation that is rolled back."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("its password was refused")
    with server.client() as operator:
        operator.ping()
        async with run.load(seconds=0.005):
            await run.handles(200)
            operator.config_set("requirepass", "secret")
            operator.client_kill_filter(_type="normal", skipme=True)
            operator.client_kill_filter(_type="pubsub", skipme=True)
            await anyio.sleep(2 * run.job.lease)  # the refusal is the fault under test
            operator.config_set("requirepass", "")
            await run.recovers()
            await run.handles(200)
    all_alive(run)
    return await run.verdict()


@scenario("A10", injection="the server closes connections that are idle for a second (timeout 1)", bound="no duplicate")
async def idle_connections_are_closed(testbed: Testbed) -> Verdict:
    """The server, or a proxy, closes idle connections."""
    server = await testbed.server("--timeout", "1")
    run = await testbed.start(server, workers=2)
    run.excuse("its connections were closed")
    for _ in range(3):
        async with run.load(seconds=0.005):
            await run.handles(100)
        await anyio.sleep(2.5)  # long enough to be idle
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict
