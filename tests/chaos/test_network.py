"""Connections between workers and their server are cut or reset."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import RunScenario

pytestmark = pytest.mark.chaos


async def test_worker_in_a_black_hole_is_replaced(run_scenario: RunScenario) -> None:
    """A worker that is cut off for three leases fences itself and is replaced; its late writes are refused."""
    await run_scenario("black hole")


async def test_cut_shorter_than_the_lease_loses_nothing(run_scenario: RunScenario) -> None:
    """All workers are cut off for less than a lease, five times: commands arrive late or are sent again."""
    await run_scenario("short cut")


async def test_reset_of_all_connections_loses_nothing(run_scenario: RunScenario) -> None:
    """Every connection of every worker is reset twenty times."""
    await run_scenario("reset storm")
