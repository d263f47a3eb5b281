"""docs/guarantees.md names existing tests, and has every promise and every contract test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def named_in(path: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    """A promise whose test was renamed must not be without a test."""
    missing = [f"{path}::{name}" for path, name in NAMED if name not in named_in(path)]
    assert not missing


def test_every_promise_names_a_test() -> None:
    """Eleven promises, each with its tests, and every line of them with one."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    promises = [section for section in sections if section[0].isdigit()]
    assert [section.split(".")[0] for section in promises] == [str(number) for number in range(1, 12)]
    items = [item for section in promises for item in re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)]
    bare = [item for item in items if "::" not in item]
    assert items
    assert not bare


def test_every_chaos_test_covers_a_promise() -> None:
    """Every chaos test is named on the page."""
    paths = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests/chaos").glob("test_*.py"))]
    scenes = {
        (path, name)
        for path in paths
        if not path.endswith(("test_checker.py", "test_registry.py", "test_result.py"))
        for name in named_in(path)
    }
    assert scenes <= set(NAMED)
