"""`python -m tests.repeat gateway --times 50`: play a suite again and again, and keep what failed by test and seed.

Each round has a seed, its number: hypothesis gets it, and the simulator plays the hundred seeds that begin at a hundred
times it. `failures.json` says for each test in which rounds it failed, with the command that plays the round again. The
exit code is 1 if any round failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

SUITES: Final = {
    "chaos": ["tests/chaos"],
    "gateway": ["tests/gateway"],
    "simulation": ["tests/contract/test_simulation.py", "tests/interleavings"],
}
SEEDS: Final = 100
"""Seeds that the simulator plays in a round."""
KEPT: Final = 2000
"""Characters that are kept of what a failure says."""

Failure = dict[str, Any]


def pytest_command(paths: Sequence[str], seed: int) -> list[str]:
    """A round of pytest."""
    return [sys.executable, "-m", "pytest", "-n", "2", f"--hypothesis-seed={seed}", *paths]


def simulation_command(seed: int) -> list[str]:
    """A round of the simulator, which prints a seed that fails with the command that plays it."""
    return [sys.executable, "-m", "tests.simulation", "--seed", str(seed * SEEDS), "--count", str(SEEDS), "--jobs", "2"]


def failed(report: Path) -> Iterator[tuple[str, str]]:
    """The tests that failed in a report of pytest, and what they said."""
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            for each in case.findall(kind):
                yield f"{case.get('classname')}::{case.get('name')}", f"{each.get('message')}\n{each.text or ''}"


def play(paths: Sequence[str], seed: int) -> Iterator[tuple[str, Failure]]:
    """One round of pytest: each failure with its seed and the command. A run without a report counts as one."""
    command = pytest_command(paths, seed)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        done = subprocess.run([*command, f"--junit-xml={report}"], capture_output=True, text=True, check=False)
        again = shlex.join(["python", *command[1:]])
        found = list(failed(report)) if report.exists() else []
        if done.returncode and not found:
            found = [("pytest", done.stdout + done.stderr)]
    for test, said in found:
        yield test, {"seed": seed, "command": again, "said": said[-KEPT:]}


def simulate(seed: int) -> Iterator[tuple[str, Failure]]:
    """One round of the simulator."""
    command = simulation_command(seed)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-KEPT:]
        yield "tests.simulation", {"seed": seed * SEEDS, "command": shlex.join(["python", *command[1:]]), "said": said}


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds; the file is written after each, so that a run which is ended leaves what it has found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="+", help=f"{', '.join(SUITES)}, or paths of tests")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--first", type=int, default=1, help="the number, and seed, of the first round")
    parser.add_argument("--output", type=Path, default=Path("failures.json"))
    options = parser.parse_args(arguments)
    paths = [path for name in options.suite for path in SUITES.get(name, [name])]
    found = defaultdict[str, list[Failure]](list)
    options.output.write_text("{}\n")
    for seed in range(options.first, options.first + options.times):
        round_ = list(play(paths, seed))
        if "simulation" in options.suite:
            round_ += simulate(seed)
        for test, failure in round_:
            found[test].append(failure)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"round {seed}: {len(round_)} failed", *(f"\n  {test}" for test, _ in round_), flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
