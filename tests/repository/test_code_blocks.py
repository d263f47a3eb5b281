"""Every Python block of the documents runs, page by page, on a real server, and prints what the page shows below it;
foreign ones parse; the site is built."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser

from rsmq import Settings
from rsmq.model.distribution import OWN
from rsmq.model.words import duration
from tests.repository.page_runner import normal

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FRAGMENTS = {"devices.md", "pipeline.md", "application.md", "testing.md", "tutorial.md", "django.md"}
"""Their blocks are parts of larger programs, which `test_pages.py`, `test_typed_through.py` and `tests/django` test."""
WITH_CODE = [path for path in DOCS if "```python" in path.read_text()]
INSTALLS = re.compile(r"(?:^|`)pip install ([^`\n]+)", re.MULTILINE)
FOREIGN = re.compile(r"^``` \{ \.python \.foreign \}\n(.*?)^```", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\s*^```\n\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""What follows a block of Python where the next block is what it prints."""


def requirements(extras: frozenset[str]) -> Iterator[Requirement]:
    """What rsmq asks for with these extras, as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from map(Requirement, project["dependencies"])
    for name in extras:
        yield from map(Requirement, project["optional-dependencies"][name])


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """The distributions that pip would install for these requirements; of the extras of rsmq itself, too."""
    found, open_ = dict[str, set[str]](), list(wanted)
    while open_:
        each = open_.pop()
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        name, extras = normal(each.name), set(each.extras)
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | extras
        if name == normal(OWN):
            open_ += requirements(frozenset(extras))
            continue
        try:
            inner = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        for one in inner:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *found[name])):
                one.marker = None
                open_.append(one)
    return set(found)


def installed_by(page: Path) -> set[str]:
    """The distributions that the commands on a page install, and those of rsmq without an extra."""
    wanted = [Requirement(OWN)]
    for line in INSTALLS.findall(page.read_text()):
        for word in shlex.split(line, comments=True):
            if not word.startswith("-"):
                wanted.append(Requirement(re.sub(r"^(?:\.\.?|/.*)/rsmq", OWN, word)))
    return closure(wanted)


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line and code of each Python block, also of those that a reader does not see."""
    document = Document.parse(str(page), CodeBlockParser(language="python", evaluator=lambda example: None))
    return [(example.line + 1, str(example.parsed)) for example in document.examples()]


def with_outputs(page: Path) -> list[tuple[int, str, str | None]]:
    """The same, each with what the page shows that it prints; None: the page shows nothing."""
    text, at, found = page.read_text(), 0, list[tuple[int, str, str | None]]()
    for line, code in blocks(page):
        at = text.index(code.rstrip(), at) + len(code.rstrip())
        shown = OUTPUT.match(text, at)
        found.append((line, code, shown[1] if shown and "print(" in code else None))
    return found


def run_blocks(
    path: Path, given: Iterable[tuple[int, str, str | None]], directory: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run them as one program, with the packages that the page installs."""
    text = json.dumps({"path": str(path), "allowed": sorted(installed_by(path)), "blocks": list(given)})
    own = {name: value for name, value in os.environ.items() if not name.startswith("RSMQ_")}
    return subprocess.run(
        [sys.executable, "-m", "tests.repository.page_runner"], cwd=directory, input=text, text=True,
        env=own | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_in_order(path: Path, server_url: str, prefix: str, tmp_path: Path) -> None:
    """In the order of the page, each with the names of those before it and the packages that the page installs. Where
    the page shows what a block prints, it prints that."""
    found = with_outputs(path)
    assert found
    if path.name in FRAGMENTS:
        for _, code, _ in found:
            compile(code, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    database = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    done = run_blocks(path, found, tmp_path, RSMQ_URL=server_url, RSMQ_PREFIX=prefix, DATABASE_URL=database)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_pages_show_as_output_is_found_and_compared(tmp_path: Path) -> None:
    """Two pages have most of it; a block that prints something else fails."""
    shown = {path.name: [each for _, _, each in with_outputs(path) if each is not None] for path in WITH_CODE}
    assert len(shown["results.md"]) == 4
    assert shown["batches.md"][1] == "campaign-8 3\n"
    page = DOCS[0]
    assert run_blocks(page, [(1, "print(1)", "1\n"), (2, "print(2)", None)], tmp_path).returncode == 0
    wrong = run_blocks(page, [(1, "print(1)", "2\n")], tmp_path)
    assert wrong.returncode == 1
    assert r"shows '2\n', and the block prints '1\n'" in wrong.stderr


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_a_page_names_the_packages_that_its_blocks_import(path: Path) -> None:
    """By `pip install` on the page itself; also of blocks that are parts of larger programs."""
    homes, allowed = metadata.packages_distributions(), installed_by(path)
    for _, code in blocks(path):
        for node in ast.walk(compile(code, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                own = {normal(each) for each in homes.get(name.partition(".")[0], ())} - {normal(OWN)}
                assert not own or own & allowed, f"{path.name} imports {name}: say `pip install` of {own}"


def test_extras_are_followed_to_what_they_install() -> None:
    """Through the extras of rsmq and those of other packages, and not into those that nothing asks for."""
    plain, sql = closure([Requirement(OWN)]), closure([Requirement(f"{OWN}[sql]")])
    assert {"redis", "anyio", "mmh3"} <= plain
    assert sql - plain >= {"sqlalchemy", "greenlet"}
    assert not {"sqlalchemy", "fast-depends", "pyspark", "pytest"} & plain


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_a_foreign_block_is_python(path: Path) -> None:
    """Code for another library is Python at least."""
    for block in FOREIGN.findall(path.read_text()):
        ast.parse(textwrap.dedent(block))


def test_every_page_is_on_the_site() -> None:
    """The navigation names each document once, and nothing else."""

    def pages(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for inner in node.values() if isinstance(node, dict) else node:  # type: ignore[attr-defined]
                yield from pages(inner)

    named = list(pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(named) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def short(span: timedelta) -> str:
    """A duration as the page writes it: `5s`."""
    return duration(span).replace(" ", "").replace("min", "m").replace("days", "d").replace("day", "d")


@pytest.mark.parametrize("knob", fields(Settings), ids=lambda knob: knob.name)
def test_the_page_of_settings_has_a_row_for_each(knob: Field[Any]) -> None:
    """Each setting has its row, with its default and its reason."""
    default = short(knob.default) if isinstance(knob.default, timedelta) else knob.default
    shown = "" if default is None else f"`{default}`"
    row = f"| `RSMQ_{knob.name.upper()}` | {shown} | {knob.metadata['description']} |"
    assert row in (ROOT / "docs" / "settings.md").read_text().splitlines(), f"write into docs/settings.md: {row}"
