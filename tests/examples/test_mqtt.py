"""Sensors and a phone by MQTT: a short run with a killed gateway, and its verdict, which detects each violation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.program import EXAMPLES, expected, run_python

SOURCE = EXAMPLES / "mqtt"


def test_every_mean_reaches_the_phone(env: dict[str, str], tmp_path: Path) -> None:
    """The gateway of the phone is killed: every reading is acknowledged, every mean arrives."""
    output = run_python(SOURCE / "run.py", "--sensors", "4", "--readings", "60", cwd=tmp_path, env=env)
    assert output == expected("mqtt")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, which is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SOURCE))
    yield importlib.import_module("run")
    for name in ("run", "service"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({("a", 0): 1.5, ("a", 1): 2.5}, "2: 0 missing, 0 unknown, 0 wrong ✓"),
        ({("a", 0): 1.5}, "1: 1 missing, 0 unknown, 0 wrong ✗"),
        ({("a", 0): 1.5, ("a", 1): 2.5, ("b", 0): 1.0}, "3: 0 missing, 1 unknown, 0 wrong ✗"),
        ({("a", 0): 1.5, ("a", 1): 9.0}, "2: 0 missing, 0 unknown, 1 wrong ✗"),
    ],
)
def test_the_verdict_detects_each_violation(
    example: ModuleType, capsys: pytest.CaptureFixture[str], found: dict[tuple[str, int], float], said: str
) -> None:
    """Each has its own count, and makes the verdict bad."""
    wanted = example.expected({"a": [1.5] * example.SIZE + [2.5] * example.SIZE})
    assert example.judge(wanted, found) == ("✓" in said)
    assert said in capsys.readouterr().out
