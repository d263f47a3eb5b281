"""`python -m benchmarks.growth`: how the cost of a message grows, with partitions, members, backlog, payload and more.

A throw-away server; every point is measured a few times and the least is taken, for a busy machine can only add.
With --write into benchmarks/results and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio
from rich.console import Console
from rich.progress import Progress

from benchmarks.curve import SECTION, draw, short
from benchmarks.section import RESULTS
from benchmarks.server import server
from rsmq.broker import Broker
from rsmq.cli.bench import work
from rsmq.cli.bench.load import TOPIC, BenchLoad, key_of
from rsmq.cli.bench.meter import Cost, CpuReading, Meter, best
from rsmq.cli.bench.run import scratch
from rsmq.model.keys import Keys
from rsmq.model.layout import single
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector

LARGEST_RUN = 256 << 20
"""Payload bytes of one measurement at most: several times what a worker prefetches."""

Costs = dict[str, Cost]
Measure = Callable[["Bench", int], Awaitable[Costs]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where it is measured."""

    url: str
    client: Client
    count: int

    @asynccontextmanager
    async def load(self, **changes: Any) -> AsyncIterator[tuple[BenchLoad, Meter]]:
        """A load under a prefix of its own, and the meter."""
        async with scratch(self.client) as prefix:
            yield BenchLoad(self.url, prefix, **{"count": self.count} | changes), Meter(self.client)


@dataclass(frozen=True, slots=True)
class Dimension:
    """What grows. `per_byte`: a message is allowed to cost in proportion; its cost per byte must not grow. `of`: what
    the costs are of."""

    name: str
    unit: str
    values: tuple[int, ...]
    measure: Measure
    per_byte: bool = False
    of: str = "message"


@dataclass(slots=True)
class Curve:
    """What was measured: for each step (publish, consume, ...) a cost a value."""

    name: str
    unit: str
    per_byte: bool
    of: str
    values: list[int]
    steps: dict[str, list[Cost]] = field(default_factory=dict)


async def partitions(bench: Bench, value: int) -> Costs:
    """Publish and consume through so many partitions."""
    async with bench.load(partitions=value) as (load, meter):
        return {
            "publish_many": await work.publish_many(load, meter),
            "consume": await work.consume(load, meter, work.single),
        }


async def fixed(bench: Bench, value: int) -> Costs:
    """A worker that starts, handles one message of each partition, and stops."""
    async with bench.load(partitions=value, count=value) as (load, meter):
        count, broker, keys = work.Count(load), Broker(work.settings_of(load)), Keys(load.prefix)
        for partition in range(value):
            await bench.client.execute_command("XADD", keys.stream(TOPIC, partition), "*", "data", "{}")
        work.register(broker, work.single, count, "growth", load)
        await meter.start()
        count.release()
        start = CpuReading()
        async with broker.running():
            await count.finished.wait()
        return {"start, one message of each partition, stop": await meter.cost(start, CpuReading(1))}


async def members(bench: Bench, value: int) -> Costs:
    """So many members of one group share sixteen partitions; publishing is included, for all begin with nothing."""
    async with bench.load(partitions=16) as (load, meter), AsyncExitStack() as stack:
        count, brokers = work.Count(load), []
        for _ in range(value):
            broker = Broker(work.settings_of(load))
            work.register(broker, work.single, count, "growth", load)
            brokers.append(await stack.enter_async_context(broker.running()))
        with anyio.fail_after(60):
            while not all(broker.worker and 0 < owned(broker) <= math.ceil(16 / value) for broker in brokers):
                await anyio.sleep(0.1)
        await meter.start()
        count.release()
        start = CpuReading()
        await brokers[0].publish_many(TOPIC, load.payloads(load.count), key=key_of)
        await count.finished.wait()
        return {"publish + consume": await meter.cost(start, CpuReading(load.count))}


def owned(broker: Broker) -> int:
    """Partitions that a member reads."""
    assert broker.worker is not None
    return sum(len(consumer.lanes) for consumer in broker.worker.consumers)


async def backlog(bench: Bench, value: int) -> Costs:
    """The same number of messages published onto, and consumed from the front of, so many that wait."""
    async with bench.load(size=100) as (load, meter):
        async with Broker(work.settings_of(load)) as broker:
            await broker.publish_many(TOPIC, load.payloads(value), key=key_of)
        few = BenchLoad(load.url, load.prefix, count=min(load.count, value), size=100)
        return {
            "publish_many": await work.publish_many(few, meter),
            "consume": await work.consume(few, meter, work.single),
        }


async def payload(bench: Bench, value: int) -> Costs:
    """Payloads of so many bytes."""
    async with bench.load(size=value, count=max(50, min(bench.count, LARGEST_RUN // value))) as (load, meter):
        return {
            "publish_many": await work.publish_many(load, meter),
            "consume": await work.consume(load, meter, work.single),
        }


async def concurrency(bench: Bench, value: int) -> Costs:
    """So many publish calls at once, and so many handlers that suspend."""
    async with bench.load(concurrency=value, count=min(max(bench.count, 30 * value), 2000 * value)) as (load, meter):
        return {
            "publish": await work.publish_concurrently(load, meter),
            "consume, handlers suspend": await work.consume(load, meter, work.suspending),
        }


async def pending(bench: Bench, value: int) -> Costs:
    """Take over what a member that is gone had in flight: so many messages."""
    async with bench.load() as (load, meter):
        keys, group = Keys(load.prefix), "growth"
        async with Broker(work.settings_of(load)) as broker:
            await broker.publish_many(TOPIC, load.payloads(value), key=key_of)
        for partition in single(load.partitions).numbers:
            stream = keys.stream(TOPIC, partition)
            await bench.client.execute_command("XGROUP", "CREATE", stream, group, "0")
            await bench.client.execute_command(
                "XREADGROUP", "GROUP", group, "gone", "COUNT", value, "STREAMS", stream, ">"
            )
        whole = BenchLoad(load.url, load.prefix, count=value)
        return {"take over": await work.consume(whole, meter, work.single, group=group)}


DIMENSIONS = (
    Dimension("partitions", "partitions", (1, 2, 4, 8, 16, 32, 64), partitions),
    Dimension("fixed part", "partitions", (1, 2, 4, 8, 16, 32, 64, 256), fixed, of="worker"),
    Dimension("members", "members", (1, 2, 4, 8, 16), members),
    Dimension("backlog", "messages waiting", (10_000, 100_000, 1_000_000), backlog),
    Dimension("payload", "bytes", (100, 1 << 10, 8 << 10, 64 << 10), payload, per_byte=True),
    Dimension("concurrency", "at once", (1, 4, 16, 64, 256, 1000), concurrency),
    Dimension("pending", "messages pending", (100, 1_000, 10_000, 100_000), pending),
)


async def measure(options: argparse.Namespace, url: str) -> list[Curve]:
    """All curves."""
    chosen = [each for each in DIMENSIONS if not options.only or each.name in options.only.split(",")]
    curves = []
    client = Connector(url, Settings(url=url)).client()
    bench = Bench(url, client, options.count)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(len(each.values) for each in chosen) * options.rounds)
        for dimension in chosen:
            curve = Curve(dimension.name, dimension.unit, dimension.per_byte, dimension.of, list(dimension.values))
            for value in curve.values:
                taken: dict[str, list[Cost]] = {}
                for _ in range(options.rounds):
                    progress.update(task, description=f"{dimension.name} {value}")
                    for step, cost in (await dimension.measure(bench, value)).items():
                        taken.setdefault(step, []).append(cost)
                    progress.advance(task)
                for step, costs in taken.items():
                    curve.steps.setdefault(step, []).append(best(costs))
            curves.append(curve)
            save(curves, options)
    await client.aclose()
    return curves


def told(curves: list[Curve], options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, and of an earlier run what `--only` has left out."""
    rows = [asdict(curve) for curve in curves]
    for row in rows:
        row |= {"messages": options.count, "rounds": options.rounds}
    if options.only and (RESULTS / "growth.json").exists():
        fresh = {row["name"] for row in rows}
        rows += [row for row in SECTION.read()["curves"] if row["name"] not in fresh]
        order = [each.name for each in DIMENSIONS]
        rows.sort(key=lambda row: order.index(row["name"]))
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
    }  # fmt: skip
    return {"facts": facts, "curves": rows}


def save(curves: list[Curve], options: argparse.Namespace) -> None:
    """After every curve, so that a run which is ended leaves something."""
    if options.write:
        found = told(curves, options)
        draw(found["curves"], RESULTS / "growth.svg")
        SECTION.keep(found)


def main() -> None:
    """Measure, print the section of the page, and write with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="messages a point")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="some of: " + ",".join(each.name for each in DIMENSIONS))
    parser.add_argument("--write", action="store_true", help="write figures, report and the section of the page")
    options = parser.parse_args()
    with server() as url:
        print(short(told(anyio.run(measure, options, url), options)))


if __name__ == "__main__":
    main()
