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
POINT = re.compile(r"^- \*\*(.+?)\*\* \(([a-z ]+)\): (.+?)(?=\n-|\n\n|\Z)", re.MULTILINE | re.DOTALL)
POINTS = [(point, state, " ".join(text.split())) for point, state, text in POINT.findall(CHECKLIST)]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def functions(path: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_section_is_there() -> None:
    """Thirteen, each with at least one point."""
    numbers = [int(number) for number in re.findall(r"^### (\d+)\. ", CHECKLIST, re.MULTILINE)]
    assert numbers == list(range(1, 14))
    assert all("\n- **" in section for section in re.split(r"^### ", CHECKLIST, flags=re.MULTILINE)[1:])


def test_every_line_of_the_checklist_is_a_point() -> None:
    """No point is written in a form that the test below would miss."""
    assert len(POINTS) == len(re.findall(r"^- \*\*", CHECKLIST, re.MULTILINE)) > 50


@pytest.mark.parametrize(("point", "state", "text"), POINTS, ids=[point for point, _, _ in POINTS])
def test_every_point_has_its_test_or_its_reason(point: str, state: str, text: str) -> None:
    """What is done names tests, all of which exist; what is not says why."""
    how, named = TEST.sub("", text).strip(" ,"), TEST.findall(text)
    assert state in STATES, point
    assert bool(named) or state != "done", f"{point} is said to be done: by which test?"
    assert len(how) > 10, f"{point}: how, or why not?"
    assert "tests/" not in how.replace("`tests/security/test_roles.py`", ""), how
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert name in functions(path), f"{path} has no {name}"
