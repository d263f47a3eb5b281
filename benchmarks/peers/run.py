"""One run over all systems: install, measure round by round, then let workers be killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from benchmarks.peers.catalogue import Entry
from benchmarks.peers.environment import ROOT, Environment, Unavailable
from benchmarks.peers.measure import Bench, Failed, Result
from benchmarks.peers.recovery import recover
from benchmarks.peers.servers import Server, redis_server, server_for
from rsmq.errors import RsmqError

LEAST = 500
"""Messages in the smallest measurement."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    scale: float
    """Of the messages the catalogue names."""
    latency: float
    """Seconds of it in each round."""
    limit: float
    """Seconds after which a recovery is not waited for."""
    recoveries: tuple[str, ...] | None
    """Systems whose recovery is measured; None is all."""
    parallel: int = 5
    """Recoveries at once: they mostly wait, and each has a server of its own."""
    budget: float | None = None
    """Seconds of measuring after which no other system is begun."""


FULL = Plan(rounds=3, scale=1.0, latency=4.0, limit=120.0, recoveries=None)
QUICK = Plan(
    rounds=1,
    scale=0.2,
    latency=1.0,
    limit=30.0,
    parallel=6,
    budget=190.0,
    recoveries=("rsmq", "nats", "faststream", "taskiq", "blitzq", "bullmq"),
)


class Run:
    """One run: its systems, its results so far, and the progress it shows."""

    def __init__(self, entries: list[Entry], plan: Plan, progress: Progress) -> None:
        self.entries, self.plan = entries, plan
        self._progress = progress
        self._environments = {entry.name: Environment(entry) for entry in entries}
        self.results: dict[str, Result] = {
            entry.name: {"rounds": [], "latency": [], "recovery": {}} for entry in entries
        }
        self.server_name = ""

    def go(self) -> None:
        """Install, measure round by round, then all recoveries."""
        self._install()
        with redis_server() as shared:
            self.server_name = shared.name
            self._measure_all(shared)
        self._recover_all()

    def _measure_all(self, shared: Server) -> None:
        began = time.monotonic()
        with self._task("measuring", self.plan.rounds * len(self._running())) as advance:
            for _ in range(self.plan.rounds):
                for entry in self._running():
                    advance(entry.title)
                    if self.plan.budget and time.monotonic() - began > self.plan.budget:
                        self.results[entry.name]["reason"] = f"the {self.plan.budget:g} s of a short run were over"
                    else:
                        self._measure(entry, shared)

    def _recover_all(self) -> None:
        wanted = self.plan.recoveries or tuple(self.results)
        chosen = [each for each in self._running() if each.recovery != "none" and each.name in wanted]
        workers = concurrent.futures.ThreadPoolExecutor(self.plan.parallel)
        with self._task("recoveries", len(chosen)) as advance, workers as pool:
            for entry in pool.map(self._recover, chosen):
                advance(entry.title)

    def _running(self) -> list[Entry]:
        return [entry for entry in self.entries if "reason" not in self.results[entry.name]]

    def _install(self) -> None:
        with self._task("installing", len(self.entries)) as advance:
            for entry in self.entries:
                advance(entry.title)
                with self._reporting(entry):
                    environment = self._environments[entry.name]
                    environment.ensure()
                    about = {"version": environment.version(), "python": environment.python_version}
                    self.results[entry.name] |= about if entry.requirements else about | {"version": "this checkout"}

    def _measure(self, entry: Entry, shared: Server) -> None:
        """One round of one system. Systems with a server of their own get it for the round."""
        environment = self._environments[entry.name]
        with self._reporting(entry), contextlib.ExitStack() as stack:
            server = shared if entry.server == "redis" else stack.enter_context(server_for(entry, environment))
            bench, count = Bench(entry, environment, server), max(LEAST, int(entry.count * self.plan.scale))
            one, two = bench.publish_and_consume("publish", count, 1), bench.publish_and_consume("spread", count, 2)
            self.results[entry.name]["server"] = server.name
            self.results[entry.name]["rounds"].append({"count": count, "one": one, "two": two})
            self.results[entry.name]["latency"].append(bench.latency(self.plan.latency))

    def _recover(self, entry: Entry) -> Entry:
        environment = self._environments[entry.name]
        for name in ("default", "tuned")[: 2 if entry.recovery == "both" else 1]:
            with self._reporting(entry, f"recovery {name}"), server_for(entry, environment) as server:
                bench, tuned = Bench(entry, environment, server), name == "tuned"
                try:
                    done = recover(bench, self.plan.limit, tuned=tuned)
                except Failed:  # several start at the same time, and clients give up connecting: once more
                    done = recover(bench, self.plan.limit, tuned=tuned)
                self.results[entry.name]["recovery"][name] = done
        return entry

    @contextlib.contextmanager
    def _reporting(self, entry: Entry, what: str = "") -> Iterator[None]:
        """A system that fails is reported, not left out; the others go on."""
        try:
            yield
        except (Failed, Unavailable, RsmqError, OSError) as error:
            said = str(error).replace(str(ROOT), "").replace(str(Path.home()), "~")
            self.results[entry.name].setdefault("failures" if what else "reason", {} if what else said)
            if what:
                self.results[entry.name]["failures"][what] = said
            self._progress.console.print(f"[yellow]{entry.title}[/] {what}: {said}")

    @contextlib.contextmanager
    def _task(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        task = self._progress.add_task(title, total=total, now="")
        done = -1

        def advance(now: str) -> None:
            nonlocal done
            done += 1
            self._progress.update(task, completed=max(done, 0), now=now)

        yield advance
        self._progress.update(task, completed=total, now="")
