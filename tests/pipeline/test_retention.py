"""Archive and retention hold hands: what the archive has not is not trimmed, and who holds it is named."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from rsmq.broker import Broker
from rsmq.consumer.retention import reasons
from rsmq.settings import Settings
from tests.patience import until
from tests.pipeline.vault import Vault


@pytest.fixture
def vault(spark: SparkSession, settings: Settings, tmp_path: Path) -> Vault:
    """An empty archive beside the shared server."""
    return Vault(spark, tmp_path / "archive", settings)


async def test_a_running_worker_trims_behind_the_archive(vault: Vault, settings: Settings) -> None:
    """Everything is settled and nothing goes, until the archive has committed; then the worker trims it by itself."""
    eager = settings.model_copy(update={"retention_interval": timedelta(milliseconds=50)})
    async with Broker(eager) as broker:
        handled: list[int] = []

        @broker.handler("orders", group="billing")
        async def bill(order: dict[str, int]) -> None:
            handled.append(order["n"])

        topic = await broker.topics.ensure("orders", 2)
        topic = await broker.topics.change("orders", retention_length=0, archive="required")
        vault.add("orders", range(600))
        async with broker.running():
            with anyio.fail_after(60):
                while len(handled) < 600 or holders(await all_reasons(broker, topic)) != {"archive"}:
                    await anyio.sleep(0.02)
            vault.archive("orders", name="nightly")
            # a stream drops whole nodes of about a hundred entries
            await until(lambda: max(lengths(vault)) <= 100, "what is archived is trimmed")
            vault.add("orders", range(600, 610))
            with anyio.fail_after(60):
                while "archive nightly" not in holders(await all_reasons(broker, topic)):
                    await anyio.sleep(0.02)
    assert vault.archived("orders") == list(range(600))


async def all_reasons(broker: Broker, topic: object) -> list[tuple[str, bool]]:
    """Who keeps anything of any partition."""
    found = [each for number in (0, 1) for each in await reasons(broker.client, broker.keys, topic, number)]  # type: ignore[arg-type]
    return [(each.holder, each.is_limit) for each in found]


def holders(found: list[tuple[str, bool]]) -> set[str]:
    """Those that need something."""
    return {holder for holder, is_limit in found if not is_limit}


def lengths(vault: Vault) -> list[int]:
    """Entries in each partition."""
    return [vault.raw("XLEN", vault.keys.stream("orders", number)) for number in (0, 1)]
