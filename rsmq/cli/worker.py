"""`rsmq worker`: serve a broker, in this process or in several."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from signal import Signals
from typing import Annotated, Any, Final

import anyio
import typer
from pydantic import TypeAdapter

from rsmq.broker import Broker
from rsmq.cli.failure import exit_code
from rsmq.cli.load_broker import load_broker
from rsmq.cli.log import Level, log_to_stderr, logging_of_module
from rsmq.cli.parameters import Url, duration_option, example
from rsmq.cli.serve import ServedProcess, has_stuck_threads, leave, python_rsmq
from rsmq.errors import ConfigError, RsmqError
from rsmq.handler.selection import Serving
from rsmq.redis.embedded.server import log_server
from rsmq.telemetry import Endpoint, note_messages
from rsmq.telemetry.listener import Address
from rsmq.worker.collector import tune_garbage_collector
from rsmq.worker.supervisor import CONFIG_ERROR, MISCONFIGURED, Supervisor, signals
from rsmq.worker.worker import Lifespan

log: Final = logging.getLogger("rsmq.worker")


@example("rsmq worker app:broker --only 'sms/*' --concurrency 20 --processes 4")
def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:BROKER", help="Such as app:broker, from the current directory.")
    ],
    processes: Annotated[int, typer.Option(min=1, max=1024, help="How many; one that exits is restarted.")] = 1,
    reload: Annotated[bool, typer.Option("--reload", help="Restart when a .py file here changes.")] = False,
    grace: Annotated[
        timedelta | None, duration_option("Time for running handlers to finish at a stop. Default: RSMQ_STOP_GRACE.")
    ] = None,
    log_level: Annotated[Level, typer.Option(help="Lowest level that is logged.")] = "info",
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve /metrics, /livez, /readyz here; each further process uses the next port. "
            "Default: RSMQ_METRICS.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC/GROUP",
            help="Serve the handlers that are like this, such as 'sms/*', '*/billing' or sms; can be repeated. "
            "Schedules and outboxes run in every worker. Default: all.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Calls at once of each handler, in place of its own number.")
    ] = None,
    max_messages: Annotated[
        int | None,
        typer.Option(min=1, help="After so many messages a process ends in order, and a new one takes its place."),
    ] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    slot: Annotated[int, typer.Option(hidden=True)] = 1,
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log one JSON object a line.")] = False,
) -> None:
    """Run the handlers of a broker.

    SIGTERM, SIGHUP or Ctrl-C: stop fetching, let running handlers finish within the grace, hand back the rest; a
    second time: hand back now; a third time: exit at once. SIGUSR1: stop fetching, let running handlers finish, exit.
    """
    if url is not None:
        os.environ["RSMQ_URL"] = url  # the module creates its broker itself, and so do child processes
    serving = Serving(tuple(only or ()), concurrency, max_messages)
    if child or (processes == 1 and not reload and max_messages is None):
        service = ServedProcess(grace, serving)
        serve(service, target, metrics, slot, log_level, is_child=child, is_json=as_json)
        return
    log_to_stderr(log_level, as_json=as_json)
    command = [*python_rsmq(), "worker", target, "--child", "--log-level", log_level]
    command += [] if grace is None else ["--grace", TypeAdapter(timedelta).dump_python(grace, mode="json")]
    command += ["--json"] if as_json else []
    command += [] if metrics is None else ["--metrics", str(Address.parse(metrics))]
    for name, values in (
        ("--only", serving.only),
        ("--concurrency", (concurrency,)),
        ("--max-messages", (max_messages,)),
    ):
        command += [part for value in values if value is not None for part in (name, str(value))]
    supervisor = Supervisor(command, processes, watcher() if reload else None, lambda slot: ("--slot", str(slot)))
    raise typer.Exit(anyio.run(supervisor.run))


def serve(
    service: ServedProcess, target: str, metrics: str | None, slot: int, level: Level, *, is_child: bool, is_json: bool
) -> None:
    """Run one broker in this process until it has stopped."""
    with signals(service.obey) as take_back:
        try:
            broker = load(target, take_back, level, is_json=is_json)
            run(service, broker, metrics, slot, is_child=is_child, is_json=is_json)
        except (RsmqError, BaseExceptionGroup) as error:
            if is_child and exit_code(error) == CONFIG_ERROR:
                service.tell_parent(MISCONFIGURED)
            raise
        if is_child:
            service.tell_parent(service.last_word)
    if has_stuck_threads():
        leave(0)


def load(target: str, take_back: Callable[[], list[Signals]], level: Level, *, is_json: bool) -> Broker:
    """Load the broker. Its module may set up logging; the signals that stop a worker stay ours."""
    with logging_of_module(level, as_json=is_json):
        broker = load_broker(target)
    for number in take_back():
        log.warning(
            "a module of %s handles %s by itself: the worker takes that signal back, or it could not stop in order. Do "
            "what your application needs at its end in a lifespan",
            target, number.name,
        )  # fmt: skip
    if not (broker.handlers or broker.declared_schedules or broker.services):
        raise ConfigError(f"{target} has no handler: register one with @broker.handler(topic, group=...)")
    return broker


def run(
    service: ServedProcess, broker: Broker, metrics: str | None, slot: int, *, is_child: bool, is_json: bool
) -> None:
    """Serve the broker."""
    log_server(broker.settings)
    if is_child:
        service.watch_parent()
        broker.lifespan(service.introducing)
    if is_json:
        note_messages(broker)
    context = around(broker, metrics, slot)
    tune_garbage_collector()
    service.serve(broker, context)


def around(broker: Broker, metrics: str | None, slot: int) -> Lifespan:
    """The context that a broker runs in: an endpoint, if metrics are on."""
    address = broker.settings.metrics if metrics is None else metrics
    return nullcontext if address is None else Endpoint(broker, Address.parse(address).of_slot(slot)).serving


def watcher() -> Callable[[], AsyncIterator[Any]]:
    """Watches .py files below the current directory."""
    try:
        from watchfiles import PythonFilter, awatch
    except ImportError:
        raise ConfigError("--reload needs the extra `reload`: pip install 'rsmq[reload]'") from None
    return lambda: awatch(Path.cwd(), watch_filter=PythonFilter())
