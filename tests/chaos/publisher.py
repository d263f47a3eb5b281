"""A publisher process of the chaos tests: `python -m tests.chaos.publisher '<Errand as JSON>'`.

Publishes numbered messages until SIGTERM, and writes before and after each call what it knows.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rsmq import Broker, BrokerError, PublishUnknown
from tests.chaos.ledger import Pen
from tests.chaos.worker import TOPIC, Job


@dataclass(frozen=True, slots=True)
class Errand:
    """What a publisher is told: whom it serves, how many messages a call has, seconds between calls, with a `delay`."""

    job: Job
    many: int = 100
    pause: float = 0.02
    keys: int = 10
    seed: int = 1
    handler_seconds: float = 0.001
    more: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """The errand as the argument of a process."""
        return json.dumps(asdict(self))


async def main(errand: Errand) -> None:
    """Publish until SIGTERM."""
    pen, dice, count = Pen(Path(errand.job.ledger)), random.Random(errand.seed), dict[str, int]()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with Broker(errand.job.settings()) as broker:
        pen.note("ready")
        while not ended.is_set():
            names = []
            for _ in range(errand.many):
                key = f"p{os.getpid()}-{dice.randrange(errand.keys)}"
                names.append((key, count.setdefault(key, 0)))
                count[key] += 1
            pen.note_all("try", names)
            pen.note_all(await publish(broker, errand, names), names)
            await asyncio.sleep(errand.pause)
    pen.note("bye")


async def publish(broker: Broker, errand: Errand, names: list[tuple[str, int]]) -> str:
    """One call; returns what is known of all its messages."""
    orders = [{"key": key, "n": n, "seconds": errand.handler_seconds} for key, n in names]
    try:
        if errand.many == 1:
            await broker.publish(TOPIC, orders[0], key=names[0][0])
        else:
            await broker.publish_many(TOPIC, orders, key=lambda order: str(order["key"]))
    except PublishUnknown:
        return "try"
    except BrokerError:
        return "refused" if errand.many == 1 else "try"  # of many messages some may be stored
    return "ok"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(Errand(**{**given, "job": Job(**given["job"])})))
