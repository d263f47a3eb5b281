"""One statement, one thought; and docstrings say the thing itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.repository.sources import nodes
from tests.repository.test_architecture import TREES

MOST_ATTRIBUTES = 2


def attributes_at_once(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The line of each assignment, and how many attributes it sets."""
    for node in nodes(tree):
        if isinstance(node, ast.Assign):
            targets = [
                each
                for target in node.targets
                for each in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
            ]
            yield node.lineno, sum(isinstance(each, ast.Attribute) for each in targets)


def test_a_statement_sets_at_most_two_attributes() -> None:
    """Each attribute has a line of its own, where its type, its unit and its reason have room."""
    found = [
        f"{module}:{line}"
        for module, tree in TREES.items()
        for line, number in attributes_at_once(tree)
        if number > MOST_ATTRIBUTES
    ]
    assert found == []


def test_a_docstring_says_the_thing_itself() -> None:
    """`The same.` sends the reader elsewhere, and does not say where."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{module}.{getattr(node, 'name', '')}"
        for module, tree in TREES.items()
        for node in nodes(tree)
        if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith("The same.")
    ]
    assert found == []
