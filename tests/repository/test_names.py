"""A name has one meaning in the package, a word one in a file, and the documents stay in plain English."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.repository.sources import Trees, nodes

ROOT = Path(__file__).parents[2]
RIDDLES = re.compile(r"\b(nobody|somebody|everybody|whoever|whatever|is told|are told)\b", re.IGNORECASE)
"""Phrases without a subject: a component does something, it is not told of it. They come back with each new page."""
MOST_RIDDLES = {"pages": 9, "sources": 47}
SOURCES = [
    path
    for folder in ("rsmq", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".lua") and path.name != "test_names.py"
]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in ("docs", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.md"))),
]


def name_of(path: Path) -> str:
    """The dotted name of a module, by its file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = Trees({name_of(path): path for path in SOURCES if path.suffix == ".py"})


@cache
def defined_in(module: str) -> set[str]:
    """The names that a module gives to something of its own."""
    found = set[str]()
    for node in TREES[module].body if module in TREES else ():
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found.update(each.id for each in targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


@cache
def imported_by(module: str) -> list[tuple[str, ast.alias]]:
    """Module and name of each import of a name, also those inside functions."""
    return [
        (node.module or "", each)
        for node in (nodes(TREES[module]) if module in TREES else ())
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name != "*"
    ]


def meaning_of(module: str, name: str) -> str:
    """Where a name that is imported from a module is defined; packages pass names on."""
    if name not in defined_in(module):
        for home, alias in imported_by(module):
            if name == (alias.asname or alias.name) and home != module:
                return meaning_of(home, alias.name)
    return f"{module}.{name}"


def meanings_in(module: str) -> Iterator[tuple[str, set[str]]]:
    """The words of a file, each with what it stands for there, whatever it is imported as."""
    found = defaultdict[str, set[str]](set)
    for home, alias in imported_by(module):
        found[alias.name].add(meaning_of(home, alias.name))
    for name in defined_in(module) & set(found):
        found[name].add(f"{module}.{name}")
    yield from found.items()


def test_a_public_class_shares_its_name_with_no_other() -> None:
    """A class in a traceback or an import is the only one with its name."""
    homes = defaultdict[str, list[str]](list)
    for module, tree in TREES.items():
        if module.partition(".")[0] == "rsmq":
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("folder", ["rsmq", "tests", "benchmarks", "examples"])
def test_a_file_imports_one_meaning_of_a_word(folder: str) -> None:
    """No reader has to ask which of two a name is. Two of one library are not ours to name, such as sync and async."""
    doubles = {
        (module, word): meanings
        for module in TREES
        if module.partition(".")[0] == folder
        for word, meanings in meanings_in(module)
        if len(meanings) > 1 and any(each.partition(".")[0] in ("rsmq", "tests", "benchmarks") for each in meanings)
    }
    assert doubles == {}


def test_a_name_says_which_kind_of_place_it_means() -> None:
    """An index, a partition, a key, an import path: `place` once was the name of all of them."""
    named = re.compile(r"(?<![a-z])(place|places)(?![a-z])", re.IGNORECASE)
    used = set[tuple[str, str]]()
    for module, tree in TREES.items():
        if module.partition(".")[0] == "rsmq":
            for node in nodes(tree):
                names = [getattr(node, part, None) for part in ("id", "arg", "attr", "name")]
                used |= {(module, name) for name in names if isinstance(name, str) and named.search(name)}
    for path in SOURCES:
        if path.suffix == ".lua":
            code = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
            used |= {(path.name, found) for found in named.findall(code)}
    assert used == set()


@pytest.mark.parametrize("kind", MOST_RIDDLES)
def test_a_sentence_has_a_component_as_its_subject(kind: str) -> None:
    """The few phrases that are left must not grow in number."""
    files = PAGES if kind == "pages" else SOURCES
    found = Counter({path.name: len(RIDDLES.findall(path.read_text(encoding="utf-8"))) for path in files})
    assert found.total() <= MOST_RIDDLES[kind], found.most_common(5)
