"""`rsmq worker`: serve a broker, in this process or in several."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from pydantic import TypeAdapter

from rsmq.broker import Broker
from rsmq.cli.collector import relax
from rsmq.cli.journal import Level, log_to_stderr
from rsmq.cli.option import Url
from rsmq.cli.service import Service, has_stuck_threads, leave
from rsmq.cli.target import load_broker
from rsmq.cli.value import parse_span
from rsmq.errors import ConfigError
from rsmq.supervisor import Supervisor, signals
from rsmq.telemetry import Endpoint, note_messages
from rsmq.telemetry.endpoint import Address
from rsmq.worker import Lifespan


def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:BROKER", help="Such as app:broker, found from here.", show_default=False)
    ],
    processes: Annotated[int, typer.Option(min=1, max=1024, help="How many; a dead one is started again.")] = 1,
    reload: Annotated[bool, typer.Option("--reload", help="Start again when a .py file here changes.")] = False,
    grace: Annotated[
        timedelta | None,
        typer.Option(
            parser=parse_span, metavar="SPAN", help="What runs gets so long to finish. Default: RSMQ_STOP_GRACE."
        ),
    ] = None,
    log_level: Annotated[Level, typer.Option(help="Least level that is logged.")] = "info",
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer /metrics, /livez, /readyz here; of several processes each at the next port. "
            "Default: RSMQ_METRICS.",
        ),
    ] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    slot: Annotated[int, typer.Option(hidden=True)] = 1,
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON, an object a line.")] = False,
) -> None:
    """Run the handlers of a broker.

    SIGTERM or Ctrl-C: take nothing new, finish within the grace, hand back the rest; once more: hand back now; a third
    time: leave at once. SIGUSR1: take nothing new, finish what runs, leave.
    """
    log_to_stderr(log_level, as_json=as_json)
    if url is not None:
        os.environ["RSMQ_URL"] = url  # the module makes its broker itself, and so do our children
    if processes == 1 and not reload:
        serve(target, grace, metrics, slot, is_child=child, notes_messages=as_json)
        return
    command = [sys.executable, "-m", "rsmq", "worker", target, "--child", "--log-level", log_level]
    command += [] if grace is None else ["--grace", TypeAdapter(timedelta).dump_python(grace, mode="json")]
    command += ["--json"] if as_json else []
    command += [] if metrics is None else ["--metrics", str(Address.parse(metrics))]
    supervisor = Supervisor(
        command, processes, watcher() if reload else None, lambda slot: ("--slot", str(slot))
    )  # fmt: skip
    raise typer.Exit(anyio.run(supervisor.run))


def serve(
    target: str, grace: timedelta | None, metrics: str | None, slot: int, *, is_child: bool, notes_messages: bool
) -> None:
    """Run one broker in this process until it has stopped."""
    service = Service(grace)
    with signals(service.obey):
        broker = load_broker(target)
        if not (broker.handlers or broker.schedules):
            raise ConfigError(f"{target} has no handler: register one with @broker.handler(topic, group=...)")
        if is_child:
            service.watch_parent()
        if notes_messages:
            note_messages(broker)
        watched = around(broker, metrics, slot)
        relax()
        service.serve(broker, watched)
    if has_stuck_threads():
        leave(0)


def around(broker: Broker, metrics: str | None, slot: int) -> Lifespan:
    """What a broker is served in: an endpoint, where one is wanted."""
    address = broker.settings.metrics if metrics is None else metrics
    return nullcontext if address is None else Endpoint(broker, Address.parse(address).of_slot(slot)).serving


def watcher() -> Callable[[], AsyncIterator[Any]]:
    """What tells of changed .py files below the current directory."""
    try:
        from watchfiles import PythonFilter, awatch
    except ImportError:
        raise ConfigError("--reload needs the extra `reload`: pip install 'rsmq[reload]'") from None
    return lambda: awatch(Path.cwd(), watch_filter=PythonFilter())
