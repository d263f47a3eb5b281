"""Every Python block of the documents runs, page by page, on a real server; foreign ones parse; the site is built."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Awaitable, Iterator
from dataclasses import Field, fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sybil import Example
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser

from rsmq import Settings
from rsmq.model.words import duration

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FRAGMENTS = {"devices.md", "pipeline.md", "application.md", "testing.md", "tutorial.md", "django.md"}
"""Their blocks are parts of larger programs, which `test_pages.py`, `test_typed_through.py` and `tests/django` test."""
FOREIGN = re.compile(r"^``` \{ \.python \.foreign \}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(example: Example) -> None:
    """One block in its page's namespace; `await` may stand outside of a function."""
    page = example.document.namespace["__page__"]
    code = compile(
        "\n" * (example.line + 1) + example.parsed, example.path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )  # fmt: skip
    if code.co_flags & inspect.CO_COROUTINE:
        page.main.run(eval(code, vars(page)))
    else:
        exec(code, vars(page))


class Main:
    """One task for all blocks of a page, as if they stood in one `main`. Between them no loop runs."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._work = asyncio.Queue[tuple[Awaitable[object], asyncio.Future[object]]]()
        self._task = self._loop.create_task(self._main())

    async def _main(self) -> None:
        while True:
            block, result = await self._work.get()
            try:
                result.set_result(await block)
            except Exception as error:
                result.set_exception(error)

    def run(self, block: Awaitable[object]) -> None:
        """Until it is done."""
        result: asyncio.Future[object] = self._loop.create_future()
        self._work.put_nowait((block, result))
        self._loop.run_until_complete(result)

    def close(self) -> None:
        """No block follows: what still runs is cancelled and ends, as at the end of `asyncio.run`."""
        self._runner.close()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, server_url: str, prefix: str, tmp_path: Path) -> Iterator[ModuleType]:
    """A module that can be imported, as `app.py` would be, on a prefix of its own."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.setenv("RSMQ_URL", server_url)
    monkeypatch.setenv("RSMQ_PREFIX", prefix)
    monkeypatch.setenv("DATABASE_URL", f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    main = module.main = Main()  # type: ignore[attr-defined]
    yield module
    main.close()


@pytest.mark.parametrize("path", [path for path in DOCS if "```python" in path.read_text()], ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_in_order(path: Path, page: ModuleType) -> None:
    """In the order of the page, each with the names that the ones before it have made."""
    document = Document.parse(str(path), CodeBlockParser(language="python", evaluator=run))
    document.namespace["__page__"] = page
    examples = list(document.examples())
    assert examples
    for example in examples:
        if path.name in FRAGMENTS:
            compile(example.parsed, example.path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        else:
            example.evaluate()


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
