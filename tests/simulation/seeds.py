"""Plays seeds, each in a process of its own, and shrinks one that has failed to the faults that it needs."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import resource
import selectors
import shutil
import tempfile
import traceback
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Final

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
    """A seed to play: on which kind of server, without which deviations or with which only (all of them if it is None),
    and where its trace is written.
    """

    seed: int
    plan: Plan
    kind: Kind = "valkey-8.1"
    left_out: frozenset[str] = frozenset()
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
    world = World(Choices(task.seed, task.left_out, task.only))
    network = Network(world, server.address, server.clock)
    network.ask("DEBUG", "SET-ACTIVE-EXPIRE", "0")
    WORLD.append(world)
    patches.begin(task.seed)
    plan = task.plan.varied(world.choices)
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
    binary(task.kind)  # imports what each child would have to import again
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
            os.waitpid(child, 0)
            yield Outcome(**json.loads(answer)) if answer else Outcome(task.seed, ["the simulation itself failed"], [])


def shrink(task: Task, found: Outcome, seconds: float = LONGEST_SHRINK) -> Outcome:
    """The same kind of failure with as few deviations as possible, as far as `seconds` suffice."""
    kind, best = found.faults[0].split("(")[0], found
    left_out, until = frozenset[str](), real_clock() + seconds
    noise = frozenset(name for name in found.made if name.startswith("slow: "))
    if noise:
        again = play(task, noise)
        if any(fault.startswith(kind) for fault in again.faults):
            left_out, best = noise, again
    size = len(best.made)
    while size:
        size //= 2
        at = 0
        while size and at < len(best.made) and real_clock() < until:
            tried = left_out | set(best.made[at : at + size])
            again = play(task, tried)
            if any(fault.startswith(kind) for fault in again.faults):
                left_out, best = tried, again
            else:
                at += size
    return play(task, left_out)


def play(task: Task, left_out: Collection[str] = ()) -> Outcome:
    """The outcome of one seed without some deviations."""
    return next(outcomes([replace(task, left_out=frozenset(left_out))]))
