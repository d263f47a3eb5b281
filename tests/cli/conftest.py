"""Commands as real processes: run to their end, or kept running and watched line by line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from tests import forks
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]
MODULE = """
import asyncio, os, time
from pathlib import Path
from rsmq import Broker

broker = Broker()

@broker.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print("started", order["n"], os.getpid(), flush=True)
    while order.get("hold") and not Path("go").exists():
        await asyncio.sleep(0.01)
    print("finished", order["n"], flush=True)
"""


class Cli:
    """`rsmq` with the environment of one test, in a directory of its own."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environment}

    def __call__(self, *args: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            given.write(stdin or "")
            given.seek(0)
            process = forks.start(
                "rsmq",
                *args,
                cwd=self.directory,
                env=self.environment | environment,
                stdin=given,
                stdout=out,
                stderr=err,
            )
            try:
                code = process.wait(120)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(["rsmq", *args], code, out.read(), err.read())

    def ok(self, *args: str, stdin: str | None = None) -> str:
        """What it prints; it must succeed."""
        result = self(*args, stdin=stdin)
        assert result.returncode == 0, (args, result.stdout, result.stderr)
        return result.stdout

    def json(self, *args: str) -> Any:
        """What it prints with --json; it must succeed."""
        return json.loads(self.ok(*args, "--json"))


class Running:
    """A command that goes on. Its output, both streams together, is collected line by line.

    `before` is another command, such as `nice`, that starts it.
    """

    def __init__(self, cli: Cli, *args: str, before: Sequence[str] = ()) -> None:
        reading, writing = os.pipe()
        self._output = os.fdopen(reading)
        self.process: subprocess.Popen[bytes] | forks.ForkedProcess
        if before:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "rsmq", *args], cwd=cli.directory, env=cli.environment,
                stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, start_new_session=True,
            )  # fmt: skip
        else:
            self.process = forks.start("rsmq", *args, cwd=cli.directory, env=cli.environment, stdout=writing)
        os.close(writing)
        self.lines: list[str] = []
        self.pids: set[int] = {self.process.pid}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            self.lines.append(line.rstrip())
            if " has pid " in line:
                self.pids.add(int(line.split()[-1]))

    def matching(self, text: str) -> list[str]:
        """The lines so far that contain a text."""
        return [line for line in self.lines if text in line]

    def expect(self, text: str, count: int = 1) -> list[str]:
        """Wait until so many lines contain a text, and return them."""
        wait_until(lambda: len(self.matching(text)) >= count, f"{count} lines with {text!r} in {self.lines}")
        return self.matching(text)

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(120)
        self._reader.join(60)
        return code

    def kill(self) -> None:
        """Kill it and all its children."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.end()
        self._output.close()


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def cli(tmp_path: Path, server_url: str, prefix: str) -> Cli:
    """The command against the shared server."""
    return Cli(tmp_path, {"RSMQ_URL": server_url, "RSMQ_PREFIX": prefix, "RSMQ_PARTITIONS": "2"})


@pytest.fixture
def start(cli: Cli) -> Iterator[Callable[..., Running]]:
    """Start a command that goes on; it is gone after the test."""
    running: list[Running] = []

    def launch(*args: str, before: Sequence[str] = ()) -> Running:
        running.append(Running(cli, *args, before=before))
        return running[-1]

    yield launch
    for each in running:
        each.kill()


@pytest.fixture
def app(cli: Cli) -> Path:
    """A module `app` with a `broker`, whose handler waits for a file `go` when a message says hold."""
    path = cli.directory / "app.py"
    path.write_text(MODULE)
    return path
