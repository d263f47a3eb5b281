"""`rsmq bench`: what a message costs on this server, beside the bare client, and what to set."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rsmq.address import is_cluster, is_sentinel
from rsmq.bench.advice import Advice, advise
from rsmq.bench.latency import Latency
from rsmq.bench.load import Load
from rsmq.bench.meter import Cost
from rsmq.bench.run import latencies, ratio, run, summary
from rsmq.bench.trial import BY_NAME, TRIALS
from rsmq.cli.option import Json, Url
from rsmq.cli.printer import dump, say, tabulate
from rsmq.cli.session import connected
from rsmq.errors import ConfigError

ROUNDS = 3
SECONDS, OF_EACH = 5.0, 2000
"""How long each latency is measured, in turns: a second for so many messages of a measurement, at most `SECONDS`."""


def bench(
    messages: Annotated[int, typer.Option(min=100, max=1_000_000, help="Messages a measurement.")] = 10_000,
    payload: Annotated[int, typer.Option(min=50, max=250_000, help="Bytes of a payload.")] = 200,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Measure this machine and server in a minute: CPU and commands per message, latency; and what to set.

    Works under a random key prefix of its own, which is removed afterwards. Server CPU includes whatever else the
    server does.
    """
    logging.getLogger("rsmq").setLevel(logging.ERROR)  # what the server lacks is for `rsmq doctor` to say
    costs, delays = anyio.run(measure, url, messages, payload)
    advice = advise(costs, os.cpu_count() or 1)
    if as_json:
        dump(report(costs, delays, advice))
    else:
        show(costs, delays, advice)


async def measure(url: str | None, messages: int, payload: int) -> tuple[dict[str, Cost], dict[str, Latency]]:
    """The best of the rounds, and latencies, under a progress bar."""
    async with connected(url) as session:
        address = session.client.url
        if is_cluster(address) or is_sentinel(address):
            raise ConfigError("bench measures one server: give the URL of one node, such as redis://host:6379/0")
        load = Load(address, "", messages, payload)
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
    """All of it for programs."""
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
    tabulate(columns, rows, "nothing was measured")
    say("")
    waits = [(name, f"{delay.p50:.1f}", f"{delay.p99:.1f}") for name, delay in delays.items()]
    tabulate(("latency at 200 messages/s", "#p50 ms", "#p99 ms"), waits, "nothing was measured")
    say("")
    tabulate(("recommended", "#", "because"), [(each.name, each.value, each.reason) for each in advice], "nothing")


def times(value: float | None) -> str:
    """A ratio, where there is one."""
    return "" if value is None else f"{value:.2f}"
