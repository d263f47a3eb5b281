"""Short rounds of every trial in turn, as JSON: `python -m tests.benchmarks.probe URL`, a process without coverage."""

from __future__ import annotations

import gc
import json
import logging
import sys
from dataclasses import asdict

import anyio

from rsmq.cli.bench.load import BenchLoad
from rsmq.cli.bench.run import run
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector

ROUNDS, MESSAGES = 4, 5_000


def settle(_: str) -> None:
    """Before each trial: what was imported is not collected again.

    A full collection of it costs 50 ms of CPU and always came in the same trial of each round: 10 us a message.
    """
    gc.collect()
    gc.freeze()


async def probe(url: str) -> None:
    """Measure and print: name -> a list of costs, one a round."""
    client = Connector(url, Settings(url=url)).client()
    taken = await run(client, BenchLoad(url, "", MESSAGES), rounds=ROUNDS, step=settle)
    await client.aclose()
    print(json.dumps({name: [asdict(cost) for cost in costs] for name, costs in taken.items()}))


if __name__ == "__main__":
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    anyio.run(probe, sys.argv[1])
