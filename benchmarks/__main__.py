"""`python -m benchmarks [--count N] [--rounds N] [--quick]`: the cost of a message beside the bare redis-py loop.

A throw-away server with the append-only file on; what is measured is `rsmq.cli.bench`, as for `rsmq bench`, in longer
rounds. Then the same for device inboxes: `benchmarks.inbox`.
"""

from __future__ import annotations

import argparse
import statistics

import anyio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import inbox
from benchmarks.server import server
from rsmq.cli.bench.load import BenchLoad
from rsmq.cli.bench.meter import Cost
from rsmq.cli.bench.run import BY_NAME, TRIALS, run
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 20 000 messages, without the inboxes")
    options = parser.parse_args()
    if options.quick:
        options.count, options.rounds = 20_000, 1
    with server() as url:
        taken = anyio.run(measure, url, options.count, options.rounds)
    show(taken, options.count)
    if not options.quick:
        inbox.main([])


async def measure(url: str, count: int, rounds: int) -> dict[str, list[Cost]]:
    """All trials, in turn, under a progress bar."""
    client = Connector(url, Settings(url=url)).client()
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=rounds * len(TRIALS))

        def step(meaning: str) -> None:
            progress.update(task, description=meaning, advance=1)

        taken = await run(client, BenchLoad(url, "", count), rounds=rounds, step=step)
    await client.aclose()
    return taken


def show(taken: dict[str, list[Cost]], count: int) -> None:
    """Medians, with the range of the CPU figure: a wide one says that the machine was noisy."""
    table = Table(title=f"{count} messages of 200 bytes, 8 partitions, AOF everysec; medians")
    for title in ("", "client CPU µs/message", "min – max", "× base", "server CPU µs", "commands", "messages/s"):
        table.add_column(title, justify="left" if not title else "right")
    for name, rounds in taken.items():
        client_us = [cost.client_us for cost in rounds]
        table.add_row(
            BY_NAME[name].meaning,
            f"{statistics.median(client_us):.2f}",
            f"{min(client_us):.1f} – {max(client_us):.1f}",
            times_base(taken, name),
            f"{middle(rounds, 'server_us'):.1f}",
            f"{middle(rounds, 'commands'):.3f}",
            f"{middle(rounds, 'rate'):,.0f}",
        )
    Console(width=140).print(table)


def middle(rounds: list[Cost], figure: str) -> float:
    """The median of one figure."""
    values: list[float] = [getattr(cost, figure) for cost in rounds]
    return statistics.median(values)


def times_base(taken: dict[str, list[Cost]], name: str) -> str:
    """The median of the rounds' ratios to the bare client; nothing for the bare client itself."""
    base = BY_NAME[name].base
    if base is None:
        return ""
    pairs = zip(taken[name], taken[base], strict=True)
    return f"{statistics.median(mine.client_us / bare.client_us for mine, bare in pairs):.2f}"


if __name__ == "__main__":
    main()
