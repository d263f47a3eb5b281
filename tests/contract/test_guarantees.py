"""The page of guarantees names tests that exist, and leaves no promise and no contract test out."""

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
    """A renamed test must not leave a promise without one."""
    missing = [f"{path}::{name}" for path, name in NAMED if name not in named_in(path)]
    assert not missing


def test_every_promise_names_a_test() -> None:
    """Eight promises, each with its tests, and every line of them with one."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    promises = [section for section in sections if section[0].isdigit()]
    assert [section[0] for section in promises] == list("12345678")
    bare = [line for section in promises for line in section.splitlines() if line[:2] == "- " and "::" not in line]
    assert not bare


def test_every_scene_of_chaos_stands_for_a_promise() -> None:
    """What chaos tests is promised somewhere."""
    paths = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests/chaos").glob("test_*.py"))]
    scenes = {
        (path, name)
        for path in paths
        if not path.endswith(("test_checker.py", "test_registry.py"))
        for name in named_in(path)
    }
    assert scenes <= set(NAMED)
