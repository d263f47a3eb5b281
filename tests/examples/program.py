"""The examples as their readers run them: real processes, with an environment of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXPECTED = Path(__file__).parent / "expected"
SECONDS = 200.0


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the package importable from here and `extra` on top."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **extra}


def run(command: list[str], cwd: Path, env: Mapping[str, str]) -> str:
    """The output of a program that must end well and complain about nothing."""
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", timeout=SECONDS, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, ""), f"{command}: {ended.stderr}\n{ended.stdout}"
    return ended.stdout


def run_python(script: Path, *arguments: str, cwd: Path, env: Mapping[str, str]) -> str:
    """The output of an example in Python."""
    return run([sys.executable, str(script), *arguments], cwd, env)


def expected(name: str) -> str:
    """What an example prints, as it is kept beside its test."""
    return (EXPECTED / f"{name}.txt").read_text(encoding="utf-8")


def sorted_lines(output: str) -> list[str]:
    """Its lines, where handlers of different keys may print in any order."""
    return sorted(output.splitlines())
