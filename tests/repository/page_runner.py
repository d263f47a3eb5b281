"""Runs the Python blocks of a page in a process that can import what some distributions have, and nothing else.

`python -m tests.repository.page_runner` reads JSON: the page, its blocks, each with what the page says that it prints
(None: nothing is said), and the distributions. It imports nothing but the standard library itself.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.abc
import inspect
import io
import json
import sys
from collections.abc import Awaitable, Sequence
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from types import ModuleType


class Absent(importlib.abc.MetaPathFinder):
    """Finds no module of a distribution that is not allowed, as if it were not installed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._homes = {name: {normal(each) for each in homes} for name, homes in packages_distributions().items()}
        self._allowed = {normal(each) for each in allowed}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None where another finder may look. Raises ModuleNotFoundError for what is not allowed."""
        name = fullname.partition(".")[0]
        if (homes := self._homes.get(name)) and not homes & self._allowed:
            raise ModuleNotFoundError(f"the page names no extra that has {name!r} ({', '.join(homes)})", name=name)
        return None


def normal(name: str) -> str:
    """The name of a distribution, as PyPI compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


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


def main() -> None:
    """Run the blocks in order, each with the names that the ones before it have made. Exits with 1 if one prints
    something else than the page shows."""
    given = json.load(sys.stdin)
    sys.meta_path.insert(0, Absent(given["allowed"]))
    page = sys.modules["page"] = ModuleType("page")  # can be imported, as `app.py` would be
    runner = page.main = Main()  # type: ignore[attr-defined]
    for line, text, shown in given["blocks"]:
        code = compile("\n" * line + text, given["path"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        with redirect_stdout(io.StringIO()) as printed:
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, vars(page)))
            else:
                exec(code, vars(page))
        if shown not in (None, printed.getvalue()):
            sys.exit(f"{given['path']}:{line}: the page shows {shown!r}, and the block prints {printed.getvalue()!r}")
    runner.close()


if __name__ == "__main__":
    main()
