"""The page about security: every point of its checklist is done, with tests that exist, or says why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.security.page import PAGE

ROOT = Path(__file__).parents[2]
STATES = {"done", "yours", "not applicable", "see dashboard"}
CHECKLIST = PAGE.partition("## The checklist")[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in CHECKLIST.splitlines()
    if line.startswith("| ") and not line.startswith("| point")
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def functions(path: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_section_is_there() -> None:
    """Thirteen, each with at least one point."""
    numbers = [int(number) for number in re.findall(r"^### (\d+)\. ", CHECKLIST, re.MULTILINE)]
    assert numbers == list(range(1, 14))
    assert all("\n| " in section for section in re.split(r"^### ", CHECKLIST, flags=re.MULTILINE)[1:])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_point_has_its_test_or_its_reason(row: list[str]) -> None:
    """What is done names tests, all of which exist; what is not says why."""
    assert len(row) == 4, row
    point, state, how, tests = row
    assert state in STATES, point
    named = TEST.findall(tests)
    assert bool(named) or state != "done", f"{point} is said to be done: by which test?"
    assert len(how) > 10, f"{point}: how, or why not?"
    assert TEST.sub("", tests).strip(" ,|") == "", tests
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert name in functions(path), f"{path} has no {name}"
