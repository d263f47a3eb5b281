"""What the parts around the core may use: rooms of the core for each, and no private attribute of another library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from tests.repository.sources import nodes
from tests.repository.test_architecture import INTERNALS, MODULES, TREES, own_imports, part_of

CORE = {
    "errors", "model", "handler", "redis", "producer", "heartbeat", "dlq", "persistence", "consumer", "inspector",
    "control", "worker", "broker",
}  # fmt: skip
"""What every installation needs. It names none of the satellites."""
MAY_IMPORT = {
    "codecs": "errors model",
    "sql": "errors handler model redis",
    "telemetry": "broker consumer errors handler heartbeat inspector model producer redis",
    "dashboard": "codecs control dlq errors handler inspector model persistence producer redis",
    "pipeline": "codecs dlq errors inspector model persistence redis",
    "testing": "broker consumer dlq errors handler inspector model producer redis",
    "asgi": "broker errors model persistence",
    "django": "broker errors handler model redis sql",
    "cloudevents": "errors model producer",
    "gateway": "broker errors handler model persistence producer redis worker",
}
"""The rooms of the core that each satellite may import, and the satellites on which it builds."""


def rooms_of(satellite: str) -> set[str]:
    """The rooms that the modules of a satellite import."""
    found = {part_of(target) for module in MODULES if part_of(module) == satellite for target in own_imports(module)}
    return found - {satellite, "__init__"}


@pytest.mark.parametrize("satellite", MAY_IMPORT)
def test_a_satellite_imports_what_the_table_allows(satellite: str) -> None:
    """The table here is that of docs/internals.md; another room in it is a decision."""
    allowed = set(MAY_IMPORT[satellite].split())
    assert rooms_of(satellite) == allowed
    row = re.search(rf"^\| `rsmq\.{satellite}` \| (.+) \|$", INTERNALS, re.MULTILINE)
    assert row is not None, f"docs/internals.md has no row for rsmq.{satellite}"
    assert set(re.findall(r"`(\w+)`", row[1])) == allowed


def test_the_core_imports_no_satellite() -> None:
    """A satellite could be a distribution of its own."""
    for module in (each for each in MODULES if part_of(each) in CORE):
        assert {part_of(target) for target in own_imports(module)} & MAY_IMPORT.keys() == set(), module


def foreign_names(tree: ast.Module) -> set[str]:
    """The names in a module that other libraries give."""
    found = set[str]()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "rsmq":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found - {"rsmq"}


def targets(tree: ast.AST) -> Iterator[ast.expr]:
    """What is assigned."""
    for node in nodes(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ast.walk(target)  # type: ignore[misc]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target


@cache
def own_private_names() -> set[str]:
    """The private attributes that classes of rsmq set on themselves or declare."""
    found = set[str]()
    for tree in TREES.values():
        for target in targets(tree):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
            elif isinstance(target, ast.Name):
                found.add(target.id)
    return found


def swapped(tree: ast.Module) -> Iterator[str]:
    """Assignments to private attributes of objects that are not of rsmq, and to attributes of foreign modules."""
    foreign = foreign_names(tree)
    for target in targets(tree):
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
            is_self = isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
            is_private = target.attr.startswith("_") and not target.attr.startswith("__")
            is_module = isinstance(target.value, ast.Name) and target.value.id in foreign
            if (is_private and not is_self and target.attr not in own_private_names()) or is_module:
                yield from {ast.unparse(target)} - {"sys.stdout", "sys.stderr"}  # meant to be replaced
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__") and node.args:
            owner = node.args[0]
            if isinstance(owner, ast.Name) and owner.id in foreign - {"sys"}:
                yield ast.unparse(node)


def test_no_private_attribute_of_another_library_is_swapped() -> None:
    """An upgrade of that library could break a guarantee without a word."""
    assert {module: found for module, tree in TREES.items() if (found := list(swapped(tree)))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "driver._transaction = 1",
        "self.own._top_xact = None",
        "import asyncio\nasyncio.sleep = None",
        "from redis import asyncio\nsetattr(asyncio, 'Redis', 1)",
    ],
)
def test_a_swapped_attribute_is_found(code: str) -> None:
    """The test above can fail."""
    assert list(swapped(ast.parse(code))) != []


OF_OTHERS: Final = frozenset({"_fields", "_writer"})
"""Of named tuples, and of a connection of redis-py."""


def members(tree: ast.Module) -> set[str]:
    """The private methods and attributes that the classes of a module have."""
    found = set[str]()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def reached(tree: ast.Module, all_members: set[str]) -> set[str]:
    """The private members of classes of other modules that a module uses."""
    used = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    return (used & all_members) - members(tree)


def test_no_other_private_member_of_another_module_is_used() -> None:
    """What a module may use of another one has a plain name."""
    all_members = set[str]().union(*map(members, TREES.values()))
    found = {name for tree in TREES.values() for name in reached(tree, all_members)}
    assert found - OF_OTHERS == set()


def test_a_private_member_that_another_module_uses_is_found() -> None:
    """The test above can fail."""
    other = ast.parse("class Queue:\n    def _grow(self): self._size = 1")
    assert reached(ast.parse("def f(queue): queue._grow()"), members(other)) == {"_grow"}
    assert reached(ast.parse("class A:\n    def _grow(self): self._grow()"), members(other)) == set()
