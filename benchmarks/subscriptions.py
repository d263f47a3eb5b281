"""What the subscriptions of all MQTT clients cost: the server, each gateway process, and a client that subscribes.

`python -m benchmarks.subscriptions URL` is the gateway's side, in a process of its own: so its memory is that of the
subscriptions.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.footprint import resident
from benchmarks.server import ServerMeter
from rsmq import Broker, Settings
from rsmq.gateway.fleet.registry import Registry
from rsmq.model.keys import Keys
from rsmq.model.mqtt_subscription import Subscription, pack, shard_of
from rsmq.redis.client.script_batcher import ScriptBatcher

PREFIX = "scale"
MANY = 1000
"""Clients that subscribe while all others are there."""


def list_of(client: str) -> list[Subscription]:
    """What each client has: the topic name of its commands."""
    return [Subscription(f"cmd/{client}", 1)]


async def fill(broker: Broker, size: int) -> None:
    """Write the lists of so many clients, as SUBSCRIBE does, without the changes."""
    for at in range(0, size, MANY):
        rows: dict[str, list[bytes | str]] = {}
        for number in range(at, min(size, at + MANY)):
            client = f"device-{number:07d}"
            key = broker.keys.mqtt(shard_of(client), "subscriptions")
            rows.setdefault(key, []).extend((client, b"1|" + pack(list_of(client))))
        await broker.client.pipelined([("HSET", key, *row) for key, row in rows.items()])


async def gateway(url: str) -> dict[str, float]:
    """A gateway process begins, and matches a topic name."""
    async with Broker(Settings(url=url, prefix=PREFIX, preflight="warn")) as broker:
        registry = Registry(broker.client, broker.keys, ScriptBatcher(broker.client))
        gc.collect()
        before, cpu = resident(), time.process_time()
        await registry.catch_up()
        size, spent = registry.subscriptions, time.process_time() - cpu
        held = resident() - before
        cpu = time.process_time()
        for number in range(MANY):
            registry.tree.match(f"cmd/device-{number:07d}")
        return {
            "held_bytes": held / size,
            "begin_us": spent / size * 1e6,
            "begin_seconds": spent,
            "match_us": (time.process_time() - cpu) / MANY * 1e6,
        }


async def subscribe(broker: Broker, epoch: int) -> None:
    """So many of the clients subscribe to what they have, and changes are written if there are some."""
    batcher = ScriptBatcher(broker.client)
    running = asyncio.create_task(batcher.run())
    registry = Registry(broker.client, broker.keys, batcher)
    wanted = [f"device-{number:07d}" for number in range(MANY)]
    await asyncio.gather(*(registry.write(each, str(epoch), list_of(each)) for each in wanted))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def changes(broker: Broker, keys: Keys) -> int:
    """How many changes the streams have."""
    names = [keys.mqtt(shard, "changes") for shard in range(8)]
    return sum([await broker.client.execute_command("XLEN", name) for name in names])


async def subscriptions(url: str, meter: ServerMeter, size: int) -> dict[str, float]:
    """So many clients with a subscription each."""
    meter.start(empty=True)
    async with Broker(Settings(url=url, prefix=PREFIX, preflight="warn")) as broker:
        await fill(broker, size)
        figures: dict[str, float] = {"server_bytes": meter.memory / size}
        command = [sys.executable, "-m", "benchmarks.subscriptions", url]
        meter.start()
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
        figures |= json.loads(printed) | {"read_us": meter.cpu_us / size}
        meter.start()
        await subscribe(broker, 2)
        figures |= {"again_us": meter.cpu_us / MANY, "again_changes": float(await changes(broker, broker.keys))}
    return figures


def main(arguments: list[Any]) -> None:
    """Print the figures of a gateway."""
    print(json.dumps(asyncio.run(gateway(arguments[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
