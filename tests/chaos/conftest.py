"""What the chaos tests share: how a scenario is played, and the measured numbers at the end of the run."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import CATALOGUE, load
from tests.chaos.checker import Verdict
from tests.chaos.scene import IS_LONG
from tests.chaos.stage import Stage
from tests.servers import Server

MEASURED = pytest.StashKey[list[str]]()
SECONDS = float(os.environ.get("CHAOS_SECONDS", "1" if IS_LONG else "0"))
"""How long each quiet phase of a scenario lasts at least."""

MINUTES = float(os.environ.get("CHAOS_MINUTES", "10"))
"""How long the random mix lasts."""

Play = Callable[..., Awaitable[Verdict]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long form plays every scenario with several seeds."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1, int(os.environ.get("CHAOS_SEEDS", "10")) + 1) if IS_LONG else [1])


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Say something at the end of the test run: measured, not asserted."""
    lines = request.config.stash.setdefault(MEASURED, [])
    return lambda what: lines.append(f"{request.node.name}: {what}")


@pytest.fixture
def play(tmp_path: Path, seed: int, server: Server, report: Callable[[object], None]) -> Play:
    """Plays a scenario by its name, and wants a clean verdict."""
    load()

    async def play_it(name: str, **given: Any) -> Verdict:
        async with Stage("valkey-9.1", seed, SECONDS, tmp_path, server, MINUTES) as stage:
            verdict = await CATALOGUE[name].play(stage, **given)
            assert stage.scene is not None
            recovered = f"work went on after {stage.scene.recovered:.2f} s; " if stage.scene.recovered else ""
            report(f"{recovered}{len(stage.scene.story.unknown)} of unknown outcome; {verdict}")
        assert not verdict.faults, verdict
        return verdict

    return play_it


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was measured."""
    lines = config.stash.get(MEASURED, [])
    if lines:
        terminalreporter.section("measured under chaos")
        for line in lines:
            terminalreporter.write_line(line)
