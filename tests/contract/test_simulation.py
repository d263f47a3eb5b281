"""Races under the simulator: seeds of several workers on a real server, on virtual time (docs/simulation.md)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.museum import EXHIBITS, put_back
from tests.simulation.server import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler for the server's virtual clock")

ROOT = Path(__file__).parents[2]
OTHER_PYTHON = ROOT / ".cache" / "other-python" / "bin" / "python"


def simulate(*options: str, python: str = sys.executable, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What the command prints."""
    command = [python, "-m", "tests.simulation", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def trace_of(seed: int, file: Path, python: str = sys.executable) -> bytes:
    """Everything that happened in a seed."""
    done = simulate("--seed", str(seed), "--trace", str(file), python=python)
    assert done.returncode == 0, done.stdout + done.stderr
    return file.read_bytes()


@pytest.mark.timeout(1800)
def test_seeds_of_the_simulator_keep_every_promise() -> None:
    """Workers that die, freeze, stop and are cut off lose nothing and keep the order of each key."""
    done = simulate("--seed", "1", "--count", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 of 100 seeds are clean" in done.stdout


def test_seed_of_the_simulator_gives_the_same_trace_ten_times(tmp_path: Path) -> None:
    """Byte for byte, with the threads of heartbeat and presence inside, and through a take-over."""
    traces = [trace_of(7, tmp_path / "trace") for _ in range(10)]
    assert b"> renew_lease" in traces[0]
    assert b"> SUBSCRIBE" in traces[0]
    assert b"> claim_pending" in traces[0]
    assert all(trace == traces[0] for trace in traces[1:])


def test_seed_of_the_simulator_gives_the_same_trace_under_another_python(tmp_path: Path) -> None:
    """A race that is found under one version can be studied under another."""
    if not OTHER_PYTHON.exists():
        pytest.skip("no second Python with the packages: `make simulation` sets one up")
    for seed in (7, 8, 9):
        assert trace_of(seed, tmp_path / "a") == trace_of(seed, tmp_path / "b", python=str(OTHER_PYTHON))


def test_failing_seed_of_the_simulator_is_shrunk_to_a_story_that_can_be_replayed() -> None:
    """A script without its fence: the failure says which few decisions it needs, and how to play only them."""
    exhibit = next(each for each in EXHIBITS if each.name == "settle_messages without its fence")
    with put_back(exhibit) as scratch:
        first = simulate("--count", "200", "--until-failure", folder=scratch)
        failed = re.search(r"^seed (\d+): ", first.stdout, re.MULTILINE)
        assert failed, first.stdout + first.stderr
        found = simulate("--seed", failed[1], folder=scratch)
        story = found.stdout.partition("needs only\n")[2].splitlines()
        decisions = [line.strip() for line in story[: story.index("  play it again")]]
        assert 0 < len(decisions) <= 30
        only = [word for decision in decisions for word in ("--only", decision)]
        again = simulate("--seed", failed[1], "--no-shrink", *only, folder=scratch)
        assert "settle_messages of a member without the lease was accepted" in again.stdout
    assert simulate("--seed", failed[1], *only).returncode == 0
