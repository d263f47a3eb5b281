"""Races under the simulator: seeds of several workers on a real server, on virtual time (docs/simulation.md)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.simulation.server import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler for the server's virtual clock")


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    """What the command prints."""
    command = [sys.executable, "-m", "tests.simulation", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_seeds_of_the_simulator_keep_every_promise() -> None:
    """Workers that die, freeze, stop and are cut off lose nothing and keep the order of each key."""
    done = simulate("--seed", "1", "--count", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 of 40 seeds are clean" in done.stdout


def test_seed_of_the_simulator_gives_the_same_trace_again() -> None:
    """Everything that happens depends on the seed alone."""
    traces = [re.findall(r"trace (\w{24})", simulate("--seed", "7", "--count", "3").stdout) for _ in range(2)]
    assert len(traces[0]) == 3
    assert sorted(traces[0]) == sorted(traces[1])
