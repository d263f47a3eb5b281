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
from rsmq.clock import monotonic
from rsmq.demo.crew import workers
from rsmq.demo.flight import read_departures
from rsmq.demo.screen import Picture, show_verdict
from rsmq.demo.show import TOPIC, Plan, Show
from rsmq.demo.verdict import Verdict
from rsmq.override import Overrides
from rsmq.settings import Settings

PACE = 4000
"""Departures published a second by default: slow enough to watch."""


def demo(
    flights: Annotated[int, typer.Option(min=100, help="How many departures, from 1 January on.")] = 60_000,
    everything: Annotated[bool, typer.Option("--all", help="All 336 776, as fast as they go.")] = False,
    processes: Annotated[int, typer.Option(min=2, max=64, help="Worker processes.")] = 4,
    partitions: Annotated[int, typer.Option(min=1, max=256, help="Partitions of the topic.")] = 8,
    kill: Annotated[bool, typer.Option(help="Kill a worker in the middle.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the topic and the ledgers for a look.")] = False,
    url: Annotated[str | None, typer.Option("--url", help="The server. Default: RSMQ_URL, else embedded.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Real departures through several worker processes, one killed on the way; ends with a verdict.

    Two groups handle each departure: one tells the passengers of late flights (PUSH, else SMS, else AlimTalk), one
    audits in batches. Exit code 1 if any promise was broken.
    """
    console = Console(stderr=as_json)
    with console.status("reading the flights"):
        departures = read_departures(None if everything else flights)
    plan = Plan(departures, 0 if everything else len(departures) / PACE, kill)
    given: Overrides = {"prefix": f"demo-{secrets.token_hex(4)}", "partitions": partitions}
    if url is not None:
        given["url"] = url
    settings = Settings(**given)
    directory = Path(tempfile.mkdtemp(prefix="rsmq-demo-"))
    verdict = anyio.run(perform, settings, plan, processes, directory, console, keep)
    show_verdict(console, verdict, str(directory / "workers.log"))
    if as_json:
        typer.echo(to_json({"is_good": verdict.is_good, **summary(verdict)}, indent=2).decode())
    if verdict.is_good and not keep:
        shutil.rmtree(directory)
    raise typer.Exit(0 if verdict.is_good else 1)


async def perform(
    settings: Settings, plan: Plan, processes: int, directory: Path, console: Console, keep: bool
) -> Verdict:
    """Connect, start the workers, run the show, clean up."""
    async with Broker(settings) as broker:
        environment = {
            "RSMQ_URL": broker.url,
            "RSMQ_PREFIX": settings.prefix,
            "RSMQ_PARTITIONS": str(settings.partitions),
        }
        with workers(processes, directory, environment):
            if console.is_terminal:
                with Live(console=console, refresh_per_second=8, transient=False) as live:
                    verdict = await Show(broker, plan, directory, lambda picture: live.update(picture.draw())).run()
            else:
                verdict = await Show(broker, plan, directory, plain(console)).run()
        if not keep:
            await broker.topics.delete(TOPIC)
    return verdict


def plain(console: Console) -> Callable[[Picture], None]:
    """A line a second, and every event."""
    shown, last = 0, 0.0

    def look(picture: Picture) -> None:
        nonlocal shown, last
        for event in picture.events[shown:]:
            console.print(event, highlight=False)
        shown = len(picture.events)
        if monotonic() - last >= 1:
            console.print(picture.line(), highlight=False, soft_wrap=True)
            last = monotonic()

    return look


def summary(verdict: Verdict) -> dict[str, object]:
    """The verdict for programs."""
    return {
        "recovery_seconds": verdict.recovery_seconds,
        "channels": dict(verdict.channels),
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
            for group in verdict.groups
        },
    }
