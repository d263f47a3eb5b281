"""A publisher process of the chaos tests: `python -m tests.chaos.publisher '<PublisherJob as JSON>'`.

It publishes numbered messages until SIGTERM and records each call in the ledger, before and after.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rsmq import Broker, BrokerError, PublishUnknown
from tests.chaos.ledger import EventWriter, What
from tests.chaos.worker import TOPIC, Job


@dataclass(frozen=True, slots=True)
class PublisherJob:
    """What a publisher does: for which workers, with how many messages a call, and how many seconds between calls."""

    module: ClassVar[str] = "tests.chaos.publisher"
    worker: Job
    many: int = 100
    pause: float = 0.02
    keys: int = 10
    seed: int = 1
    handler_seconds: float = 0.001
    more: dict[str, str] = field(default_factory=dict)


async def main(job: PublisherJob) -> None:
    """Publish until SIGTERM."""
    ledger, rng, count = EventWriter(Path(job.worker.ledger)), random.Random(job.seed), dict[str, int]()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with Broker(job.worker.settings()) as broker:
        ledger.note("ready")
        while not ended.is_set():
            names = []
            for _ in range(job.many):
                key = f"p{os.getpid()}-{rng.randrange(job.keys)}"
                names.append((key, count.setdefault(key, 0)))
                count[key] += 1
            ledger.note_all("try", names)
            ledger.note_all(await publish(broker, job, names), names)
            await asyncio.sleep(job.pause)
    ledger.note("bye")


async def publish(broker: Broker, job: PublisherJob, names: list[tuple[str, int]]) -> What:
    """One call; returns what is known of all its messages."""
    orders = [{"key": key, "n": n, "seconds": job.handler_seconds} for key, n in names]
    try:
        if job.many == 1:
            await broker.publish(TOPIC, orders[0], key=names[0][0])
        else:
            await broker.publish_many(TOPIC, orders, key=lambda order: str(order["key"]))
    except PublishUnknown:
        return "try"
    except BrokerError:
        return "refused" if job.many == 1 else "try"  # of many messages some may be stored
    return "ok"


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    asyncio.run(main(PublisherJob(**{**arguments, "worker": Job(**arguments["worker"])})))
