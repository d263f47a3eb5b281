"""A worker and a publisher of the commit before bands meet a topic with bands."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsmq import Broker
from rsmq.model.settings import Settings
from tests.chaos.ledger import EventLedger
from tests.chaos.processes import Processes
from tests.chaos.release import release_before
from tests.chaos.release_process import GROUP, TOPIC, ReleaseJob
from tests.chaos.scenarios.bands import BANDS, NEWEST
from tests.chaos.worker import Job
from tests.patience import until

pytestmark = pytest.mark.chaos


async def test_an_older_worker_keeps_bands_closed_or_is_refused(settings: Settings, tmp_path: Path) -> None:
    """It is named while it lives, and its death opens them; one that comes later says why it ends. What an older
    publisher sends is stored in `normal`."""
    old = release_before(NEWEST)
    ledger = EventLedger(tmp_path / "ledger")
    given = {"url": str(settings.url), "prefix": settings.prefix, "ledger": str(ledger.path)}
    async with Broker(settings) as broker:
        with Processes(Job(**given), ledger) as processes:
            (worker,) = await processes.start_workers(1, ReleaseJob("worker", "hash", **given), old.environment)
            await broker.topics.set_bands(TOPIC, BANDS)
            (unaware,) = await broker.topics.open_bands(TOPIC)
            assert unaware.startswith(f"{GROUP}: ")
            worker.kill()

            async def is_open() -> bool:
                return not await broker.topics.open_bands(TOPIC)

            await until(is_open, "the bands are open", seconds=30)
            late = processes.start_worker(ReleaseJob("worker", "hash", **given), old.environment)
            assert await late.ended() != 0
            assert "has distribution 'hash, bands: upgrade this worker', not 'hash'" in processes.log()
            await processes.start_publisher(ReleaseJob("publisher", "hash", **given), old.environment)
            await until(lambda: any(event.what == "ok" for event in ledger.events()), "it has published")
            topic = await broker.topics.existing(TOPIC)
            stored = [
                await broker.client.execute_command("XLEN", broker.keys.stream(TOPIC, number))
                for number in topic.numbers
            ]
            assert sum(stored[: topic.partitions]) == sum(stored) > 0
