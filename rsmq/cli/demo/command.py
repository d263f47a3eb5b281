"""The command `rsmq demo`."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import anyio
import typer
from pydantic_core import to_json
from rich.console import Console
from rich.live import Live

from rsmq.broker import Broker
from rsmq.cli.demo.flight import read_departures
from rsmq.cli.demo.result import TOPIC, DemoResult
from rsmq.cli.demo.run import DemoRun, Plan, workers
from rsmq.cli.demo.screen import Screen, show_result
from rsmq.model.clock import monotonic
from rsmq.model.settings import Overrides, Settings

PACE = 4000
"""Departures published per second by default: slow enough to watch."""


def demo(
    flights: Annotated[int, typer.Option(min=100, help="How many departures, from 1 January on.")] = 60_000,
    everything: Annotated[bool, typer.Option("--all", help="All 336 776, as fast as they go.")] = False,
    processes: Annotated[int, typer.Option(min=2, max=64, help="Worker processes.")] = 4,
    partitions: Annotated[int, typer.Option(min=1, max=256, help="Partitions of the topic.")] = 8,
    kill: Annotated[bool, typer.Option(help="Kill a worker in the middle.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the topic and the ledger.")] = False,
    url: Annotated[str | None, typer.Option("--url", help="The server. Default: RSMQ_URL, else embedded.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Send real departures through several worker processes, kill one of them, and print a result.

    Two groups handle each departure: one notifies the passengers of late flights (PUSH, else SMS, else AlimTalk), one
    audits in batches. Exit code 1 if any promise was broken.
    """
    console = Console(stderr=as_json)
    with console.status("reading the flights"):
        departures = read_departures(None if everything else flights)
    plan = Plan(departures, 0 if everything else len(departures) / PACE, kill)
    overrides: Overrides = {"prefix": f"demo-{secrets.token_hex(4)}", "partitions": partitions}
    if url is not None:
        overrides["url"] = url
    settings = Settings(**overrides)
    directory = Path(tempfile.mkdtemp(prefix="rsmq-demo-"))
    result = anyio.run(perform, settings, plan, processes, directory, console, keep)
    show_result(console, result, str(directory / "workers.log"))
    if as_json:
        typer.echo(to_json({"is_good": result.is_good, **summary(result)}, indent=2).decode())
    if result.is_good and not keep:
        shutil.rmtree(directory)
    raise typer.Exit(0 if result.is_good else 1)


async def perform(
    settings: Settings, plan: Plan, processes: int, directory: Path, console: Console, keep: bool
) -> DemoResult:
    """Connect, start the workers, run the demo, clean up."""
    async with Broker(settings) as broker:
        partitions = str(settings.partitions)
        environment = {"RSMQ_URL": broker.url, "RSMQ_PREFIX": settings.prefix, "RSMQ_PARTITIONS": partitions}
        with workers(processes, directory, environment):
            if console.is_terminal:
                with Live(console=console, refresh_per_second=8, transient=False) as live:
                    result = await DemoRun(broker, plan, directory, lambda screen: live.update(screen.draw())).run()
            else:
                result = await DemoRun(broker, plan, directory, plain(console)).run()
        if not keep:
            await broker.topics.delete(TOPIC)
    return result


def plain(console: Console) -> Callable[[Screen], None]:
    """Print every event, and the state each second."""
    shown, last = 0, 0.0

    def redraw(screen: Screen) -> None:
        nonlocal shown, last
        for event in screen.events[shown:]:
            console.print(event, highlight=False)
        shown = len(screen.events)
        if monotonic() - last >= 1:
            console.print(screen.line(), highlight=False, soft_wrap=True)
            last = monotonic()

    return redraw


def summary(result: DemoResult) -> dict[str, object]:
    """The result for programs."""
    return {
        "recovery_seconds": result.recovery_seconds,
        "channels": dict(result.channels),
        "groups": {
            group.group: {
                "is_good": group.is_good,
                "expected": group.expected,
                "handled": group.handled,
                "lost": len(group.lost),
                "unexpected": len(group.unexpected),
                "out_of_order": group.out_of_order,
                "redelivered": group.redelivered,
                "unexplained": group.unexplained,
                "missing_dead_letters": len(group.missing_dead_letters),
                "surplus_dead_letters": len(group.surplus_dead_letters),
            }
            for group in result.groups
        },
    }
