"""`rsmq gateway`: MQTT clients for a broker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterable, Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from threading import Thread
from typing import Annotated, Any

import anyio
import anyio.abc
import typer

from rsmq.broker import Broker
from rsmq.cli.failure import exit_code, print_error
from rsmq.cli.gateway_metrics import serving
from rsmq.cli.load_broker import load_object
from rsmq.cli.log import Level, log_to_stderr, logging_of_module
from rsmq.cli.parameters import Url, example, options_of
from rsmq.cli.serve import STDIN, python_rsmq
from rsmq.errors import ConfigError, RsmqError
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.gateway.options import split_listen
from rsmq.telemetry.listener import Address
from rsmq.worker.collector import tune_garbage_collector
from rsmq.worker.supervisor import CONFIG_ERROR, MISCONFIGURED, READY, Supervisor

log = logging.getLogger("rsmq.gateway")


@options_of(GatewayOptions)
@example("rsmq gateway app:broker --listen mqtt://0.0.0.0:1883 --password-file passwords")
def gateway(
    target: Annotated[str, typer.Argument(metavar="MODULE:OBJECT", help="A Broker or a Gateway, such as app:broker.")],
    listen: Annotated[
        list[str] | None, typer.Option(help="mqtt://, mqtts://, ws:// or wss:// with host and port; repeatable.")
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(metavar="FILTER=TOPIC[@BAND]", help="Store what matches in this topic; repeatable."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=1024, help="How many; they share the ports.")] = 1,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve /metrics, /livez, /readyz here; each further process uses the next port."
        ),
    ] = None,
    slot: Annotated[int, typer.Option(hidden=True)] = 1,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    log_level: Annotated[Level, typer.Option(help="Lowest level that is logged.")] = "info",
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log one JSON object a line.")] = False,
    **given: Any,
) -> None:
    """Connect MQTT clients to topics and inboxes.

    What they publish goes to topics, where handlers take it; what is meant for them waits in their inbox. SIGTERM or
    Ctrl-C closes the connections: their sessions go on at another gateway. SIGHUP reads the files of users, rights,
    keys and certificates again. Connections stay.
    """
    if url is not None:
        os.environ["RSMQ_URL"] = url  # the module creates its broker itself, and so do child processes
    if processes > 1 and not child:
        log_to_stderr(log_level, as_json=as_json)
        warn_of_others(listen or ())
        command = [*python_rsmq(), *sys.argv[1:], "--child"]
        supervisor = Supervisor(command, processes, arguments=lambda slot: ("--slot", str(slot)), rereads=True)
        raise typer.Exit(anyio.run(supervisor.run))
    with logging_of_module(log_level, as_json=as_json):
        found = load_object(target)
    if isinstance(found, Broker):
        found = Gateway(found, options=GatewayOptions(**given))
    elif not isinstance(found, Gateway):
        raise ConfigError(f"{target} is a {type(found).__name__}, not a Broker or a Gateway")
    elif given:
        raise ConfigError(f"{target} is a Gateway: give it its options in the code")
    if listen:
        found.listen = tuple(listen)
    for each in route or ():
        pattern, equals, target = each.rpartition("=")
        if not equals:
            raise ConfigError(f"--route {each!r} names no topic: write FILTER=TOPIC, such as 'sensors/#=sensors'")
        topic, _, band = target.partition("@")
        found.route(pattern, topic=topic, band=band or None)
    if not child:
        warn_of_others(found.listen)
    address = None if metrics is None else Address.parse(metrics).of_slot(slot)
    try:
        with nullcontext() if address is None else serving(found, address):
            anyio.run(serve, found, child, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    except (RsmqError, BaseExceptionGroup) as error:
        if child and exit_code(error) == CONFIG_ERROR:
            tell_parent(MISCONFIGURED)
        raise


def warn_of_others(listen: Iterable[str]) -> None:
    """Processes of one user may share a port, so the system does not refuse a second deployment. Each of the two would
    get some of the other's clients."""
    for each in listen:
        address = split_listen(each)
        with contextlib.suppress(OSError):
            socket.create_connection((address.host, address.port), timeout=1).close()
            log.warning(
                "another process listens on %s, too, and gets some of the clients: that is right for a gateway of the "
                "same deployment; if it is another one, give one of them another port", each,
            )  # fmt: skip


async def serve(gateway: Gateway, is_child: bool) -> None:
    """Run until a signal. A child process stops when its parent has ended."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        async with anyio.create_task_group() as tasks:

            async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
                await gateway.run(task_status=task_status)
                tasks.cancel_scope.cancel()

            tasks.start_soon(obey, gateway, received)
            await tasks.start(run)
            tune_garbage_collector()
            if is_child:
                tell_parent(READY)
                loop = asyncio.get_running_loop()
                # a daemon: the process may end while this thread still reads
                Thread(target=watch_parent, args=(loop, gateway), name="rsmq-parent", daemon=True).start()


def tell_parent(word: bytes) -> None:
    """Tell the parent process, which may have ended."""
    with contextlib.suppress(OSError):
        os.write(STDIN, word + b"\n")


def watch_parent(loop: asyncio.AbstractEventLoop, gateway: Gateway) -> None:
    """Stop when the parent process has ended, however it did."""
    with contextlib.suppress(OSError):
        while os.read(STDIN, 4096):
            pass
    with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends, too
        loop.call_soon_threadsafe(gateway.stop)


async def obey(gateway: Gateway, received: AsyncIterable[int]) -> None:
    """Act on signals."""
    async for number in received:
        if number != signal.SIGHUP:
            gateway.stop()
        else:
            try:
                gateway.reload()
            except ConfigError as error:
                print_error(f"the files are not read again: {error}")
