"""Nothing but `rsmq.model.layout` counts partitions: a topic may have others than those from 0 on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repository.sources import nodes, parsed
from tests.repository.test_architecture import ROOT

COUNTS = "rsmq/model/layout.py"
FILES = [
    path
    for folder in ("rsmq", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).as_posix() != COUNTS
]


def names_partitions(node: ast.AST) -> bool:
    """Whether an expression is made of a number of partitions; the length of a list of them is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return False
    if isinstance(node, ast.Name | ast.Attribute):
        return (node.id if isinstance(node, ast.Name) else node.attr) == "partitions"
    return any(map(names_partitions, ast.iter_child_nodes(node)))


def counted(tree: ast.AST) -> Iterator[int]:
    """The lines that walk or compute partitions from their number."""
    for node in nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        of_topic = name == "partition_for" and isinstance(node.args[-1], ast.Attribute)
        if (name == "range" or of_topic) and any(map(names_partitions, node.args)):
            yield node.lineno


def test_modules_outside_the_layout_do_not_count_partitions() -> None:
    """They walk `topic.numbers`, and ask `topic.open_block()` for the partition of what they store."""
    trees = {path.relative_to(ROOT).as_posix(): parsed(path) for path in FILES}
    assert {name: lines for name, tree in trees.items() if (lines := list(counted(tree)))} == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("for n in range(topic.partitions): pass", [1]),
        ("[n for n in range(0 if t is None else t.partitions)]", [1]),
        ("range(partitions)", [1]),
        ("partition_for(key, topic.partitions)", [1]),
        ("range(0, len(partitions), 100)", []),
        ("partition_for(key, block.count)", []),
    ],
)
def test_a_loop_over_a_number_of_partitions_is_found(text: str, lines: list[int]) -> None:
    """The rule sees loops, comprehensions and the partition of a key."""
    assert list(counted(ast.parse(text))) == lines
