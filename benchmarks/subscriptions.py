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
from rsmq.gateway.fleet.router import BATCH
from rsmq.model.keys import Keys
from rsmq.model.mqtt_subscription import SHARDS, Subscription, pack, shard_of
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
            lists, names = (broker.keys.mqtt(shard_of(client), kind) for kind in ("subscriptions", "names"))
            rows.setdefault(lists, []).extend((client, b"1|" + pack(list_of(client))))
            rows.setdefault(names, []).extend((f"cmd/{client}", f"{client}\0001000\0"))
        await broker.client.pipelined([("HSET", key, *row) for key, row in rows.items()])
    marks = [("SET", broker.keys.mqtt(shard, "mark"), f"{size // SHARDS}:1.1:filled") for shard in range(SHARDS)]
    await broker.client.pipelined(marks)


async def gateway(url: str) -> dict[str, float]:
    """A gateway process begins, and matches a topic name."""
    async with Broker(Settings(url=url, prefix=PREFIX, preflight="warn")) as broker:
        registry = Registry(broker.client, broker.keys, ScriptBatcher(broker.client))
        gc.collect()
        before, cpu = resident(), time.process_time()
        await registry.catch_up()
        size, spent = registry.subscriptions, time.process_time() - cpu
        held = resident() - before
        names = [f"cmd/device-{number:07d}" for number in range(MANY)]
        cpu = time.process_time()
        for at in range(0, MANY, BATCH):
            await registry.look(names[at : at + BATCH])
        looked = time.process_time() - cpu
        found = [registry.subscribers(name) for name in names]
        assert all(each is not None and len(each.found) == 1 for each in found), "each name has its subscriber"
        return {
            "held_bytes": held / size,
            "begin_us": spent / size * 1e6,
            "begin_seconds": spent,
            "match_us": looked / MANY * 1e6,
        }


async def subscribe(broker: Broker, epoch: int, prefix: str = "device-", number: int = MANY) -> None:
    """So many clients subscribe. Those of the filled lists to what they have; changes are written if there are some."""
    batcher = ScriptBatcher(broker.client)
    running = asyncio.create_task(batcher.run())
    registry = Registry(broker.client, broker.keys, batcher)
    wanted = [f"{prefix}{each:07d}" for each in range(number)]
    await asyncio.gather(*(registry.write(each, str(epoch), list_of(each)) for each in wanted))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def changes(broker: Broker, keys: Keys) -> int:
    """How many changes the streams have."""
    names = [keys.mqtt(shard, "changes") for shard in range(8)]
    return sum([await broker.client.execute_command("XLEN", name) for name in names])


async def look(broker: Broker, meter: ServerMeter) -> dict[str, float]:
    """What the lookups of a router cost the server: of names it does not know, and for a batch of those it does."""
    registry = Registry(broker.client, broker.keys, ScriptBatcher(broker.client))
    await registry.look(("none",))
    names = [f"cmd/device-{number:07d}" for number in range(20 * BATCH)]
    meter.start()
    for at in range(0, len(names), BATCH):
        await registry.look(names[at : at + BATCH])
    figures = {"look_us": meter.cpu_us / len(names)}
    meter.start()
    for _ in range(MANY):
        await registry.look(names[:1])
    return figures | {"batch_us": meter.cpu_us / MANY}


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
        await subscribe(broker, 1, "first-", 1)  # the server gets the scripts
        meter.start()
        await subscribe(broker, 2)
        figures |= {"again_us": meter.cpu_us / MANY, "again_changes": float(await changes(broker, broker.keys))}
        meter.start()
        await subscribe(broker, 2, "new-")
        figures["subscribe_us"] = meter.cpu_us / MANY
        figures |= await look(broker, meter)
    return figures


def main(arguments: list[Any]) -> None:
    """Print the figures of a gateway."""
    print(json.dumps(asyncio.run(gateway(arguments[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
