"""`python -m benchmarks.partitions`: what the number of partitions of a topic costs at rest, and for each message.

One process with so many handlers, each of a topic of its own, on a single server and on a cluster of three masters:
connections, commands a second at rest and bytes of the server; then commands for each of a trickle of messages. These
are counts, which a busy machine does not change. `docs/decisions/0045-the-default-number-of-partitions.md` has them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack

from rsmq import Broker, Settings
from rsmq.model.message import Message
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.testing import ThrowawayServer
from tests.cluster.cluster import Cluster

REST: float = 6.0
"""Seconds at rest."""
MESSAGES: int = 300


async def ask(broker: Broker, *command: str) -> list[bytes]:
    """The answer of each node."""
    found = []
    for node in broker.client.nodes:
        connection = RawConnection(node)
        await connection.open()
        found += await connection.exchange([pack(command)])
        await connection.close()
    return found


def read(texts: Sequence[bytes], name: str) -> int:
    """The sum of a field of INFO."""
    lines = [line for text in texts for line in text.decode().splitlines() if line.startswith(f"{name}:")]
    return sum(int(line.partition(":")[2]) for line in lines)


async def measure(url: str, partitions: int, handlers: int) -> str:
    """One row."""
    broker = Broker(Settings(url=url, prefix=f"p{partitions}", partitions=partitions, preflight="warn"))
    done = [0]

    async def handle(_data: bytes, _message: Message) -> None:
        done[0] += 1

    for number in range(handlers):
        broker.handler(f"t{number}", group="g")(handle)
    async with broker:
        before = read(await ask(broker, "INFO", "memory"), "used_memory_dataset")
        async with broker.running():
            await asyncio.sleep(2)
            memory = read(await ask(broker, "INFO", "memory"), "used_memory_dataset") - before
            connections = read(await ask(broker, "INFO", "clients"), "connected_clients")
            began = read(await ask(broker, "INFO", "stats"), "total_commands_processed")
            await asyncio.sleep(REST)
            rest = read(await ask(broker, "INFO", "stats"), "total_commands_processed") - began
            began = read(await ask(broker, "INFO", "stats"), "total_commands_processed")
            for number in range(MESSAGES):
                await broker.publish(f"t{number % handlers}", b"x" * 100, key=f"k{number}")
                await asyncio.sleep(0.02)
            while done[0] < MESSAGES:
                await asyncio.sleep(0.01)
            busy = read(await ask(broker, "INFO", "stats"), "total_commands_processed") - began
    extra = busy - rest / REST * MESSAGES * 0.021
    row = (str(partitions), str(connections), f"{rest / REST:.0f}", f"{memory / 1024 / handlers:.1f}")
    return f"| {' | '.join(row)} | {extra / MESSAGES:.1f} |"


async def main() -> None:
    """Print a table for each kind of server."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partitions", description=__doc__)
    parser.add_argument("--handlers", type=int, default=10)
    handlers = parser.parse_args().handlers
    logging.disable(logging.ERROR)
    with ExitStack() as stack:
        servers = {"one server": stack.enter_context(ThrowawayServer(tcp=True)).url, "a cluster": ""}
        servers["a cluster"] = stack.enter_context(Cluster()).url
        for name, url in servers.items():
            columns = ("connections", "commands a second at rest", "KiB of a topic", "commands for each message")
            print(f"\n| partitions ({name}, {handlers} handlers) | {' | '.join(columns)} |\n|--:|--:|--:|--:|--:|")
            for partitions in (1, 4, 8, 16, 32, 64):
                print(await measure(url, partitions, handlers), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
