"""What it costs a router that clients subscribe all the time: `python -m benchmarks.lookups`.

Messages come in batches, to names of which each has one subscriber and which the router has met before. Between the
batches other clients subscribe to names of their own, so the marks of their shards change, and the names of the next
batch are looked up there again. Figures are CPU time for each message, less what the same subscriptions cost alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Final

from benchmarks.server import ServerMeter, server
from benchmarks.subscriptions import MANY, PREFIX, fill, list_of
from rsmq import Broker, Settings
from rsmq.gateway.fleet.registry import Registry
from rsmq.redis.client.script_batcher import ScriptBatcher

CLIENTS: Final = 100_000
KNOWN: Final = 10_000
"""Names that messages go to."""
MESSAGES: Final = 16_384
BATCHES: Final = (4, 16, 64, 256)
RATIOS: Final = (0.0, 0.025, 0.25)
"""Subscriptions for each message: none, a tenth of a fleet's restart, and 1 000 a second beside 4 000 messages."""


class Fleet:
    """Clients that subscribe, each to a new name."""

    def __init__(self, broker: Broker) -> None:
        self._batcher = ScriptBatcher(broker.client)
        self._registry = Registry(broker.client, broker.keys, self._batcher)
        self._running = asyncio.create_task(self._batcher.run())
        self._left, self._number = 0.0, 0

    async def subscribe(self, number: float) -> None:
        """So many; a part of one is kept for the next call."""
        self._left += number
        due, self._left = int(self._left), self._left % 1
        names = [f"late-{self._number + each:07d}" for each in range(due)]
        self._number += due
        if names:
            await asyncio.gather(*(self._registry.write(each, "1", list_of(each)) for each in names))

    async def end(self) -> None:
        """Stop."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


async def run(url: str, meter: ServerMeter, batch: int, ratio: float, *, reads: bool) -> tuple[float, float, float]:
    """CPU µs of the router and of the server, and lookups, for each message."""
    meter.start(empty=True)
    async with Broker(Settings(url=url, prefix=PREFIX, preflight="warn")) as broker:
        await fill(broker, CLIENTS)
        registry, fleet = Registry(broker.client, broker.keys, ScriptBatcher(broker.client)), Fleet(broker)
        names = [f"cmd/device-{number:07d}" for number in range(KNOWN)]
        for at in range(0, KNOWN, MANY):
            await registry.look(names[at : at + MANY])
        await fleet.subscribe(1)
        chosen, spent, before = random.Random(1), 0.0, registry.lookups
        meter.start()
        for _ in range(MESSAGES // batch):
            await fleet.subscribe(batch * ratio)
            wanted = chosen.choices(names, k=batch)
            if reads:
                begun = time.process_time()
                await registry.look(wanted)
                spent += time.process_time() - begun
        of_server = meter.cpu_us
        await fleet.end()
        return spent * 1e6 / MESSAGES, of_server / MESSAGES, (registry.lookups - before) / MESSAGES


async def main() -> None:
    """Print a row for each size of a batch and each number of subscriptions."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| messages a batch | subscriptions a message | lookups a message | router, µs | server, µs |")
    print("|--:|--:|--:|--:|--:|")
    with server() as url:
        meter = ServerMeter(url)
        for batch in BATCHES:
            for ratio in RATIOS:
                router, both, lookups = await run(url, meter, batch, ratio, reads=True)
                _, writes, _ = await run(url, meter, batch, ratio, reads=False)
                print(f"| {batch} | {ratio} | {lookups:.1f} | {router:.1f} | {both - writes:.1f} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
