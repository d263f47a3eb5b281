"""The command `rsmq demo`."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from pydantic_core import to_json
from rich.console import Console
from rich.live import Live

from rsmq.broker import Broker
from rsmq.cli.demo.flight import Departure, read_departures
from rsmq.cli.demo.mqtt_result import MqttResult
from rsmq.cli.demo.result import TOPIC, DemoResult
from rsmq.cli.demo.run import DemoPlan, DemoRun, workers
from rsmq.cli.demo.screen import Timeline, show_result
from rsmq.cli.parameters import example
from rsmq.errors import ConfigError
from rsmq.model.clock import monotonic
from rsmq.model.settings import Overrides, Settings

FLIGHTS = 60_000
PACE = 4000
"""Departures published per second by default: slow enough to watch."""
MQTT_PACE = 300
"""The same by MQTT clients, all of which run in this process."""


@example("rsmq demo --all")
def demo(
    mqtt: Annotated[bool, typer.Option("--mqtt", help="Aircraft as MQTT clients; a gateway is killed.")] = False,
    flights: Annotated[
        int | None, typer.Option(min=100, help="How many departures, from 1 January on. Default: 60 000.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All 336 776 of the year, as fast as they go.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=2, max=64, help="Worker processes. Default: 4. With --mqtt gateways: 2.")
    ] = None,
    aircraft: Annotated[int, typer.Option(min=2, max=500, help="With --mqtt: how many aircraft are clients.")] = 40,
    partitions: Annotated[int, typer.Option(min=1, max=256, help="Partitions of the topic.")] = 8,
    kill: Annotated[bool, typer.Option(help="Kill a worker, or a gateway, in the middle.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the topic and the ledger.")] = False,
    url: Annotated[str | None, typer.Option("--url", help="The server. Default: RSMQ_URL, else embedded.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Send real departures through several worker processes, kill one of them, and print a result.

    Two groups handle each departure: one notifies the passengers of late flights (PUSH, else SMS, else AlimTalk), one
    audits in batches. With --mqtt, aircraft publish their departures as MQTT clients, a handler answers each of them,
    a tower reads all of them over WebSocket, and a gateway is killed. Exit code 1 if any promise was broken.
    """
    console = Console(stderr=as_json)
    with console.status("reading the flights"):
        departures = read_departures(None if everything else flights or FLIGHTS)
    overrides: Overrides = {"prefix": f"demo-{secrets.token_hex(4)}", "partitions": partitions}
    if url is not None:
        overrides["url"] = url
    settings = Settings(**overrides)
    directory = Path(tempfile.mkdtemp(prefix="rsmq-demo-"))
    result: DemoResult | MqttResult
    if mqtt:
        result = anyio.run(perform_mqtt, settings, departures, aircraft, kill, processes or 2, directory, console, keep)
        found = asdict(result)
    else:
        plan = DemoPlan(departures, 0 if everything else len(departures) / PACE, kill)
        result = anyio.run(perform, settings, plan, processes or 4, directory, console, keep)
        show_result(console, result, str(directory / "workers.log"))
        found = summary(result)
    if as_json:
        typer.echo(to_json({"is_good": result.is_good, **found}, indent=2).decode())
    if result.is_good and not keep:
        shutil.rmtree(directory)
    raise typer.Exit(0 if result.is_good else 1)


async def perform_mqtt(
    settings: Settings, departures: list[Departure], aircraft: int, is_deadly: bool, gateways: int, directory: Path,
    console: Console, keep: bool,
) -> MqttResult:  # fmt: skip
    """Connect, start gateways and a worker, run the MQTT demo, clean up, and show the result."""
    if find_spec("paho") is None or find_spec("websockets") is None:
        raise ConfigError("the demo's MQTT clients need the extra demo: pip install 'rsmq[demo]'")
    course = import_module("rsmq.cli.demo.mqtt_run")  # its clients are an extra
    chosen = course.of_busiest(departures, aircraft)
    plan = course.MqttPlan(chosen, len(chosen) / MQTT_PACE, is_deadly, gateways)
    async with Broker(settings) as broker:
        environment = {
            "RSMQ_URL": broker.url, "RSMQ_PREFIX": settings.prefix, "RSMQ_PARTITIONS": str(settings.partitions)
        }  # fmt: skip
        with course.fleet(gateways, directory, environment) as running, drawn(console) as redraw:
            result: MqttResult = await course.MqttDemoRun(plan, running, directory, redraw).run()
        if not keep:
            await forget(broker)
    course.show_mqtt_result(console, result, str(directory))
    return result


async def forget(broker: Broker) -> None:
    """Delete everything of this demo: its prefix is its own."""
    client = broker.client
    for node in client.nodes:
        cursor = b"0"
        while True:
            cursor, found = await node.execute_command("SCAN", cursor, "MATCH", f"{broker.keys.prefix}:*", "COUNT", 500)
            for key in found:
                await client.execute_command("DEL", key)
            if cursor == b"0":
                break


@contextmanager
def drawn(console: Console) -> Iterator[Callable[[Any], None]]:
    """Draws the state: live on a terminal, else as lines."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, transient=False) as live:
            yield lambda screen: live.update(screen.draw())
    else:
        yield plain(console)


async def perform(
    settings: Settings, plan: DemoPlan, processes: int, directory: Path, console: Console, keep: bool
) -> DemoResult:
    """Connect, start the workers, run the demo, clean up."""
    async with Broker(settings) as broker:
        partitions = str(settings.partitions)
        environment = {"RSMQ_URL": broker.url, "RSMQ_PREFIX": settings.prefix, "RSMQ_PARTITIONS": partitions}
        with workers(processes, directory, environment), drawn(console) as redraw:
            result = await DemoRun(broker, plan, directory, redraw).run()
        if not keep:
            await broker.topics.delete(TOPIC)
    return result


def plain(console: Console) -> Callable[[Timeline], None]:
    """Print every event, and the state each second."""
    shown, last = 0, 0.0

    def redraw(screen: Timeline) -> None:
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
