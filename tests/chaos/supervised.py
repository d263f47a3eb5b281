"""Workers as children of a supervisor: `python -m tests.chaos.supervised '<SupervisedJob as JSON>'`.

The children are real ones: `rsmq worker tests.chaos.supervised:broker --child`. The parent can be a wrong one, which
says over and over that children have ended that run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import anyio

from rsmq import Broker
from rsmq.worker.supervisor import ENDED, Supervisor
from tests.chaos.ledger import EventWriter
from tests.chaos.recorder import install
from tests.chaos.worker import Job, make_broker

JOB = "CHAOS_JOB"
"""Environment variable with the job of the children, as JSON."""


@dataclass(frozen=True, slots=True)
class SupervisedJob:
    """What the parent does. `lies`: it says every 20 ms that each child has ended."""

    module: ClassVar[str] = "tests.chaos.supervised"
    job: Job
    processes: int
    lies: bool


def serving_broker(job: Job) -> Broker:
    """The broker of a child, which notes in the ledger when it serves."""
    ledger = EventWriter(Path(job.ledger))
    install(ledger)
    broker, _ = make_broker(job, ledger)

    async def note_ready() -> None:
        while broker.worker is None or not broker.worker.is_serving:
            await anyio.sleep(0.01)
        ledger.note("ready")

    @broker.lifespan
    @asynccontextmanager
    async def noting() -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note_ready)
            yield
            tasks.cancel_scope.cancel()

    return broker


broker = serving_broker(Job(**json.loads(os.environ[JOB]))) if JOB in os.environ else None


async def lie(supervisor: Supervisor) -> None:
    """Say to every child that the others have ended."""
    while True:
        children = list(supervisor._children.values())
        for child in children:
            for other in children:
                if other.member:
                    child.write(b"%b %b" % (ENDED, other.member))
        await anyio.sleep(0.02)


async def main(processes: int, *, lies: bool) -> int:
    """Supervise until a signal."""
    command = [sys.executable, "-m", "rsmq", "worker", "tests.chaos.supervised:broker", "--child"]
    supervisor = Supervisor(command, processes)
    async with anyio.create_task_group() as tasks:
        if lies:
            tasks.start_soon(lie, supervisor)
        code = await supervisor.run()
        tasks.cancel_scope.cancel()
    return code


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ[JOB] = json.dumps(asdict(Job(**given["job"])))
    sys.exit(anyio.run(lambda: main(given["processes"], lies=given["lies"])))
