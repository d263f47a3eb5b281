"""A worker process of the chaos tests: `python -m tests.chaos.worker '<Job as JSON>'`.

The message says what its handler does; the handler writes what it did into the ledger.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import anyio
from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy, Settings
from tests.chaos.ledger import Pen

TOPIC, GROUP = "work", "crew"


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told. Times in seconds."""

    url: str
    prefix: str
    ledger: str
    lease: float = 2.0
    block: float = 0.5
    distribution: Literal["hash", "shared"] = "hash"
    attempts: int = 5
    timeout: float | None = None
    concurrency: int = 16
    prefetch: int = 2000

    def settings(self) -> Settings:
        """The settings of every process of a scene."""
        return Settings(
            url=self.url,
            prefix=self.prefix,
            lease_ttl=timedelta(seconds=self.lease),
            block=timedelta(seconds=self.block),
            prefetch=self.prefetch,
            preflight="warn",
        )

    def line(self) -> str:
        """The job as the argument of a process."""
        return json.dumps(asdict(self))


async def act(order: dict[str, object], message: Message) -> None:
    """What the message says: `exit` ends the process, `block` holds the event loop, `hang` never ends."""
    seconds = float(str(order.get("seconds", 0)))
    match order.get("do", "work"):
        case "exit":
            os._exit(1)
        case "block":
            time.sleep(seconds)  # noqa: ASYNC251 - the fault under test
        case "hang":
            await anyio.sleep_forever()
        case "fail once" if message.attempt == 1:
            raise ValueError("the first attempt fails")
        case "hang once" if message.attempt == 1:
            await anyio.sleep_forever()
        case _:
            await asyncio.sleep(seconds)


def make_broker(job: Job, pen: Pen) -> Broker:
    """A broker whose only handler keeps the ledger."""
    broker = Broker(job.settings())

    @broker.handler(
        TOPIC,
        group=GROUP,
        concurrency=job.concurrency,
        distribution=job.distribution,
        retry=RetryPolicy(max_attempts=job.attempts, wait=wait_fixed(0.1)),
        timeout=job.timeout,
    )
    async def handle(order: dict[str, object], message: Message) -> None:
        key, n = str(order["key"]), int(str(order["n"]))
        pen.note("start", key, n, message.attempt)
        await act(order, message)
        pen.note("commit", key, n, message.attempt)

    return broker


async def main(job: Job) -> None:
    """Serve until SIGTERM."""
    pen = Pen(Path(job.ledger))
    broker = make_broker(job, pen)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, broker.stop)
    async with anyio.create_task_group() as tasks:
        await tasks.start(broker.run)
        pen.note("ready")
    pen.note("bye")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    with suppress(KeyboardInterrupt):
        asyncio.run(main(Job(**json.loads(sys.argv[1]))))
