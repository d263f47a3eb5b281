"""The example `campaign.py`, small: each chosen device gets one letter, and the chart shows when."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

from rsmq.broker import Broker
from rsmq.model.settings import Settings

SCRIPT = Path(__file__).parents[2] / "examples" / "campaign.py"
ROWS = 2000


@pytest.fixture
def campaign() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("campaign", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_campaign_sends_one_letter_to_each_chosen_device(
    campaign: ModuleType, spark: SparkSession, settings: Settings
) -> None:
    """Sent twice, each device has its letter once, in its language; the curve ends at their number."""
    connection = {"url": settings.url, "prefix": settings.prefix, "encode": "none"}
    count = campaign.send(spark, ROWS, connection)
    assert campaign.send(spark, ROWS, connection) == count
    assert ROWS / 100 < count < ROWS / 5
    moments = await campaign.arrivals(settings, ROWS)
    assert len(moments) == count
    chosen = {row.device: row.value for row in campaign.letters(spark, ROWS).collect()}
    async with Broker(settings) as broker:
        for device in list(chosen)[:20]:
            assert [letter.data.decode() for letter in await broker.devices.peek(device)] == [chosen[device]]
    assert "letters stored" in campaign.curve(moments, count)


def test_campaign_help_names_its_options() -> None:
    """Its docstring shows its command."""
    assert "\n    python examples/campaign.py\n" in SCRIPT.read_text().split('"""')[1]
