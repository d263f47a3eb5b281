"""What a member of a batch costs: `python -m benchmarks.batches` prints CPU for each message, published and handled.

In one process: a broker that publishes and a worker that handles. Beside it: plain messages, as many and of the same
payload, in the same run. `publish`: 200 calls at once. The client is this process, the server its own.

What was loaded before is frozen for the garbage collector: it would look through all of it once in a while, for as much
time as a thousand messages cost, in a round of the one or the other. Of the rounds the three cheapest count.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable
from typing import Any, Final

from rsmq import Broker, Message, Settings
from rsmq.testing.server import ThrowawayServer

MESSAGES: Final = 4_000
AT_ONCE: Final = 200
ROUNDS: Final = 12
CHEAPEST: Final = 3


async def server_cpu(broker: Broker) -> float:
    """Seconds of CPU that the server has used."""
    rows = (await broker.client.execute_command("INFO", "cpu")).decode().splitlines()
    about = dict(row.split(":") for row in rows if ":" in row)
    return float(about["used_cpu_user"]) + float(about["used_cpu_sys"])


async def publish(call: Any) -> None:
    """All messages, some at once."""
    for first in range(0, MESSAGES, AT_ONCE):
        await asyncio.gather(*[call("in", {"n": n}, key=str(n)) for n in range(first, first + AT_ONCE)])


async def measured(broker: Broker, handled: list[int], name: str | None) -> tuple[float, float]:
    """Microseconds of CPU of client and server for each message, plain or as members of a batch."""
    handled[0] = 0
    client, server = time.process_time(), await server_cpu(broker)
    if name is None:
        await publish(broker.publish)
    else:
        async with broker.batch(name, group="g", on_complete="reports") as batch:
            await publish(batch.publish)
    while handled[0] < MESSAGES:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    used = time.process_time() - client, await server_cpu(broker) - server
    return used[0] / MESSAGES * 1e6, used[1] / MESSAGES * 1e6


def cheapest(costs: Iterable[float]) -> float:
    """The mean of the cheapest: what others do on the machine adds to a cost, and takes nothing away."""
    return sum(sorted(costs)[:CHEAPEST]) / CHEAPEST


async def run(url: str) -> None:
    """The rounds, in turn, and the mean of the cheapest."""
    broker, handled = Broker(Settings(url=url, preflight="warn", partitions=8)), [0]

    @broker.handler("in", group="g")
    async def handle(_: dict[str, int], message: Message) -> None:
        handled[0] += 1

    found: dict[str, list[tuple[float, float]]] = {"plain": [], "member": []}
    async with broker.running():
        await measured(broker, handled, None)  # caches
        gc.collect()
        gc.freeze()
        for number in range(ROUNDS):
            found["plain"].append(await measured(broker, handled, None))
            found["member"].append(await measured(broker, handled, f"batch-{number}"))
        status = await broker.find_batch("batch-0")
    assert status is not None
    assert (status.total, status.done) == (MESSAGES, MESSAGES), status
    means = {kind: [cheapest(each) for each in zip(*rows, strict=True)] for kind, rows in found.items()}
    for kind, (client, server) in means.items():
        print(f"{kind:8} client {client:6.1f} us   server {server:6.1f} us")
    ratios = [member / plain for member, plain in zip(means["member"], means["plain"], strict=True)]
    print(f"ratio    client {ratios[0]:6.2f}      server {ratios[1]:6.2f}")


def main() -> None:
    """Print them."""
    server = ThrowawayServer().start()
    try:
        asyncio.run(run(server.url))
    finally:
        server.close()


if __name__ == "__main__":
    main()
