"""MQTT gateways are killed under load: the short form of the scenarios that `make chaos` plays."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import RunScenario

pytestmark = pytest.mark.chaos


async def test_a_killed_gateway_loses_and_repeats_nothing(run_scenario: RunScenario) -> None:
    """The gateways whose routers have the most partitions are killed under load."""
    await run_scenario("gateways are killed", of="router")


async def test_wills_of_killed_gateways_are_published_once(run_scenario: RunScenario) -> None:
    """Of a killed gateway, and while one of the survivors is killed."""
    await run_scenario("wills of killed gateways")
