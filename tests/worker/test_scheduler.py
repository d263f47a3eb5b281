"""Schedules in workers: each tick is published once, also when the leader dies; errors; the test harness."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from rsmq import Broker, ConfigError, Router, Settings
from rsmq.model.partition import partition_for
from rsmq.testing import Harness
from tests.chaos.system_faults import FaultyServer
from tests.contract.witness import Witness, ask
from tests.patience import until

ROOT = Path(__file__).parents[2]
TICK = timedelta(milliseconds=200)

PROGRAM = """
import asyncio, sys
from datetime import datetime, timedelta
from rsmq import Broker, Settings

broker = Broker(Settings(url=sys.argv[1], prefix=sys.argv[2], preflight="warn", lease_ttl=timedelta(seconds=2)))

@broker.every(timedelta(milliseconds=200), "ticks", missed="skip")
def clock(at: datetime) -> str:
    return at.isoformat()

asyncio.run(broker.run())
"""


@pytest.fixture
def workers(server_url: str, prefix: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that run one schedule and no handler."""
    command = [sys.executable, "-c", PROGRAM, server_url, prefix]
    started = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(3)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


async def test_ticks_after_the_death_of_the_leader_are_published_once(
    workers: list[subprocess.Popen[bytes]], server_url: str, prefix: str
) -> None:
    """The leader of three workers is killed: no tick is missing and none is published twice."""
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as broker:
        test = Harness(broker, url=server_url, prefix=prefix)
        for count in (4, 8):
            await until(partial(has_published, test, workers, count), f"{count} ticks are published")
            if count < 8:
                await kill_leader(broker, workers)
        seen = [datetime.fromisoformat(message.payload) for message in await test.published("ticks")]
        assert all(later - earlier == TICK for earlier, later in itertools.pairwise(seen)), seen
        ids = [message.id for message in await test.published("ticks")]
        assert ids[0] == f"clock@{seen[0].isoformat()}"


async def has_published(test: Harness, workers: list[subprocess.Popen[bytes]], count: int) -> bool:
    """Whether so many ticks are in the topic."""
    assert any(worker.poll() is None for worker in workers), "no worker runs"
    return len(await test.published("ticks")) >= count


async def kill_leader(broker: Broker, workers: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL the process that leads now."""
    topic = await broker.topics.find("ticks")
    assert topic is not None
    for partition in topic.numbers:
        owner = await broker.client.execute_command("HGET", broker.keys.every("ticks", partition), "owner|clock")
        if owner is not None:
            pid = int(owner.split(b"-")[-2])
            leader = next(process for process in workers if process.pid == pid)
            leader.send_signal(signal.SIGKILL)
            leader.wait()
            return
    raise AssertionError("no process leads")


async def test_worker_handles_the_ticks_that_it_publishes(server_url: str, prefix: str, witness: Witness) -> None:
    """Schedules of a router, async and plain; a function that fails is retried and does not stop the other schedule."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
    router = Router(prefix="shop.")
    problems = [ValueError("not yet")]

    @router.every(TICK, "ticks", key="k")
    async def clock(at: datetime) -> dict[str, str]:
        return {"at": at.isoformat()}

    @router.every(timedelta(milliseconds=100), "others", name="other")
    def faulty() -> str:
        if problems:
            raise problems.pop()
        return "at last"

    @router.handler("ticks", group="g")
    async def handle(tick: dict[str, str]) -> None:
        witness.note(tick["at"])

    @router.handler("others", group="g")
    async def other(text: str) -> None:
        witness.note(text)

    broker.include(router)
    async with broker.running():
        await until(lambda: "at last" in witness.seen and len(set(witness.seen)) >= 4, "ticks are handled")
        assert broker.worker is not None
    at = sorted({datetime.fromisoformat(each) for each in witness.seen if each != "at last"})
    assert all((later - earlier) % TICK == timedelta(0) for earlier, later in itertools.pairwise(at))


async def test_stopped_worker_releases_its_schedules(server_url: str, prefix: str) -> None:
    """After a planned stop the schedule has no owner, so another worker can lead it at once."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1))

    @broker.every(timedelta(hours=1), "ticks")
    def clock() -> None: ...

    async with broker:
        fields = (broker.keys.every("ticks", 0), "owner|clock", "last|clock")
        async with broker.running():
            await until(lambda: broker.client.execute_command("HGET", *fields[:2]), "the schedule has a leader")
        owner, last = await broker.client.execute_command("HMGET", *fields)
        assert owner is None
        assert last is not None
        await broker.topics.delete("ticks")
        assert await broker.client.execute_command("EXISTS", fields[0]) == 0


async def test_harness_publishes_a_tick_on_request(server_url: str, prefix: str) -> None:
    """The harness runs no schedule by itself: the test asks for a tick with its time."""
    broker, handled = Broker(Settings(url="redis://127.0.0.1:1/0")), list[str]()

    @broker.every(timedelta(milliseconds=100), "reports")
    def report(at: datetime) -> str | None:
        return at.isoformat() if at.year == 2026 else None

    @broker.handler("reports", group="g")
    async def handle(text: str) -> None:
        handled.append(text)

    async with Harness(broker, url=server_url, prefix=prefix) as test:
        assert await test.tick("report", datetime(2026, 1, 1, tzinfo=UTC)) == "report@2026-01-01T00:00:00+00:00"
        assert await test.tick("report", datetime(2027, 1, 1, tzinfo=UTC)) is None
        with pytest.raises(ConfigError, match="no schedule 'x'; it has: report"):
            await test.tick("x", datetime(2026, 1, 1, tzinfo=UTC))
        assert handled == ["2026-01-01T00:00:00+00:00"]
    assert len(broker.declared_schedules) == 1
    with pytest.raises(ConfigError, match="has a schedule 'report' already"):
        broker.every(timedelta(hours=1), "reports")(report)


async def test_schedule_that_waits_for_the_clock_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The server's clock is set back by an hour: no tick is published twice, and the log has one line about it."""
    with FaultyServer() as server:
        broker = Broker(Settings(url=server.url, preflight="warn", lease_ttl=timedelta(seconds=2)))
        broker.every(TICK, "ticks", name="clock")(lambda: "tick")

        def warnings() -> list[str]:
            return [record.getMessage() for record in caplog.records if "was set back" in record.getMessage()]

        async with broker.running():
            stream = broker.keys.stream("ticks", partition_for("clock", 8))
            await until(lambda: ask(broker, "XLEN", stream), "a tick is published")
            server.faults.step_clock(-3600)
            await until(lambda: bool(warnings()), "the log says why no tick comes")
        (said,) = warnings()
        assert "schedule clock" in said
        assert "after 1 h" in said
