"""`python -m tests.bench.probe URL`: short rounds of every trial in turn, as JSON. A process that nothing traces."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict

import anyio

from rsmq.bench.load import Load
from rsmq.bench.run import run
from rsmq.connect import Connector
from rsmq.settings import Settings

ROUNDS, MESSAGES = 5, 5_000


async def probe(url: str) -> None:
    """Measure and print: name -> a list of costs, one a round."""
    client = Connector(url, Settings(url=url)).client()
    taken = await run(client, Load(url, "", MESSAGES), rounds=ROUNDS)
    await client.aclose()
    print(json.dumps({name: [asdict(cost) for cost in costs] for name, costs in taken.items()}))


if __name__ == "__main__":
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    anyio.run(probe, sys.argv[1])
