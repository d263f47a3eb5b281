"""Workers of an earlier version and of this one, side by side."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import RunScenario

pytestmark = pytest.mark.long_chaos("half a minute")


async def test_rolling_upgrade_and_downgrade_lose_and_reorder_nothing(run_scenario: RunScenario) -> None:
    """Workers out of an earlier commit's wheel are replaced under load, one by one, and back again."""
    await run_scenario("rolling upgrade", style="hash")


async def test_rolling_upgrade_of_gateways_loses_and_reorders_nothing(run_scenario: RunScenario) -> None:
    """MQTT gateways of both, with clients that publish and subscribe through them."""
    await run_scenario("rolling upgrade of gateways")


async def test_rolling_upgrade_to_bands_loses_and_reorders_nothing(run_scenario: RunScenario) -> None:
    """Workers of the commit before bands keep them closed; when they have gone the bands open; one more is refused."""
    await run_scenario("rolling upgrade to bands")
