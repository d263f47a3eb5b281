"""Fixtures of the chaos tests: running a scenario, and the measured numbers at the end of the test session."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import CATALOGUE, load
from tests.chaos.checker import Verdict
from tests.chaos.scenario_run import IS_LONG
from tests.chaos.testbed import Testbed
from tests.servers import Server

MEASURED = pytest.StashKey[list[str]]()
SECONDS = float(os.environ.get("CHAOS_SECONDS", "1" if IS_LONG else "0"))
"""The least duration of each phase without faults."""

MINUTES = float(os.environ.get("CHAOS_MINUTES", "10"))
"""How long the random mix lasts."""

RunScenario = Callable[..., Awaitable[Verdict]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With CHAOS=long every scenario runs with several seeds."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1, int(os.environ.get("CHAOS_SEEDS", "10")) + 1) if IS_LONG else [1])


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Print a measurement at the end of the test session."""
    lines = request.config.stash.setdefault(MEASURED, [])
    return lambda what: lines.append(f"{request.node.name}: {what}")


@pytest.fixture
def run_scenario(tmp_path: Path, seed: int, server: Server, report: Callable[[object], None]) -> RunScenario:
    """Runs a scenario by its name and asserts that the verdict is clean."""
    load()

    async def run_it(name: str, **given: Any) -> Verdict:
        async with Testbed("valkey-9.1", seed, SECONDS, tmp_path, server, MINUTES) as testbed:
            verdict = await CATALOGUE[name].function(testbed, **given)
            assert testbed.run is not None
            recovered = f"work went on after {testbed.run.recovered:.2f} s; " if testbed.run.recovered else ""
            report(f"{recovered}{len(testbed.run.history.unknown)} of unknown outcome; {verdict}")
        assert not verdict.faults, verdict
        return verdict

    return run_it


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was measured."""
    lines = config.stash.get(MEASURED, [])
    if lines:
        terminalreporter.section("measured under chaos")
        for line in lines:
            terminalreporter.write_line(line)
