"""Thousands of phones, half of them offline at any time: every letter reaches its phone. Ends with a verdict.

python examples/devices/run.py
python examples/devices/run.py --phones 1000 --flights 500 --seconds 10
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Annotated

import anyio
import typer
from chart import draw
from history import History
from passenger import passengers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from show import TOPIC, Plan, Run
from verdict import Verdict, judge

from rsmq import Broker, Settings
from rsmq.cli.demo.flight import read_departures


def main(
    phones: Annotated[int, typer.Option(min=2, max=99_999, help="How many.")] = 10_000,
    flights: Annotated[
        int, typer.Option(min=10, max=20_000, help="How many departures, with 50 to 180 phones on board.")
    ] = 2_000,
    seconds: Annotated[float, typer.Option(min=2, max=3600, help="How long departures are published.")] = 40,
    chart: Annotated[Path, typer.Option(help="The file of the chart: .png, .svg or .pdf.")] = Path("devices.png"),
    url: Annotated[str | None, typer.Option(help="The server. Default: RSMQ_URL, else an embedded one.")] = None,
) -> None:
    """Send departures to the phones of their passengers; ends with a chart and a verdict (exit code 1 if it is bad)."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    console, folder = Console(), Path(tempfile.mkdtemp(prefix="rsmq-devices-"))
    plan = Plan(phones, read_departures(flights), seconds)
    verdict, history = anyio.run(perform, plan, folder, chart, url, console)
    show_verdict(console, verdict, history)
    console.print(f"The chart: {chart}", soft_wrap=True, highlight=False)
    if not verdict.is_good:
        console.print(f"A promise was BROKEN: the ledger and logs are in {folder}", soft_wrap=True, highlight=False)
        sys.exit(1)
    console.print("Nothing lost, order kept.")
    shutil.rmtree(folder)


async def perform(plan: Plan, folder: Path, chart: Path, url: str | None, console: Console) -> tuple[Verdict, History]:
    """Run the plan, read what is left in the inboxes, judge, and draw the chart."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    overrides = {} if url is None else {"url": url}
    async with Broker(Settings(**overrides, prefix=f"devices-{secrets.token_hex(4)}")) as broker:
        with Progress(*columns, console=console) as progress:
            run = Run(broker, plan, folder, progress)
            await run.run()
        left = dropped = 0
        async for device in broker.devices.iterate():
            left += device.backlog
            dropped += device.dropped + device.expired + device.late
        await broker.topics.delete(TOPIC)
    entries = run.ledger.events()
    verdict = judge(plan.departures, lambda departure: passengers(departure, plan.phones), entries, left, dropped)
    history = History(entries, run.start, run.outage, run.phones_of(0))
    draw(history, plan.seconds, chart)
    return verdict, history


def show_verdict(console: Console, verdict: Verdict, history: History) -> None:
    """Print the verdict and the latencies."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title="Verdict, from the ledger outside the server", title_justify="left"
    )
    table.add_column("")
    table.add_column("letters", justify="right")
    table.add_row("published for a phone", f"{verdict.expected:,}")
    table.add_row("received", f"{verdict.received:,}")
    table.add_row("received again after the kill, marked as redelivered", f"{verdict.again:,}")
    wrong = {
        "lost": verdict.lost,
        "received again without the mark": verdict.unmarked,
        "out of order": verdict.out_of_order,
        "received by the wrong phone": verdict.unexpected,
        "left in an inbox": verdict.left,
        "dropped or expired": verdict.dropped,
    }
    for title, count in wrong.items():
        table.add_row(title, f"{count:,} {'✗' if count else '✓'}", style="bold red" if count else "green")
    console.print(table)
    catching_up = [visit.seconds for visit in history.visits]
    for text in (
        f"{len(catching_up):,} times a phone reconnected and received its backlog within {spread(catching_up)}",
        f"{len(history.latencies):,} letters went to phones that were online, within {spread(history.latencies)}",
    ):
        console.print(text, soft_wrap=True, highlight=False)


def spread(seconds: Sequence[float]) -> str:
    """Median and 99th percentile."""
    if len(seconds) < 2:
        return "-"
    percentiles = quantiles(seconds, n=100, method="inclusive")
    return f"p50 {percentiles[49] * 1000:,.0f} ms, p99 {percentiles[98] * 1000:,.0f} ms"


if __name__ == "__main__":
    typer.run(main)
