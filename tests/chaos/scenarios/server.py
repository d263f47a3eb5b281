"""The server is killed, paused, slow to load, emptied or closes connections, under load."""

from __future__ import annotations

import time

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.testbed import Testbed, ask


def all_alive(run: ScenarioRun) -> None:
    """Assert that no worker has ended."""
    assert all(worker.exit_code is None for worker in run.processes.workers), (
        f"a worker has ended: {run.processes.log(20_000)}"
    )


@scenario("24", injection="SIGKILL and restart of the server, twice", bound="nothing confirmed is lost", is_cheap=True)
async def server_is_killed(testbed: Testbed) -> Verdict:
    """The server restarts with its append-only file."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server was restarted")
    async with run.load(seconds=0.005):
        for _ in range(2):
            await run.handles(200)
            server.kill()
            await anyio.sleep(0.5)  # the outage is the fault under test
            await anyio.to_thread.run_sync(server.start)
            await run.recovers()
        await run.handles(300)
    return await run.verdict()


@scenario("27", injection="SIGKILL and restart of a server without persistence",
          bound="messages published afterwards are handled without intervention", is_cheap=True)  # fmt: skip
async def server_forgets_all(testbed: Testbed) -> Verdict:
    """Without an append-only file all data is lost, and no worker hangs."""
    server = await testbed.server(aof=False)
    run = await testbed.start(server, workers=2)
    async with run.load(seconds=0.005):
        await run.handles(200)
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        await run.recovers()
        await run.handles(100)
    return await after_all_is_lost(run)


async def after_all_is_lost(run: ScenarioRun) -> Verdict:
    """Earlier messages may be lost; messages published from now on must be handled."""
    await run.until_settled()
    run.history.rewound = "the server has lost everything"
    run.excuse("the server has lost everything")
    run.history.unknown |= run.history.stored
    run.history.stored = set()
    await run.burst(200)
    verdict = await run.verdict()
    ended = [worker for worker in run.processes.workers if worker.exit_code]
    assert not ended, f"a worker has ended: {run.processes.log(20_000)}"
    return verdict


@scenario(
    "29", injection="SIGKILL; the restarted server answers LOADING for some seconds", bound="no crash, few log lines"
)
async def server_loads_long(testbed: Testbed) -> Verdict:
    """The server accepts connections and answers LOADING to every command."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server was restarted")
    async with run.load(seconds=0.005):
        await run.handles(400)
        server.kill()
        size = max(1, len(run.ledger.commits()))
        server._args = ("--key-load-delay", str(int(1.5e6 / size)))
        lines = run.processes.log(10**9).count("\n")
        began = time.monotonic()
        await anyio.to_thread.run_sync(server.start)
        took = time.monotonic() - began
        lines = run.processes.log(10**9).count("\n") - lines
        assert took > 1, f"it was loaded in {took:.1f} s: too fast to test anything"
        assert lines < 100 * took + 200, f"{lines} log lines in {took:.1f} s"
        await run.recovers()
        await run.handles(300)
    return await run.verdict()


@scenario("30", injection="FLUSHALL under load", bound="messages published afterwards are handled",
          variants=({"distribution": "hash"}, {"distribution": "shared"}), is_cheap=True)  # fmt: skip
async def flushall(testbed: Testbed, distribution: str) -> Verdict:
    """Topic, groups, leases and members are deleted."""
    server = await testbed.server()
    run = await testbed.start(server, distribution=distribution)
    async with run.load(seconds=0.005):
        await run.handles(200)
        ask(server, "FLUSHALL")
        await run.recovers()
        await run.handles(100)
    return await after_all_is_lost(run)


@scenario("33", injection="CLIENT KILL of all connections of a type, ten times",
          variants=({"kind": "normal"}, {"kind": "pubsub"}), is_cheap=True)  # fmt: skip
async def connections_are_killed(testbed: Testbed, kind: str) -> Verdict:
    """Workers reconnect each time."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("connections were killed")
    async with run.load(seconds=0.005):
        for _ in range(10):
            await run.handles(40)
            ask(server, "CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            await run.recovers()
        await run.handles(100)
    return await run.verdict()


@scenario("39", injection="the server does not answer for two leases", bound="nothing published twice, no worker ends",
          variants=({"how": "SIGSTOP"}, {"how": "DEBUG SLEEP"}, {"how": "CLIENT PAUSE"}), is_cheap=True)  # fmt: skip
async def server_stands_still(testbed: Testbed, how: str) -> Verdict:
    """All workers fence themselves, no partition is taken over too early, and work continues."""
    server = await testbed.server()
    run = await testbed.start(server)
    seconds = 2 * run.job.lease
    run.excuse("the server did not answer")
    async with run.load(seconds=0.005):
        await run.handles(200)
        if how == "SIGSTOP":
            server.pause()
            await anyio.sleep(seconds)  # the pause is the fault under test
            server.resume()
        elif how == "DEBUG SLEEP":
            await anyio.to_thread.run_sync(ask, server, "DEBUG", "SLEEP", seconds)
        else:
            ask(server, "CLIENT", "PAUSE", int(seconds * 1000), "ALL")
            await anyio.sleep(seconds)  # the pause is the fault under test
        await run.recovers()
        await run.handles(300)
    all_alive(run)
    return await run.verdict()


@scenario("39", injection="workers get SIGTERM while the server is away", bound="they exit normally", is_cheap=True)
async def stop_without_the_server(testbed: Testbed) -> Verdict:
    """The next workers continue."""
    server = await testbed.server()
    run = await testbed.start(server, workers=2)
    leavers = list(run.processes.workers)
    await run.burst(400, seconds=0.02)
    await run.handles(50)
    server.kill()
    run.excuse("the server was away")
    for leaver in leavers:
        leaver.terminate()
    assert [await leaver.ended() for leaver in leavers] == [0, 0], run.processes.log()
    await anyio.to_thread.run_sync(server.start)
    await run.processes.start_workers(2)
    return await run.verdict()


@scenario("A9", injection="SIGKILL in the middle of an AOF rewrite, three times", bound="nothing confirmed is lost")
async def killed_while_it_rewrites(testbed: Testbed) -> Verdict:
    """BGREWRITEAOF, and SIGKILL a moment later."""
    server = await testbed.server()
    run = await testbed.start(server)
    run.excuse("the server was restarted")
    async with run.load(seconds=0.005):
        for _ in range(3):
            await run.handles(200)
            ask(server, "BGREWRITEAOF")
            await anyio.sleep(run.random.random() * 0.1)  # somewhere in the rewrite
            server.kill()
            await anyio.to_thread.run_sync(server.start)
            await run.recovers()
        await run.handles(200)
    return await run.verdict()
