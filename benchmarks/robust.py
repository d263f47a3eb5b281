"""`python -m benchmarks.robust`: the cost of a healthy worker: memory over a million messages, leaks over hundreds
of starts, and an idle or cut-off worker's CPU and log lines.

A throw-away server for each. With --write into benchmarks/results and docs/benchmarks.md. Takes minutes.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
from rich.console import Console
from rich.progress import Progress

from benchmarks.footprint import Footprint, resident
from benchmarks.section import Section
from benchmarks.server import listens
from benchmarks.table import mib, table
from rsmq import Broker, Settings
from rsmq.redis.embedded.server import server_binary

PARTITIONS, GROUPS = 4, 2
CHUNK = 10_000
"""Messages between two looks at most: what is published and not yet handled is bounded."""


@dataclass(slots=True)
class Process:
    """A server that can be ended and started again at the same socket."""

    directory: Path
    child: subprocess.Popen[bytes] | None = None
    args: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str:
        """Its address."""
        return f"unix://{self.directory / 's'}"

    def start(self) -> None:
        """Start and wait for the socket."""
        socket = self.directory / "s"
        socket.unlink(missing_ok=True)
        binary = os.environ.get("SERVER_BINARY") or server_binary()
        command = [binary, "--port", "0", "--unixsocket", str(socket), "--dir", str(self.directory), "--save", ""]
        self.child = subprocess.Popen([*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
        while not listens(socket):
            time.sleep(0.02)

    def stop(self) -> None:
        """End it."""
        if self.child is not None:
            self.child.send_signal(signal.SIGCONT)
            self.child.terminate()
            self.child.wait()
            self.child = None


@contextmanager
def process() -> Iterator[Process]:
    """A running server of its own."""
    with TemporaryDirectory() as directory:
        server = Process(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.stop()


class Counted(logging.Handler):
    """Counts log lines from INFO on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


@asynccontextmanager
async def worker(url: str, prefix: str = "robust", **settings: Any) -> AsyncIterator[tuple[Broker, list[int]]]:
    """A worker with one handler of single messages and one of batches; counts what both have handled."""
    broker, done = Broker(Settings(url=url, prefix=prefix, preflight="warn", **settings)), [0, 0]

    @broker.handler("t", group="single", partitions=PARTITIONS)
    async def handle(payload: dict[str, Any]) -> None:
        done[0] += 1

    @broker.handler("t", group="batch", partitions=PARTITIONS, batch=500)
    async def handle_all(payloads: list[dict[str, Any]]) -> None:
        done[1] += len(payloads)

    async with broker.running():
        yield broker, done


async def memory(server: Process, count: int, tick: Any) -> dict[str, Any]:
    """Publish and handle so many messages, twice each, and look at this process and the server on the way."""
    rows: list[dict[str, int]] = []
    tight: dict[str, Any] = {
        "retention_age": timedelta(0), "retention_length": 1000, "retention_interval": timedelta(milliseconds=500),
    }  # fmt: skip
    assert server.child is not None
    async with worker(server.url, **tight) as (broker, done):
        for at in range(0, count, CHUNK):
            await broker.publish_many(
                "t", ({"n": n, "pad": "x" * 150} for n in range(CHUNK)), key=lambda each: f"k{each['n'] % 1000}"
            )
            while min(done) < at + CHUNK:
                await anyio.sleep(0.01)
            if at % (count // 20) < CHUNK:
                now = Footprint.now()
                rows.append({"messages": at + CHUNK, "server": resident(server.child.pid), **asdict(now)})
            tick(CHUNK)
    return {"count": count, "rows": rows}


async def cycles(server: Process, count: int, tick: Any) -> dict[str, Any]:
    """Start, handle a few messages, stop: so often. What is held after a tenth of it, and at the end."""
    rows = []
    for at in range(count):
        async with worker(server.url) as (broker, done):
            await broker.publish_many("t", [{"n": n} for n in range(10)])
            while min(done) < 10:
                await anyio.sleep(0.002)
        tick(1)
        if at + 1 in (count // 10, count // 2, count):
            rows.append({"cycles": at + 1, **asdict(Footprint.now()), **await left(server)})
    return {"count": count, "rows": rows}


async def left(server: Process) -> dict[str, int]:
    """What the server still holds of workers that have left: connections but this one, keys, members, consumers."""
    async with Broker(Settings(url=server.url, prefix="robust", preflight="warn")) as broker:
        client, keys = broker.client, broker.keys
        clients = (await client.execute_command("CLIENT", "LIST")).count(b"\n")
        names = await client.execute_command("KEYS", "robust:*")
        consumers = 0
        for partition in range(PARTITIONS):
            for group in ("single", "batch"):
                rows = await client.execute_command("XINFO", "CONSUMERS", keys.stream("t", partition), group)
                consumers += len(rows)
        members = await client.execute_command("SCARD", keys.members("t", "single"))
    return {"connections": clients, "keys": len(names), "consumers": consumers, "members": members}


async def quiet(server: Process, seconds: float, state: str) -> dict[str, float]:
    """CPU and log lines of a worker whose server is there with nothing to do, gone, or stopped without a farewell."""
    counted = Counted()
    logging.getLogger("rsmq").addHandler(counted)
    logging.getLogger("rsmq").setLevel(logging.INFO)
    try:
        async with worker(server.url) as (broker, done):
            await broker.publish_many("t", [{"n": n} for n in range(100)])
            while min(done) < 100:
                await anyio.sleep(0.01)
            assert server.child is not None
            if state == "gone":
                server.stop()
            elif state == "frozen":
                server.child.send_signal(signal.SIGSTOP)
            await anyio.sleep(0.2)
            cpu, lines = time.process_time(), counted.lines
            await anyio.sleep(seconds)
            cpu, lines = time.process_time() - cpu, counted.lines - lines
            held = Footprint.now()
            if state == "gone":
                server.start()
            elif state == "frozen":
                server.child.send_signal(signal.SIGCONT)
            back = time.monotonic()
            with anyio.fail_after(30):
                await broker.publish_many("t", [{"n": n} for n in range(100)])
                while min(done) < 200:
                    await anyio.sleep(0.01)
            back = time.monotonic() - back
    finally:
        logging.getLogger("rsmq").removeHandler(counted)
    found = {"cpu_percent": 100 * cpu / seconds, "lines_per_second": lines / seconds, "back_seconds": back}
    return {"seconds": seconds, **found, **asdict(held)}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, one after the other."""
    logging.getLogger("rsmq").addHandler(logging.NullHandler())
    logging.getLogger("rsmq").propagate = False
    found: dict[str, Any] = {
        "facts": {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        },
        "quiet": {},
    }  # fmt: skip
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("idle", total=options.messages + options.cycles * 500)
        for state in ("idle", "gone", "frozen"):
            progress.update(task, description=state)
            with process() as server:
                found["quiet"][state] = await quiet(server, options.seconds, state)
        progress.update(task, description="starts and stops")
        with process() as server:
            found["cycles"] = await cycles(server, options.cycles, lambda n: progress.advance(task, n * 500))
        progress.update(task, description="messages")
        with process() as server:
            found["memory"] = await memory(server, options.messages, lambda n: progress.advance(task, n))
    return found


def full(found: dict[str, Any]) -> str:
    """All figures."""
    facts, rows, starts = found["facts"], found["memory"]["rows"], found["cycles"]["rows"]
    tenth = next(row for row in rows if row["messages"] * 10 >= rows[-1]["messages"])
    held = ("objects", "files", "threads", "tasks")
    there = ("connections", "keys", "consumers", "members")
    shown = ("files", "threads", "tasks", "back_seconds")
    lines = [
        "# Robustness of the worker",
        "",
        f"Measured with `python -m benchmarks.robust` on {facts['machine']}, Python {facts['python']}.",
        "",
        "## Memory over many messages",
        "",
        f"One process publishes {found['memory']['count']:,} messages of about 180 bytes and handles each twice, in a",
        "group of single messages and one of batches. Objects are those that Python's collector tracks.",
        "",
        *table(
            ("messages", "worker, MiB", *held, "server, MiB"),
            [(row["messages"], mib(row["rss"]), *(row[name] for name in held), mib(row["server"])) for row in rows],
        ),
        "",
        f"From a tenth of the messages to all: {mib(rows[-1]['rss'] - tenth['rss']):.1f} MiB, "
        f"{rows[-1]['objects'] - tenth['objects']:,} objects.",
        "",
        "## Starts and stops",
        "",
        "A worker with two groups starts, handles ten messages and stops. Connections include the one that asks.",
        "",
        *table(
            ("cycles", "process, MiB", *held, *there),
            [(row["cycles"], mib(row["rss"]), *(row[name] for name in (*held, *there))) for row in starts],
        ),
        "",
        "## Nothing to do, and an absent server",
        "",
        "CPU of one core, and log lines from INFO on, of a worker with two groups: with an idle "
        "server, with one that is",
        "gone (its socket refuses), with one that is frozen (its socket takes everything and answers nothing).",
        "",
        *table(
            ("server", "CPU, %", "lines a second", "memory, MiB", *shown[:3], "back at work after, s"),
            [
                (state, row["cpu_percent"], row["lines_per_second"], mib(row["rss"]), *(row[name] for name in shown))
                for state, row in found["quiet"].items()
            ],
        ),
        "",
    ]
    return "\n".join(lines)


def short(found: dict[str, Any]) -> str:
    """The section of the page: what is held after a tenth and in the end, and a worker without work."""
    facts, rows, starts, quiet = found["facts"], found["memory"]["rows"], found["cycles"]["rows"], found["quiet"]
    tenth = next(row for row in rows if row["messages"] * 10 >= rows[-1]["messages"])
    held = ("objects", "files", "threads", "tasks")
    kept = [
        *((f"after {row['messages']:,} messages", mib(row["rss"]), *(row[name] for name in held))
          for row in (tenth, rows[-1])),
        *((f"after {row['cycles']:,} starts and stops", mib(row["rss"]), *(row[name] for name in held))
          for row in (starts[0], starts[-1])),
    ]  # fmt: skip
    waits = [(f"server {state}", row["cpu_percent"], row["lines_per_second"], row["back_seconds"])
             for state, row in quiet.items()]  # fmt: skip
    return f"""{chr(10).join(table(("a worker", "memory, MiB", *held), kept))}

{chr(10).join(table(("with nothing to do", "CPU, %", "log lines a second", "at work again after, s"), waits))}

`python -m benchmarks.robust --write`, {facts["date"]}: {facts["machine"]}, Python {facts["python"]} ({SECTION.link}).
"""


SECTION: Final = Section("robustness", short, full)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--write", action="store_true", help="write figures, report and the section of the page")
    options = parser.parse_args()
    found = anyio.run(measure, options)
    print(short(found))
    if options.write:
        SECTION.keep(found)


if __name__ == "__main__":
    main()
