"""A machine that was suspended: CLOCK_MONOTONIC stood still, and the leases of its workers are over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import anyio
import pytest

from rsmq import Broker
from tests.chaos.ledger import EventLedger
from tests.chaos.processes import Processes
from tests.chaos.system_faults import SystemFaults
from tests.chaos.worker import TOPIC, Job
from tests.patience import until
from tests.servers import Server

COUNT = 400


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_worker_that_wakes_starts_nothing_that_others_have_taken_over(
    tmp_path: Path, distribution: Literal["hash", "shared"]
) -> None:
    """It has hundreds of messages in memory, and its clock says that no time has passed."""
    path, faults = tmp_path / "ledger", SystemFaults(tmp_path)
    with Server(tcp=True) as server:
        more = {"partitions": "2", "unavailable_timeout": "PT30S"}
        job = Job(
            server.url, "suspend", str(path), ordering="none", distribution=distribution, concurrency=2, more=more
        )
        ledger = EventLedger(path)
        processes = Processes(job, ledger)
        try:
            (sleeper,) = await processes.start_workers(1, environment=faults.environment)
            async with Broker(job.settings()) as broker:
                await broker.publish_many(TOPIC, [{"key": "k", "n": n, "seconds": 0.005} for n in range(COUNT)])
                await until(lambda: len(ledger.commits()) > 20, "it works")
                sleeper.pause()
                since = time.monotonic()
                await processes.start_workers(1)
                await until(lambda: len(ledger.commits()) >= COUNT - 2, "the other one has handled the rest")
                await anyio.sleep(max(0.0, since + 2 * job.lease - time.monotonic()))
                before = len(ledger.events())
                faults.suspend(time.monotonic() - since)
                sleeper.resume()
                for n in range(COUNT, 2 * COUNT):  # until it handles messages again
                    await broker.publish(TOPIC, {"key": "k", "n": n, "seconds": 0.005})
                    if any(e.pid == sleeper.pid and e.n >= COUNT for e in ledger.events()[before:]):
                        break
                    await anyio.sleep(0.05)
                late = [e for e in ledger.events()[before:] if e.what == "start" and e.pid == sleeper.pid]
            assert any(event.n >= COUNT for event in late), "it serves again"
            begun = [event.n for event in late if event.n < COUNT and event.attempt == 1]
            assert len(begun) <= 1, "the only one is that which was about to start when the process was stopped"
        finally:
            await processes.stop_all()
            faults.close()
