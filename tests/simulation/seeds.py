"""Plays seeds, each in a process of its own, and shrinks one that has failed to the faults that it needs."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import os
import re
import resource
import selectors
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Final

from rsmq.heartbeat import group_watch
from tests.servers import Kind, binary
from tests.simulation import patches
from tests.simulation.clock import real_clock
from tests.simulation.network import Network
from tests.simulation.plan import Plan
from tests.simulation.run import Run, TraceLog
from tests.simulation.server import SimulatedServer
from tests.simulation.threads import WORLD
from tests.simulation.world import Choices, World

LONGEST: Final = 120
"""Real seconds after which a seed counts as hanging; its stack is printed."""
IMPORTED_FIRST: Final = (
    "anyio._backends._asyncio", "cryptography.hazmat.primitives.ciphers.aead", "pydantic.functional_validators",
    "pydantic.json_schema", "pydantic.type_adapter", "rsmq.handler.round_trip", "zstandard",
)  # fmt: skip
"""What most seeds import while they are played: a fifth of the CPU of a short one."""
LONGEST_SHRINK: Final = 180
"""Real seconds after which a story is left as it is: a seed that gets stuck takes long each time."""


@dataclass(frozen=True)
class Outcome:
    """What became of a seed. `made`: the faults and delays that happened, by name. `trace`: its digest.

    `seconds`: of the machine's clock; `cpu`: of the simulation and its server.
    """

    seed: int
    faults: list[str]
    made: list[str]
    summary: str = ""
    virtual: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    commands: int = 0
    trace: str = ""

    def __str__(self) -> str:
        lines = (
            f"seed {self.seed}: {self.virtual:.1f} virtual s in {self.seconds:.2f} s ({self.cpu:.2f} s of CPU), "
            f"{self.commands} commands, {self.summary}, trace {self.trace}"
        )
        return "\n  ".join((lines, *self.faults[:10]))


@dataclass(frozen=True)
class Task:
    """A seed to play: on which kind of server, with which deviations only (all of them if it is None), and where its
    trace is written.
    """

    seed: int
    plan: Plan
    kind: Kind = "valkey-8.1"
    only: frozenset[str] | None = None
    trace: Path | None = None


def cpu_seconds() -> float:
    """What this process and its children, which have ended, have used."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def simulate(task: Task) -> Outcome:
    """Play one seed in this process, which is good for nothing else afterwards."""
    gc.disable()  # a seed needs little memory, and its process ends with it
    path = str(binary(task.kind))
    directory = tempfile.mkdtemp(prefix="rsmq-simulation-")
    os.chdir(directory)
    server = SimulatedServer(path)
    server.start()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    started = real_clock()
    world = World(Choices(task.seed, task.only))
    network = Network(world, server.address, server.clock)
    network.ask("DEBUG", "SET-ACTIVE-EXPIRE", "0")
    WORLD.append(world)
    patches.begin(task.seed)
    plan = task.plan.varied(world.choices)
    group_watch.WATCHERS = plan.watchers
    world.note(f"{plan}")
    network.noise = plan.noise
    log = logging.getLogger("rsmq")
    log.handlers, log.propagate = [TraceLog(world)], False
    log.setLevel(logging.DEBUG)
    try:
        run = Run(plan, world, network)
        log.addHandler(run.expiries)
        run.play()
        faults = run.findings()
    finally:
        WORLD.clear()
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
        if task.trace:
            task.trace.write_text("\n".join(world.trace) + "\n")
    return Outcome(
        task.seed, faults, world.choices.made, run.summary, world.now, real_clock() - started, cpu_seconds(),
        network.commands, world.fingerprint(),
    )  # fmt: skip


def _begin(task: Task) -> tuple[IO[str], int]:
    """Play it in a child process, which has its own copy of everything; the outcome arrives in the pipe."""
    binary(task.kind)  # imports, as the next lines do, what each child would have to import again
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    receiving, sending = os.pipe()
    child = os.fork()
    if child:
        os.close(sending)
        return os.fdopen(receiving), child
    try:
        found = json.dumps(asdict(simulate(task)))
        with os.fdopen(sending, "w") as pipe:
            pipe.write(found)
    except BaseException:
        traceback.print_exc()
        os._exit(2)
    os._exit(0)


def outcomes(tasks: Iterable[Task], jobs: int = 1) -> Iterator[Outcome]:
    """The outcomes, in the order in which they are done, `jobs` at a time."""
    waiting, running = iter(tasks), selectors.DefaultSelector()
    while True:
        while len(running.get_map()) < jobs and (task := next(waiting, None)):
            pipe, child = _begin(task)
            running.register(pipe, selectors.EVENT_READ, (task, child))
        if not running.get_map():
            return
        for key, _ in running.select():
            running.unregister(key.fileobj)
            task, child = key.data
            with key.fileobj as pipe:  # type: ignore[union-attr]
                answer = pipe.read()
            _, status = os.waitpid(child, 0)
            if answer:
                yield Outcome(**json.loads(answer))
            else:  # 1: of `faulthandler`, after LONGEST
                is_hanging = os.waitstatus_to_exitcode(status) == 1
                yield Outcome(task.seed, ["a call does not end" if is_hanging else "the simulation itself failed"], [])


def kind_of(fault: str) -> str:
    """What is broken, without names and numbers."""
    before = ""
    while fault != before:
        before, fault = fault, re.sub(r"\([^()]*\)", "", fault)
    return re.sub(r"\d[\d.-]*", "#", fault)


def shrink(task: Task, found: Outcome, seconds: float = LONGEST_SHRINK) -> Outcome:
    """The same kind of failure with as few deviations as possible, as far as `seconds` suffice.

    Only what happened before is allowed, so that nothing new takes the place of what is left out. First without the
    delays, then without what came after the failure, then without ever smaller blocks, until each one is needed.
    """
    kind, best, until = kind_of(found.faults[0]), found, real_clock() + seconds

    def suffices(names: Iterable[str]) -> bool:
        nonlocal best
        again = play(replace(task, only=frozenset(names)))
        if len(again.made) >= len(best.made) or all(kind_of(fault) != kind for fault in again.faults):
            return False
        best = again
        return True

    suffices([name for name in best.made if not name.startswith("slow: ")])
    low, high = 0, len(best.made)
    while low < high:
        middle = (low + high) // 2
        if suffices(best.made[:middle]):
            high = len(best.made)
        else:
            low = middle + 1
    size = len(best.made)
    while size and real_clock() < until:
        size, before = (size + 1) // 2, len(best.made)
        at = before
        while at > 0 and real_clock() < until:
            at = min(at, len(best.made)) - size
            suffices([*best.made[: max(at, 0)], *best.made[max(at, 0) + size :]])
        if size == 1 and len(best.made) == before:
            break
    return best


def play(task: Task) -> Outcome:
    """The outcome of one seed."""
    return next(outcomes([task]))
