"""Power loss, a full disk and clock steps: faults that a signal cannot cause (see `fault.c`)."""

from __future__ import annotations

from typing import Any

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.publisher import PublisherJob
from tests.chaos.system_faults import SystemFaults
from tests.chaos.testbed import CALM, Testbed

EVERYSEC = 2.0
"""Seconds of confirmed messages that a power loss may cost with appendfsync everysec."""
NOTED = 0.5
"""Seconds after which the publisher has noted its last confirmations."""


def waits(info: dict[str, Any]) -> bool:
    """Whether the server holds back writes that it has confirmed."""
    return info["aof_pending_bio_fsync"] > 0 and info["aof_buffer_length"] > 20_000


@scenario("25", injection="power loss under load, twice: bytes that were not synced are lost; appendfsync everysec",
          bound="at most the last 2 s of confirmed messages are lost", is_cheap=True)  # fmt: skip
async def power_loss_everysec(testbed: Testbed) -> Verdict:
    """The server itself promises no more than this."""
    server = await testbed.faulty_server("--appendfsync", "everysec")
    run, lost = await testbed.start(server, workers=2), 0
    run.excuse("the power was lost")
    run.history.rewound = "the power was lost"
    await run.processes.start_publisher(PublisherJob(run.job, many=20, seed=testbed.seed))
    for _ in range(2):
        await run.handles(300)
        await anyio.sleep(1.2)  # so that some messages are old enough to be safe
        down, late = run.now(), server.faults.synced
        lost += server.lose_power()
        await anyio.sleep(NOTED)
        # if the machine is too busy to sync each second, count from the last sync
        run.forgive(down - EVERYSEC - (late if late > EVERYSEC / 2 else 0), run.now())
        await anyio.to_thread.run_sync(server.start)
        await run.recovers()
    await run.handles(200)
    assert lost > 0, "everything was on the disk: the test shows nothing"
    return await run.verdict()


@scenario("A33", injection="the server is killed under load, three times, while it waits for a slow sync; "
          "appendfsync everysec",
          bound="at most the last 2 s of confirmed messages are lost")  # fmt: skip
async def killed_during_sync(testbed: Testbed) -> Verdict:
    """While a sync is running the server confirms writes up to 2 s before it writes them."""
    server = await testbed.faulty_server("--appendfsync", "everysec")
    run = await testbed.start(server, workers=2)
    run.excuse("the server was killed")
    run.history.rewound = "the server was killed"
    await run.processes.start_publisher(PublisherJob(run.job, many=20, seed=testbed.seed))
    for _ in range(3):
        await run.handles(300)
        with server.faults.slow_disk(2 * EVERYSEC):
            with server.client() as client:
                await run.until(lambda: waits(client.info("persistence")), "confirmed writes wait for the sync")
            server.kill()
        down = run.now()
        await anyio.sleep(NOTED)
        run.forgive(down - EVERYSEC, run.now())
        await anyio.to_thread.run_sync(server.start)
        await run.recovers()
    await run.handles(200)
    verdict = await run.verdict()
    assert run.lost or verdict.findings, "the writes were in the file: the test shows nothing"
    return verdict


@scenario("26", injection="power loss under load, three times; appendfsync always", bound="nothing confirmed is lost",
          is_cheap=True)  # fmt: skip
async def power_loss_always(testbed: Testbed) -> Verdict:
    """Everything confirmed is on the disk."""
    server = await testbed.faulty_server("--appendfsync", "always")
    run = await testbed.start(server, workers=2)
    run.excuse("the power was lost")
    await run.processes.start_publisher(PublisherJob(run.job, many=20, seed=testbed.seed))
    for _ in range(3):
        await run.handles(200)
        server.lose_power()
        await anyio.to_thread.run_sync(server.start)
        await run.recovers()
    await run.handles(200)
    return await run.verdict()


@scenario("43", injection="the disk is full for two leases (ENOSPC for every write); appendfsync everysec",
          bound="publishers get errors, workers wait, then work continues", is_cheap=True)  # fmt: skip
async def disk_full(testbed: Testbed) -> Verdict:
    """The server answers MISCONF to every write once it has detected it."""
    server = await testbed.faulty_server("--appendfsync", "everysec")
    run = await testbed.start(server)
    run.excuse("the disk was full")
    async with run.load(seconds=0.005):
        await run.handles(200)
        with server.faults.full_disk():
            await anyio.sleep(2 * run.job.lease)  # the shortage is the fault under test
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


@scenario("43", injection="the disk is full; with appendfsync always the server exits and is restarted",
          bound="nothing confirmed is lost")  # fmt: skip
async def disk_full_always(testbed: Testbed) -> Verdict:
    """The server cannot make writes durable, so it exits instead of confirming them."""
    server = await testbed.faulty_server("--appendfsync", "always")
    run = await testbed.start(server)
    run.excuse("the server was restarted")
    async with run.load(seconds=0.005):
        await run.handles(200)
        with server.faults.full_disk():
            await run.until(lambda: not server.is_running, "the server exits")
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        await run.recovers()
        await run.handles(200)
    return await run.verdict()


@scenario("45", injection="the server's clock steps: an hour forward, three hours back, then to the right time",
          bound="delayed messages are not all due at once and not stuck; nothing lost")  # fmt: skip
async def server_clock_steps(testbed: Testbed) -> Verdict:
    """Forward, all heartbeats expire at once; back, all leases last for hours."""
    server = await testbed.faulty_server()
    run = await testbed.start(server)
    run.excuse("the clock stepped")
    async with run.load(seconds=0.005):
        for off in (3600, -7200, 0):
            await run.handles(200)
            server.faults.step_clock(off)
            await run.recovers()
        await run.handles(300)
    return await run.verdict()


@scenario("46, A11", injection="the clock of one worker is an hour ahead, then two hours behind", bound="no duplicate",
          is_cheap=True)  # fmt: skip
async def worker_clock_steps(testbed: Testbed) -> Verdict:
    """rsmq uses only the server's clock and the local monotonic clock."""
    run = await testbed.start(await testbed.shared_server(), workers=2, lease=CALM)
    weather = SystemFaults(run.ledger.path.parent)
    weather.step_clock(3600)
    await run.processes.start_workers(1, environment=weather.environment)
    async with run.load(seconds=0.005):
        await run.handles(200)
        weather.step_clock(-7200)
        await run.handles(200)
        weather.step_clock(0)
        await run.handles(100)
    verdict = await run.verdict()
    weather.close()
    assert not verdict.findings, verdict
    return verdict
