"""`python -m benchmarks.look [MESSAGES]`: how long `broker.look` takes among so many, with the key and without.

On a throw-away server in memory: 10 million messages need about 600 MB there.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Final

from rsmq import Broker, MessageRef, Settings
from rsmq.testing.server import ThrowawayServer

AT_ONCE: Final = 100_000
LOOKS: Final = 100
KEYS: Final = 1000


async def measure(messages: int) -> None:
    """Publish as fast as possible, so that as many messages as possible are of one second, and look for some."""
    with ThrowawayServer() as server:
        async with Broker(Settings(url=server.url, preflight="warn")) as broker:
            found, started = list[tuple[str, MessageRef]](), time.perf_counter()
            for first in range(0, messages, AT_ONCE):
                count = min(AT_ONCE, messages - first)
                refs = await broker.publish_many("t", range(first, first + count), key=lambda n: f"k{n % KEYS}")
                found += [(f"k{(first + at) % KEYS}", refs[at]) for at in random.sample(range(count), min(count, 10))]
            seconds = time.perf_counter() - started
            print(f"{messages} messages in 8 partitions, published at {messages / seconds:.0f} a second")
            for has_key in (True, False):
                took = list[float]()
                for key, ref in random.sample(found, min(len(found), LOOKS)):
                    began = time.perf_counter()
                    status = await broker.look(str(ref), topic="t", key=key if has_key else None)
                    took.append(time.perf_counter() - began)
                    assert status.state == "stored", status
                how = "with the key" if has_key else "without"
                print(f"{how}: median {statistics.median(took):.3f} s, longest {max(took):.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.look", description=__doc__)
    parser.add_argument("messages", nargs="?", type=int, default=10_000_000)
    asyncio.run(measure(parser.parse_args().messages))
