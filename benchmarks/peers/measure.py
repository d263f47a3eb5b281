"""One system measured: publishing, one worker, two workers, latency. Runs outside the peer and asks it nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Entry
from benchmarks.peers.environment import ROOT, Environment, Unavailable
from benchmarks.peers.servers import Server
from benchmarks.peers.system import HEADER, WARM_UP, Options

START_SECONDS = 60.0
STALLED_SECONDS = 20.0
"""Without a message for so long, a measurement has failed."""
LONGEST_SECONDS = 180.0
SETTLE_SECONDS = 0.2
"""For the last acknowledgements, and for the worker's last sample of its CPU time."""
Result = dict[str, Any]
HEADER_SIZE = HEADER.size


class Failed(Exception):
    """A system did not do its work; the text says which and what it last complained of."""


@dataclass(frozen=True)
class Handled:
    """What the workers of one directory have marked."""

    ids: int
    total: int
    processes: int
    first: float
    last: float
    cpu: float

    def figures(self) -> Result:
        """For the page: CPU microseconds a message, messages a second between the first and the last."""
        return {
            "cpu_us": self.cpu / self.total * 1e6,
            "rate": (self.total - 1) / max(self.last - self.first, 1e-9),
            "handled": self.ids,
            "repeated": self.total - self.ids,
            "processes": self.processes,
        }


class Bench:
    """One system in its environment on one server. Every call has a directory of its own for marks and signals."""

    def __init__(self, entry: Entry, environment: Environment, server: Server) -> None:
        self.entry, self.environment, self.server = entry, environment, server

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Where the processes of one measurement meet."""
        with tempfile.TemporaryDirectory(prefix="bench") as name:
            yield Path(name)

    @contextmanager
    def process(self, directory: Path, role: str, count: int, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """A process of the peer, ended with all its children when the block ends."""
        options = Options(role, self.server.url, str(directory), count, variant=self.entry.variant, **more)
        command = [self.environment.python, "-m", self.entry.script, json.dumps(asdict(options))]
        variables = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": ""}
        with (directory / "errors").open("a") as errors:
            process = subprocess.Popen(
                command, cwd=directory, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            end(process)

    def call(self, directory: Path, role: str, count: int, **more: Any) -> Result:
        """A publisher: start it, wait for it, return its figures. Raises Failed."""
        with self.process(directory, role, count, **more) as process:
            try:
                output, _ = process.communicate(timeout=LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                raise Failed(f"publishing took longer than {LONGEST_SECONDS:g} s{complaint(directory)}") from None
            if process.returncode:
                raise_for(directory, "publishing failed")
            lines = output.splitlines()
            result: Result = json.loads(lines[-1]) if lines else {}
            return result

    @contextmanager
    def worker(self, directory: Path, count: int, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """A worker that has imported everything and waits for `go`."""
        with self.process(directory, "work", count, **more) as process:
            ready = directory / f"ready.{process.pid}"
            wait_for(ready.exists, START_SECONDS, lambda: raise_for(directory, "the worker did not start"), process)
            yield process

    def publish_and_consume(self, role: str, count: int, workers: int) -> Result:
        """Publish by one role, then handle all with so many worker processes. Raises Failed."""
        with self.directory() as directory, contextlib.ExitStack() as stack:
            self.server.empty()
            before = self.server.cost()
            published = self.call(directory, role, count)
            published |= self.server.cost().since(before, count)
            for _ in range(workers):
                stack.enter_context(self.worker(directory, count))
            before = self.server.cost()
            (directory / "go").touch()
            handled = self.finish(directory, count)
            consumed = handled.figures() | self.server.cost().since(before, count)
        return {"publish": published, "consume": consumed}

    def finish(self, directory: Path, count: int) -> Handled:
        """Wait until every id was handled. Raises Failed where nothing goes on any more."""
        deadline, seen, moved = time.monotonic() + LONGEST_SECONDS, 0, time.monotonic()
        while (handled := read_marks(directory, count)).ids < count:
            now = time.monotonic()
            if handled.ids > seen:
                seen, moved = handled.ids, now
            if now > deadline or now - moved > STALLED_SECONDS:
                raise_for(directory, f"{handled.ids} of {count} messages were handled, then no more")
            time.sleep(0.02)
        time.sleep(SETTLE_SECONDS)
        return read_marks(directory, count)

    def latency(self, seconds: float) -> Result:
        """From before publish to the handler, 200 messages a second, one worker. Milliseconds."""
        count = WARM_UP + int(200 * seconds)
        with self.directory() as directory:
            self.server.empty()
            with self.worker(directory, count, prepares=True):
                (directory / "go").touch()
                time.sleep(1.0)
                self.call(directory, "trickle", count)
                self.finish(directory, count)
            delays = [float(line) * 1000 for path in directory.glob("delays.*") for line in path.open()]
        if not delays:
            raise Failed("no latency was noted")
        return {
            "p50_ms": percentile(delays, 0.5),
            "p99_ms": percentile(delays, 0.99),
            "max_ms": max(delays),
            "samples": len(delays),
        }


def read_marks(directory: Path, count: int) -> Handled:
    """Add up what all worker processes of a directory have marked so far."""
    total, processes, union = 0, 0, 0
    first, last, cpu = math.inf, 0.0, 0.0
    for path in directory.glob("marks.*"):
        data = path.read_bytes()
        begun, latest, cpu_before, cpu_now = HEADER.unpack_from(data)
        marks = data[HEADER.size :]
        ids, once = count - marks.count(0), marks.count(1)
        total += ids if ids == once else sum(marks)
        union |= int.from_bytes(marks.translate(ONES), "little")
        processes += 1
        if latest:  # the first sample was taken
            first, last, cpu = min(first, begun), max(last, latest), cpu + cpu_now - cpu_before
    return Handled(union.bit_count(), total, processes, first, last, cpu)


ONES = bytes([0]) + bytes([1]) * 255
"""However often: once."""


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all are not above."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def wait_for(
    condition: Callable[[], bool], seconds: float, give_up: Callable[[], None], process: subprocess.Popen[str]
) -> None:
    """Wait for something a process will do; `give_up` raises when it is dead or too slow."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            give_up()
        time.sleep(0.01)


def end(process: subprocess.Popen[str]) -> None:
    """Terminate, wait two seconds, kill the whole group."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


def complaint(directory: Path) -> str:
    """The last line its processes wrote to standard error."""
    path = directory / "errors"
    lines = (
        [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if path.exists()
        else []
    )
    return f": {lines[-1][:300]}" if lines else ""


def raise_for(directory: Path, what: str) -> None:
    """Raise Unavailable where the system said that it cannot run here, Failed otherwise."""
    said = complaint(directory)
    if "Unavailable: " in said:
        raise Unavailable(said.partition("Unavailable: ")[2])
    raise Failed(what + said)
