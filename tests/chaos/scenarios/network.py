"""The connections of workers and publishers are cut, reset, slow or of low bandwidth."""

from __future__ import annotations

from dataclasses import replace

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.testbed import CALM, Testbed


@scenario("36", injection="one of three workers is cut off (black hole) for three leases",
          bound="it fences itself; its late writes are refused", is_cheap=True)  # fmt: skip
async def black_hole(testbed: Testbed) -> Verdict:
    """Half open connections: no FIN and no RST arrives."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=2)
    (isolated,) = await run.processes.start_workers(1, replace(run.job, url=proxy.url))
    async with run.load(seconds=0.01):
        await run.until(lambda: isolated.pid in run.ledger.pids("commit"), "the worker behind the proxy has work")
        await run.handles(200)
        proxy.cut()
        run.excuse("cut off", isolated)
        await anyio.sleep(3 * run.job.lease)  # the outage is the fault under test
        begun = run.starts_of(isolated)
        await run.handles(100)
        assert run.starts_of(isolated) == begun, "the worker has not fenced itself"
        proxy.mend()
        await run.recovers()
        await run.handles(300)
    return await run.verdict()


@scenario("36", injection="all workers are cut off for a third of a lease, five times", is_cheap=True)
async def short_cut(testbed: Testbed) -> Verdict:
    """Commands and replies arrive late, or are sent again."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=2, url=proxy.url)
    run.excuse("cut off")
    async with run.load(seconds=0.005):
        for _ in range(5):
            await run.handles(80)
            proxy.cut()
            await anyio.sleep(0.3 * run.job.lease)  # the outage is the fault under test
            proxy.mend()
            await run.recovers()
        await run.handles(100)
    return await run.verdict()


@scenario("34", injection="every connection of every worker is reset (RST), twenty times", is_cheap=True)
async def reset_storm(testbed: Testbed) -> Verdict:
    """All connections break again and again."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=2, url=proxy.url)
    run.excuse("connections were reset")
    async with run.load(seconds=0.005):
        for _ in range(20):
            await run.handles(20)
            proxy.reset()
            await run.recovers()
        await run.handles(100)
    return await run.verdict()


@scenario("34", injection="every connection of the publisher is reset (RST) each 50 ms, forty times",
          bound="no message is stored twice", is_cheap=True)  # fmt: skip
async def publisher_under_a_reset_storm(testbed: Testbed) -> Verdict:
    """Without rsmq's protection redis-py stores 9 to 33 % of the messages twice here."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=2, publish_url=proxy.url, lease=CALM)
    async with run.load(seconds=0.001):
        for _ in range(40):
            proxy.reset()
            await anyio.sleep(0.05)  # the rhythm of the storm
        await run.handles(100)
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict


@scenario("37", injection="every chunk is delayed by 100 to 300 ms in each direction",
          bound="no worker is declared dead: no duplicate")  # fmt: skip
async def slow_connection(testbed: Testbed) -> Verdict:
    """A lease of 4 s over a slow connection."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=0, url=proxy.url, lease=4)
    proxy.delay = lambda: 0.1 + 0.2 * run.random.random()
    await run.processes.start_workers(2)
    async with run.load(burst=4, seconds=0.005):
        await run.handles(200)
    verdict = await run.verdict(seconds=120)
    assert not verdict.repeats, verdict
    return verdict


@scenario("37", injection="20 000 bytes a second in each direction of each connection", bound="no duplicate")
async def narrow_connection(testbed: Testbed) -> Verdict:
    """Fetching takes longer than publishing."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=2, url=proxy.url, lease=4)
    async with run.load(burst=4, seconds=0.005):
        await run.handles(100)
        proxy.bytes_per_second = 20_000
        await run.handles(200)
        proxy.bytes_per_second = 0
    verdict = await run.verdict()
    assert not verdict.repeats, verdict
    return verdict
