"""`rsmq bench`: the cost of a message on this server, compared with plain redis-py, and recommended settings."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rsmq.cli.bench.latency import Latency
from rsmq.cli.bench.load import BenchLoad
from rsmq.cli.bench.meter import Cost
from rsmq.cli.bench.run import BY_NAME, TRIALS, latencies, ratio, run, summary
from rsmq.cli.connection import connected
from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, Url, example
from rsmq.cli.tables import print_table
from rsmq.errors import ConfigError
from rsmq.redis.wire.url import is_cluster, is_sentinel

ROUNDS = 3
SECONDS, OF_EACH = 5.0, 2000
"""How long latency is measured: one second per `OF_EACH` messages of a measurement, at most `SECONDS`."""
TYPICAL_WAIT: Final = 0.01
"""Seconds that a typical handler waits for a query or a call within the data centre."""
LEAST_PARTITIONS, MOST_PARTITIONS = 8, 64
LEAST_CONCURRENCY, MOST_CONCURRENCY = 64, 1024
PER_PROCESS: Final = 4
WORTHWHILE: Final = 0.85


@example("rsmq bench --messages 20000 --payload 1000 --partitions 16")
def bench(
    messages: Annotated[int, typer.Option(min=100, max=1_000_000, help="Messages per measurement.")] = 10_000,
    payload: Annotated[int, typer.Option(min=50, max=250_000, help="Bytes of a payload.")] = 200,
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="Partitions; many need more messages.")] = 8,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Measure this machine and server in half a minute: CPU and commands per message, latency, recommended settings.

    All keys have a random prefix and are deleted afterwards. Server CPU includes all other work of the server.
    """
    logging.getLogger("rsmq").setLevel(logging.ERROR)  # `rsmq doctor` reports problems of the server
    costs, delays = anyio.run(measure, url, messages, payload, partitions)
    advice = advise(costs, os.cpu_count() or 1)
    if as_json:
        print_json(report(costs, delays, advice))
    else:
        show(costs, delays, advice)


async def measure(
    url: str | None, messages: int, payload: int, partitions: int
) -> tuple[dict[str, Cost], dict[str, Latency]]:
    """Measure costs and latencies with a progress bar."""
    async with connected(url) as session:
        address = session.client.url
        if is_cluster(address) or is_sentinel(address):
            raise ConfigError("bench measures one server: give the URL of one node, such as redis://host:6379/0")
        load = BenchLoad(address, "", messages, payload, partitions)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=ROUNDS * len(TRIALS) + 1)

            def step(meaning: str) -> None:
                progress.update(task, description=meaning, advance=1)

            taken = await run(session.client, load, rounds=ROUNDS, step=step)
            step("latency at 200 messages/s")
            seconds = min(SECONDS, messages / OF_EACH)
            return summary(taken), await latencies(session.client, load, seconds=seconds)


def report(costs: dict[str, Cost], delays: dict[str, Latency], advice: list[Advice]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "costs": {name: asdict(cost) | {"ratio": ratio(costs, name)} for name, cost in costs.items()},
        "latency_ms": {name: asdict(delay) for name, delay in delays.items()},
        "advice": [asdict(each) for each in advice],
    }


def show(costs: dict[str, Cost], delays: dict[str, Latency], advice: list[Advice]) -> None:
    """Tables for people."""
    rows = [
        (
            BY_NAME[name].meaning, f"{cost.client_us:.1f}", times(ratio(costs, name)), f"{cost.server_us:.1f}",
            f"{cost.commands:.3f}", round(cost.rate),
        )
        for name, cost in costs.items()
    ]  # fmt: skip
    columns = ("per message", "#client CPU µs", "#× bare", "#server CPU µs", "#commands", "#messages/s")
    print_table(columns, rows, "nothing was measured")
    print_line("")
    waits = [(name, f"{delay.p50:.1f}", f"{delay.p99:.1f}") for name, delay in delays.items()]
    print_table(("latency at 200 messages/s", "#p50 ms", "#p99 ms"), waits, "nothing was measured")
    print_line("")
    print_table(("recommended", "#", "because"), [(each.name, each.value, each.reason) for each in advice], "nothing")


def times(value: float | None) -> str:
    """A ratio, where there is one."""
    return "" if value is None else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting, its value and the reason."""

    name: str
    value: str
    reason: str


def advise(costs: Mapping[str, Cost], cores: int) -> list[Advice]:
    """For handlers without work of their own: real handlers need more processes."""
    server = 1e6 / max(0.1, costs["many"].server_us + costs["single"].server_us)
    process = 1e6 / max(0.1, costs["single"].client_us)
    processes = max(1, min(cores, math.ceil(server / process)))
    partitions = clamp(power_of_two(PER_PROCESS * processes), LEAST_PARTITIONS, MOST_PARTITIONS)
    busy = 1e6 / max(0.1, costs["suspending"].client_us)
    concurrency = clamp(power_of_two(busy * TYPICAL_WAIT), LEAST_CONCURRENCY, MOST_CONCURRENCY)
    batch = costs["batch"].client_us / max(0.1, costs["single"].client_us)
    return [
        Advice(
            "processes",
            str(processes),
            f"the server carries about {many(server)} messages/s, a process handles up to {many(process)}, "
            f"and this machine has {cores} cores",
        ),
        Advice(
            "partitions",
            str(partitions),
            f"at least {PER_PROCESS} per process, so that the load stays even when a process is added or removed; "
            f"at least {LEAST_PARTITIONS}: a topic can grow, but not become smaller",
        ),
        Advice(
            "concurrency",
            str(concurrency),
            f"handlers that wait {TYPICAL_WAIT * 1000:.0f} ms keep a process busy ({many(busy)}/s) at this "
            f"concurrency; {LEAST_CONCURRENCY} is enough for waits up to {LEAST_CONCURRENCY / busy * 1000:.1f} ms",
        ),
        Advice(
            "batch",
            "500" if batch < WORTHWHILE else "none",
            f"a message in a batch costs {batch:.2f} × a single one: "
            + ("worth it where your work can be done in batches" if batch < WORTHWHILE else "not worth it by itself"),
        ),
    ]


def power_of_two(number: float) -> int:
    """The next power of two."""
    return 1 << max(0, math.ceil(math.log2(max(1.0, number))))


def clamp(number: int, least: int, most: int) -> int:
    """The number, within bounds."""
    return max(least, min(most, number))


def many(number: float) -> str:
    """A rate with two significant digits: a measurement of seconds is not more precise."""
    digits = -math.floor(math.log10(number)) + 1 if number >= 1 else 0
    return f"{round(number, digits):,.0f}".replace(",", " ")
