"""A worker process of the chaos tests: `python -m tests.chaos.worker '<Job as JSON>'`.

The message says what its handler does; the handler writes what it did into the ledger.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import anyio
from tenacity import wait_fixed

import rsmq.worker
from rsmq import Broker, Message, RetryPolicy, Settings
from tests.chaos.ledger import Pen
from tests.chaos.notary import Notary, swear_in

TOPIC, GROUP = "work", "crew"
LEDGER = "CHAOS_LEDGER"
"""Environment: where a handler in a process of its own finds the ledger."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told. Times in seconds; `more` are further settings, as the environment would give them.

    `cycles`: start and stop the broker so often before serving. `member`: instead of an id unique per boot.
    `limit`: most descriptors, beyond those open when it serves. `log`: a file instead of standard error.
    """

    url: str
    prefix: str
    ledger: str
    lease: float = 2.0
    block: float = 0.5
    distribution: Literal["hash", "shared"] = "hash"
    ordering: Literal["key", "none"] | None = None
    attempts: int = 5
    timeout: float | None = None
    concurrency: int = 16
    prefetch: int = 2000
    execution: Literal["inline", "process"] = "inline"
    stop_grace: float = 25.0
    cycles: int = 0
    member: str = ""
    log: str = ""
    more: dict[str, str] = field(default_factory=dict)

    def settings(self) -> Settings:
        """The settings of every process of a scene."""
        given = {"preflight": "warn", **self.more}
        return Settings(
            url=self.url,
            prefix=self.prefix,
            lease_ttl=timedelta(seconds=self.lease),
            block=timedelta(seconds=self.block),
            prefetch=self.prefetch,
            stop_grace=timedelta(seconds=self.stop_grace),
            **given,
        )

    def line(self) -> str:
        """The job as the argument of a process."""
        return json.dumps(asdict(self))


async def act(order: dict[str, object], message: Message) -> None:
    """What the message says: `exit` ends the process, `block` holds the event loop, `hang` never ends, ..."""
    seconds = float(str(order.get("seconds", 0)))
    match order.get("do", "work"):
        case "exit":
            os._exit(1)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "block":
            time.sleep(seconds)  # noqa: ASYNC251 - the fault under test
        case "hold the GIL" if message.attempt == 1:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # as a bad regular expression does: no thread runs either
        case "hang":
            await anyio.sleep_forever()
        case "wait":
            while not Path(str(order["path"])).exists():
                await asyncio.sleep(0.02)
        case "swallow":
            await swallow(seconds)
        case "raise":
            raise ValueError("every attempt fails")
        case "fail once" if message.attempt == 1:
            raise ValueError("the first attempt fails")
        case "hang once" if message.attempt == 1:
            await anyio.sleep_forever()
        case _:
            await asyncio.sleep(seconds)


async def swallow(seconds: float) -> None:
    """A handler that takes no cancellation, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BaseException):
            await asyncio.sleep(end - time.monotonic())


def make_broker(job: Job, pen: Pen) -> Broker:
    """A broker whose only handler keeps the ledger."""
    broker = Broker(job.settings())

    async def handle(order: dict[str, object], message: Message) -> None:
        key, n = str(order["key"]), int(str(order["n"]))
        Notary.names[message.partition, message.entry_id] = (key, n)
        pen.note("start", key, n, message.attempt)
        try:
            await act(order, message)
        except BaseException:
            pen.note("fail", key, n, message.attempt)
            raise
        pen.note("commit", key, n, message.attempt)

    broker.handler(
        TOPIC,
        group=GROUP,
        concurrency=job.concurrency,
        distribution=job.distribution,
        ordering=job.ordering,
        retry=RetryPolicy(max_attempts=job.attempts, wait=wait_fixed(0.1)),
        timeout=job.timeout,
        execution=None if job.execution == "inline" else job.execution,
    )(handle if job.execution == "inline" else handle_apart)
    return broker


def handle_apart(order: dict[str, object]) -> None:
    """The handler of `execution="process"`: what holds the GIL there stops nobody else."""
    pen = Pen(Path(os.environ[LEDGER]))
    key, n = str(order["key"]), int(str(order["n"]))
    pen.note("start", key, n)
    seconds = float(str(order.get("seconds", 0)))
    (ctypes.PyDLL(None).usleep if order.get("do") == "hold the GIL" else ctypes.CDLL(None).usleep)(int(seconds * 1e6))
    pen.note("commit", key, n)


def descriptors() -> int:
    """Open file descriptors of this process, without the one that counts them."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - 1


def limit_descriptors(room: int) -> None:
    """From now on at most so many more may be open. Negative: as many as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if room < 0 else descriptors() + room, hard))


async def serve(job: Job, pen: Pen) -> None:
    """Serve until SIGTERM. SIGUSR1 takes all free file descriptors away, SIGUSR2 gives them back."""
    broker = make_broker(job, pen)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, broker.stop)
    loop.add_signal_handler(signal.SIGUSR1, limit_descriptors, 0)
    loop.add_signal_handler(signal.SIGUSR2, limit_descriptors, -1)
    for _ in range(job.cycles):
        async with broker.running():
            await asyncio.sleep(0.03)
    async with anyio.create_task_group() as tasks:
        await tasks.start(broker.run)
        pen.note("ready")


def main(job: Job) -> None:
    """Serve, and count what is left open at the end."""
    os.environ[LEDGER] = job.ledger
    pen = Pen(Path(job.ledger))
    swear_in(pen)
    if job.member:
        rsmq.worker.new_member_id = lambda: job.member
    before = descriptors()
    asyncio.run(serve(job, pen))
    deadline = time.monotonic() + 5
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread of the heartbeat may still wait for its last answer
    pen.note("bye", n=descriptors() - before)


if __name__ == "__main__":
    given = Job(**json.loads(sys.argv[1]))
    to = {"filename": given.log} if given.log else {}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s", **to)
    with suppress(KeyboardInterrupt):
        main(given)
