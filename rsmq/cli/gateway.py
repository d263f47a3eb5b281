"""`rsmq gateway`: MQTT clients for a broker."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import anyio
import typer

from rsmq.broker import Broker
from rsmq.cli.load_broker import load_object
from rsmq.cli.output import Level, log_to_stderr, print_error
from rsmq.cli.parameters import Url
from rsmq.errors import ConfigError
from rsmq.gateway import Gateway, GatewayOptions


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
    origin: Annotated[
        list[str] | None, typer.Option(help="Web site whose pages may connect by ws:// and wss://; repeatable.")
    ] = None,
    log_level: Annotated[Level, typer.Option(help="Lowest level that is logged.")] = "info",
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log one JSON object a line.")] = False,
) -> None:
    """Connect MQTT clients to topics and inboxes.

    What they publish goes to topics, where handlers take it; what is meant for them waits in their inbox. SIGTERM or
    Ctrl-C closes the connections: their sessions go on at another gateway. SIGHUP reads the files again.
    """
    log_to_stderr(log_level, as_json=as_json)
    if url is not None:
        os.environ["RSMQ_URL"] = url  # the module creates its broker itself
    found = load_object(target)
    if isinstance(found, Broker):
        options = GatewayOptions(
            anonymous=anonymous, password_file=password_file, acl_file=acl_file, certificate=certificate, key=key,
            origins=tuple(origin or ()),
        )  # fmt: skip
        found = Gateway(found, options=options)
    elif not isinstance(found, Gateway):
        raise ConfigError(f"{target} is a {type(found).__name__}, not a Broker or a Gateway")
    elif anonymous or password_file or acl_file or certificate or key or origin:
        raise ConfigError(f"{target} is a Gateway: give it its options in the code")
    if listen:
        found.listen = tuple(listen)
    for each in route or ():
        pattern, _, topic = each.rpartition("=")
        found.route(pattern, topic=topic)
    anyio.run(serve, found, backend_options={"use_uvloop": find_spec("uvloop") is not None})


async def serve(gateway: Gateway) -> None:
    """Run until a signal."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(obey, gateway, received)
            await gateway.run()
            tasks.cancel_scope.cancel()


async def obey(gateway: Gateway, received: AsyncIterable[int]) -> None:
    """Act on signals."""
    async for number in received:
        if number != signal.SIGHUP:
            gateway.stop()
        elif gateway.gatekeeper is not None:
            try:
                gateway.gatekeeper.load()
            except ConfigError as error:
                print_error(f"the files are not read again: {error}")
