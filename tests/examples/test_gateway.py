"""The WebSocket gateway: a run with a killed gateway, and the verdict, which detects each violation."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.program import EXAMPLES, run_python

SOURCE = EXAMPLES / "gateway"


def test_phones_of_a_killed_gateway_get_every_letter_in_order(env: dict[str, str], tmp_path: Path) -> None:
    """The phones of the killed gateway, which are half of all, connect to the other one. On a busy machine others may,
    too: their pings are answered too late."""
    output = run_python(SOURCE / "run.py", "--phones", "80", "--letters", "30", cwd=tmp_path, env=env)
    first, second, last = output.splitlines()
    again = re.fullmatch(r"80 phones, (\d+) of them connected again after the kill", first)
    assert again is not None
    assert int(again[1]) >= 40
    assert second.startswith("2400 letters received of 2400, ")
    assert last == "Every letter received, in order per phone."


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """`phones` and `verdict`, forgotten afterwards: another example has a module of that name."""
    monkeypatch.syspath_prepend(str(SOURCE))
    yield importlib.import_module("phones"), importlib.import_module("verdict")
    for name in ("phones", "verdict"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("receipts", "left", "wrong"),
    [
        ([(1, 0, False), (1, 1, False)], 0, {}),
        ([(1, 0, False), (2, 0, True), (2, 1, False)], 0, {}),
        ([(1, 0, False)], 0, {"lost": 1}),
        ([(1, 1, False), (1, 0, False)], 0, {"out_of_order": 1}),
        ([(1, 0, False), (2, 0, False), (2, 1, False)], 0, {"unmarked": 1}),
        ([(1, 0, False), (1, 0, True), (1, 1, False)], 0, {"unmarked": 1}),
        ([(1, 0, False), (1, 1, False), (1, 2, False)], 0, {"unexpected": 1}),
        ([(1, 0, False), (1, 1, False)], 1, {"left": 1}),
    ],
)
def test_the_verdict_detects_each_violation(
    modules: tuple[Any, Any], receipts: list[tuple[int, int, bool]], left: int, wrong: dict[str, int]
) -> None:
    """Each has its own count; a marked repeat at a later connection is none."""
    phones, verdict = modules
    judged = verdict.judge(["p"], 2, {"p": [phones.Receipt(*each) for each in receipts]}, left)
    assert judged.wrong == wrong
