"""`rsmq gateway`: MQTT clients for a broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterable
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Literal

import anyio
import anyio.abc
import typer

from rsmq.broker import Broker
from rsmq.cli.gateway_metrics import serving
from rsmq.cli.load_broker import load_object
from rsmq.cli.output import Level, exit_code, log_to_stderr, print_error
from rsmq.cli.parameters import Url, duration_option
from rsmq.cli.serve import STDIN
from rsmq.errors import ConfigError, RsmqError
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.gateway.connections.limits import read_limits
from rsmq.telemetry.listener import Address
from rsmq.worker.collector import tune_garbage_collector
from rsmq.worker.supervisor import CONFIG_ERROR, MISCONFIGURED, READY, Supervisor


def gateway(
    target: Annotated[str, typer.Argument(metavar="MODULE:OBJECT", help="A Broker or a Gateway, such as app:broker.")],
    listen: Annotated[
        list[str] | None, typer.Option(help="mqtt://, mqtts://, ws:// or wss:// with host and port; repeatable.")
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option(metavar="FILTER=TOPIC", help="Store what matches in this topic; repeatable.")
    ] = None,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Clients without credentials may connect.")] = False,
    password_file: Annotated[Path | None, typer.Option(help="Users, as mosquitto_passwd writes them.")] = None,
    acl_file: Annotated[Path | None, typer.Option(help="Rights, in the format of Mosquitto's acl_file.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="For mqtts:// and wss://: PEM, with those that signed it.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, if it is in another file.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="mqtts:// and wss:// ask for certificates that these authorities have signed.")
    ] = None,
    certificate_user: Annotated[
        Literal["cn", "san"], typer.Option(help="The name in a client's certificate that is its user name.")
    ] = "cn",
    crl: Annotated[Path | None, typer.Option(help="Revoked certificates of clients, as PEM.")] = None,
    jwt_key: Annotated[
        Path | None, typer.Option(help="Public keys as PEM, or a secret: tokens are taken as passwords.")
    ] = None,
    jwt_audience: Annotated[str | None, typer.Option(help="What `aud` of a token must have.")] = None,
    jwt_issuer: Annotated[str | None, typer.Option(help="What `iss` of a token must be.")] = None,
    user_as_client_id: Annotated[
        bool, typer.Option("--user-as-client-id", help="A client may only use its user name as its client id.")
    ] = False,
    proxy: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Load balancers that send the header of the PROXY protocol; repeatable."),
    ] = None,
    per_address: Annotated[int, typer.Option(min=0, help="Most connections of one address; 0 is no limit.")] = 0,
    packet_rate: Annotated[int, typer.Option(min=0, help="Most packets of a client in a second; 0: no limit.")] = 0,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Any other limit, such as bytes=65536 a second; repeatable."),
    ] = None,
    origin: Annotated[
        list[str] | None, typer.Option(help="Web site whose pages may connect by ws:// and wss://; repeatable.")
    ] = None,
    keep_alive: Annotated[
        timedelta | None, duration_option("Longest keep-alive of version 5, such as 60s. Default: 20m.")
    ] = None,
    session_expiry: Annotated[
        timedelta | None, duration_option("Longest time that a session is kept without its client. Default: 7d.")
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
) -> None:
    """Connect MQTT clients to topics and inboxes.

    What they publish goes to topics, where handlers take it; what is meant for them waits in their inbox. SIGTERM or
    Ctrl-C closes the connections: their sessions go on at another gateway. SIGHUP reads the files of users, rights,
    keys and certificates again. Connections stay.
    """
    log_to_stderr(log_level, as_json=as_json)
    if url is not None:
        os.environ["RSMQ_URL"] = url  # the module creates its broker itself, and so do child processes
    if processes > 1 and not child:
        command = [sys.executable, "-m", "rsmq", *sys.argv[1:], "--child"]
        supervisor = Supervisor(command, processes, arguments=lambda slot: ("--slot", str(slot)), rereads=True)
        raise typer.Exit(anyio.run(supervisor.run))
    found = load_object(target)
    limits = read_limits(limit or ())
    given: dict[str, Any] = {
        "anonymous": anonymous, "password_file": password_file, "acl_file": acl_file, "certificate": certificate,
        "key": key, "client_ca": client_ca, "crl": crl, "jwt_key": jwt_key, "jwt_audience": jwt_audience,
        "jwt_issuer": jwt_issuer, "user_as_client_id": user_as_client_id, "proxies": tuple(proxy or ()),
        "most_per_address": per_address, "most_packets": packet_rate, "origins": tuple(origin or ()),
        "keep_alive": keep_alive, "session_expiry": session_expiry, **limits,
    }  # fmt: skip
    options = {name: each for name, each in given.items() if each or name in limits}
    if certificate_user != "cn":
        options["certificate_user"] = certificate_user
    if isinstance(found, Broker):
        found = Gateway(found, options=GatewayOptions(**options))
    elif not isinstance(found, Gateway):
        raise ConfigError(f"{target} is a {type(found).__name__}, not a Broker or a Gateway")
    elif options:
        raise ConfigError(f"{target} is a Gateway: give it its options in the code")
    if listen:
        found.listen = tuple(listen)
    for each in route or ():
        pattern, _, topic = each.rpartition("=")
        found.route(pattern, topic=topic)
    address = None if metrics is None else Address.parse(metrics).of_slot(slot)
    try:
        with nullcontext() if address is None else serving(found, address):
            anyio.run(serve, found, child, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    except (RsmqError, BaseExceptionGroup) as error:
        if child and exit_code(error) == CONFIG_ERROR:
            tell_parent(MISCONFIGURED)
        raise


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
