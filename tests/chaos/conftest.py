"""What the chaos tests share: seeds, scenes, and the measured numbers at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.scene import IS_LONG, Scene
from tests.servers import Server

MEASURED = pytest.StashKey[list[str]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long form runs every scene with several seeds."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1, 11) if IS_LONG else [1])


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Say something at the end of the test run: measured, not asserted."""
    lines = request.config.stash.setdefault(MEASURED, [])
    return lambda what: lines.append(f"{request.node.name}: {what}")


@pytest.fixture
def scene_on(tmp_path: Path, seed: int) -> Callable[..., Scene]:
    """Makes the scene of a test: `scene_on(server, lease=30)`."""
    return lambda server, **job: Scene(tmp_path, server.url, seed, **job)


@pytest.fixture
def stage(server: Server) -> Server:
    """The shared server, for scenes that leave it alone."""
    return server


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was measured."""
    lines = config.stash.get(MEASURED, [])
    if lines:
        terminalreporter.section("measured under chaos")
        for line in lines:
            terminalreporter.write_line(line)
