"""The scenarios that no other test runs: some in every test session, the rest with `CHAOS=long`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import load
from tests.chaos.conftest import MINUTES, RunScenario
from tests.chaos.scenario_run import IS_LONG

HERE = Path(__file__).parent
CALL = re.compile(r'run_scenario\(f?"([^"]+)')
NAMED = {re.sub(r"{.*}", ".*", name) for path in HERE.glob("test_*.py") for name in CALL.findall(path.read_text())}
SHORT = {"sigterm with an endless handler hash", "malformed", "out of memory"}
"""Further scenarios of the default session: a few seconds each."""
REST = [
    (one.name, given, title)
    for one in load()
    for title, given in one.titles()
    if not any(re.fullmatch(name, one.name) for name in NAMED) and (IS_LONG or title in SHORT)
]


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "given"), [each[:2] for each in REST], ids=[each[2] for each in REST])
async def test_scenario_ends_with_a_clean_verdict(run_scenario: RunScenario, name: str, given: dict[str, Any]) -> None:
    """A scenario of the catalogue ends with a clean verdict."""
    await run_scenario(name, **given)


@pytest.mark.chaos
@pytest.mark.skipif(not IS_LONG, reason="ten minutes of faults at random: with CHAOS=long")
@pytest.mark.timeout(MINUTES * 60 + 300)
async def test_random_mix_ends_with_a_clean_verdict(run_scenario: RunScenario) -> None:
    """Random faults of every kind for CHAOS_MINUTES (10), a quarter of the time without faults."""
    await run_scenario("mix")
