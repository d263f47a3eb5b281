"""README, tutorial and how-to as a reader types them: one after the other, in one fresh directory, on one server."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rsmq.redis.embedded.server import EmbeddedServer
from tests.cli.conftest import Cli, Running
from tests.repository.page_runner import Main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:```|<!--- invisible-code-block: )(\w*)\n(.*?)^(?:```|-->)$", re.MULTILINE | re.DOTALL
)  # fmt: skip
FILE = re.compile(r"# (\w+\.py)\n")
SET_UP = {"git", "pip", "mkdir"}
"""Lines that the environment of the tests has done already."""

THE_WORKER_PRINTS = [
    ("rsmq publish orders", ["ada owes 9.5 for order 1"]),
    ("python order.py", ["ada owes 3.0 for order 2"]),
    ("rsmq worker app:broker", ["mail to ada: order 1", "mail to ada: order 2"]),
    ("rsmq publish payments", []),
    ("rsmq dlq list payments bank", []),
]
"""What a line of the tutorial leads to, in its order. The first worker has nothing to print."""


class Reader:
    """Types the blocks of pages: files, commands and, for how-to, statements of one session."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.cli = Cli(directory, environment)
        self.directory = directory
        self.worker: Running | None = None
        self.typed: list[str] = []

    def save(self, code: str, *, name: str, is_new: bool) -> None:
        """Write a file, or append to it."""
        with (self.directory / name).open("w" if is_new else "a") as file:
            file.write(code + "\n\n")

    def python(self, *args: str) -> str:
        """Run Python; it must succeed. Returns what it prints."""
        done = subprocess.run(
            [sys.executable, *args], cwd=self.directory, env=self.cli.environment, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (args, done.stdout, done.stderr)
        return done.stdout

    def command(self, line: str) -> str:
        """Type one line into the terminal. A worker goes on in one of its own, until the next one replaces it."""
        words = shlex.split(line, comments=True)
        self.typed.append(line)
        if words[:2] == ["rsmq", "worker"]:
            self.end_worker()
            self.worker = Running(self.cli, *words[1:], before=("env", "PYTHONUNBUFFERED=1"))  # prints come at once
            return ""
        if words[0] == "rsmq":
            return self.cli.ok(*words[1:])
        if words[0] == "python":
            return self.python(*words[1:])
        if words[0] == "pytest":
            plugins = ("-p", "pytest_rsmq", "-p", "anyio", "-p", "no:cacheprovider", "-W", "error")
            return self.python("-m", "pytest", "-q", *plugins)
        assert words[0] in SET_UP, f"how is this typed? {line}"
        return ""

    def end_worker(self) -> None:
        """Ctrl-C, as the tutorial says."""
        if self.worker is not None:
            worker, self.worker = self.worker, None
            worker.signal(signal.SIGINT)
            assert worker.end() == 0, worker.lines
            worker.kill()  # nothing is left but the pipe

    def dead(self, topic: str, group: str) -> int:
        """The number of dead letters."""
        return len(self.cli.json("dlq", "list", topic, group))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """In an empty directory, without settings; the embedded server runs until the end."""
    directory = tmp_path / "shop"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = EmbeddedServer()
    server.acquire()
    reader = Reader(
        directory, {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    )  # fmt: skip
    try:
        yield reader
    finally:
        if reader.worker is not None:
            reader.worker.kill()
        server.release()


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the content of each block, in order."""
    return BLOCK.findall((ROOT / page).read_text())


def test_readme_tutorial_and_how_to_work_as_typed(reader: Reader) -> None:
    """In this order, with the messages that the page before has left."""
    type_readme(reader)
    type_tutorial(reader)
    type_how_to(reader)
    assert (reader.dead("orders", "billing"), reader.dead("orders", "mail")) == (0, 0)
    reader.end_worker()


def type_readme(reader: Reader) -> None:
    """The first block is a program, the second is what it prints."""
    (language, code), (_, printed) = blocks("README.md")[:2]
    assert language == "python"
    reader.save(code, name="app.py", is_new=True)
    assert reader.python("app.py") == printed


def type_tutorial(reader: Reader) -> None:
    """Every block; the worker must print what the text says, and nothing becomes a dead letter by accident."""
    saved, expected = set[str](), list(THE_WORKER_PRINTS)
    for language, body in blocks("docs/tutorial.md"):
        if language == "python":
            found = FILE.match(body)
            assert found is not None, f"its first line does not name its file: {body}"
            reader.save(body, name=found[1], is_new=found[1] not in saved)
            saved.add(found[1])
            continue
        for line in body.splitlines():
            printed = reader.command(line)
            if expected and line.startswith(expected[0][0]):
                _, texts = expected.pop(0)
                assert reader.worker is not None
                for text in texts:
                    reader.worker.expect(text)
            if line.startswith("rsmq publish payments"):
                assert reader.worker is not None
                reader.worker.expect("a negative amount")
            if line.startswith("rsmq dlq list"):
                assert "a negative amount" in printed
            if line == "pytest":
                assert "1 passed" in printed
    assert expected == []
    assert (reader.dead("orders", "billing"), reader.dead("orders", "mail")) == (0, 0)


def type_how_to(reader: Reader) -> None:
    """Statements of one session with `await`, as in `python -m asyncio`, and commands beside it."""
    session, page = Main(), ModuleType("session")
    sys.modules["session"] = page
    try:
        for language, body in blocks("docs/how-to.md"):
            if language == "python":
                code = compile(body, "how-to.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                if code.co_flags & inspect.CO_COROUTINE:
                    session.run(eval(code, vars(page)))
                else:
                    exec(code, vars(page))
            else:
                for line in body.splitlines():
                    reader.command(line)
    finally:
        session.close()
        del sys.modules["session"]
    assert os.getcwd() == str(reader.directory)
