"""Modules of the project as syntax trees. A tree is parsed when a test asks for it: every process of a run imports all
tests, and few of them need one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of the tree of a file, once for all tests of a process."""
    return tuple(ast.walk(tree))


class Trees(Mapping[str, ast.Module]):
    """The trees of modules by their dotted names."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths

    def __getitem__(self, module: str) -> ast.Module:
        return parsed(self._paths[module])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)
