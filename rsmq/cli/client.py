"""`rsmq client`: the MQTT clients of all gateways."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import anyio
import typer

from rsmq.broker import Broker
from rsmq.cli.connection import NotFound, ask_broker
from rsmq.cli.failure import print_error
from rsmq.cli.output import print_json, print_line, print_result
from rsmq.cli.parameters import Json, Most, Url, duration_option, noun
from rsmq.cli.tables import print_rows
from rsmq.control.audit import Audit, State, user_name
from rsmq.errors import ConfigError, RsmqError
from rsmq.inspector.text import timestamp
from rsmq.model.clock import from_epoch_ms
from rsmq.model.words import count, printable
from rsmq.persistence.mqtt_bans import KINDS, Ban, BanKind, MqttBans, checked
from rsmq.persistence.mqtt_clients import MqttClient, MqttClients, MqttConnection
from rsmq.persistence.mqtt_traces import MqttTraces

WAIT = 5.0
"""Seconds in which a gateway has to end a connection."""

app = noun("MQTT clients: list, show, kick, ban, trace.")

ClientId = Annotated[str, typer.Argument(metavar="CLIENT", help="The client id.", show_default=False)]


@app.command("list", epilog="Example: rsmq client list -n 50")
def list_(
    most: Most = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Connected clients and their gateways, in no order."""

    async def read(broker: Broker) -> tuple[list[tuple[str, str]], bool]:
        found: list[tuple[str, str]] = []
        async for each in MqttClients(broker.client, broker.keys).connected():
            if len(found) == most:
                return found, True
            found.append(each)
        return found, False

    found, is_more = ask_broker(url, read)
    rows = [{"client": client, "gateway": gateway} for client, gateway in found]
    print_rows(rows, ("client", "gateway"), iter(found), "no MQTT client is connected", as_json=as_json)
    if is_more:
        print_error(f"there are more clients: rsmq client list -n {most * 10}")


@app.command("show", epilog="Example: rsmq client show sensor-7")
def show(client: ClientId, url: Url = None, as_json: Json = False) -> None:
    """One client: its connection, its session and its subscriptions."""

    async def read(broker: Broker) -> tuple[MqttClient | None, MqttConnection | None]:
        clients = MqttClients(broker.client, broker.keys)
        found = await clients.find(client)
        return found, None if found is None else await clients.connection(found)

    found, connection = ask_broker(url, read)
    if found is None:
        raise NotFound(f"MQTT client {client!r} is not connected and has no session")
    if as_json:
        print_json(as_object(found) | {"connection": connection})
        return
    by = f"{timestamp(found.connected_at)} by {printable(found.gateway)}" if found.gateway else "no"
    print_line(f"client: {printable(found.client_id)}")
    print_line(f"connected: {by}")
    if connection is not None:
        print_line(f"address: {printable(connection.address) or 'unknown'}")
        print_line(f"user: {printable(connection.user or 'none')}")
        print_line(f"protocol: {connection.protocol or 'unknown'}")
        print_line(f"keep alive: {f'{connection.keep_alive} s' if connection.keep_alive else 'none'}")
    print_line(f"seen: {timestamp(found.seen_at) or 'never'}")
    print_line(f"session expiry: {found.expiry} s")
    print_line(f"waiting: {found.waiting}")
    print_line(f"dropped: {found.dropped}")
    print_line(f"will: {'yes' if found.has_will else 'no'}")
    for each in found.subscriptions:
        print_line(f"subscription: {printable(each.filter)} QoS {each.qos}{each.options and f', {each.options}'}")


@app.command("kick", epilog="Example: rsmq client kick sensor-7")
def kick(client: ClientId, url: Url = None, as_json: Json = False) -> None:
    """End the connection of a client. It may connect again, unless `rsmq client ban` refuses it."""

    async def run(broker: Broker) -> str:
        clients = MqttClients(broker.client, broker.keys)

        async def state() -> State:
            found = await clients.find(client)
            return {"client": client, "gateway": found.gateway if found else None}

        async def act() -> str:
            try:
                is_kicked = await clients.kick(client, WAIT)
            except TimeoutError:
                raise RsmqError(f"no gateway has ended the connection of {client!r} in {WAIT:g} s") from None
            if not is_kicked:
                raise NotFound(f"MQTT client {client!r} is not connected")
            return f"ended the connection of {client}"

        return await record(broker, "kick-client", state, act)

    print_result({"client": client, "kicked": True}, printable(ask_broker(url, run)), as_json=as_json)


async def record(
    broker: Broker, what: str, state: Callable[[], Awaitable[State]], act: Callable[[], Awaitable[str]]
) -> str:
    """Do something, and note it in the audit with the user of this process."""
    audit = Audit(broker.client, broker.keys)
    return await audit.record(f"rsmq client of {user_name()}", what, ("", ""), state, act)


Banned = Annotated[
    str | None, typer.Argument(metavar="[CLIENT]", help="The client id.", show_default=False)
]  # one of these three
User = Annotated[str | None, typer.Option("--user", metavar="NAME", help="A user in place of a client id.")]
Address = Annotated[str | None, typer.Option("--address", metavar="IP", help="An address, or a network 10.0.0.0/8.")]


def banned(client: str | None, user: str | None, address: str | None) -> tuple[BanKind, str]:
    """What a ban is about. Raises ConfigError unless it is one thing."""
    given: list[tuple[BanKind, str]] = [
        (kind, name) for kind, name in zip(KINDS, (client, user, address), strict=True) if name is not None
    ]
    if len(given) != 1:
        raise ConfigError("name one thing: a client id, --user NAME or --address IP")
    return given[0]


@app.command("ban", epilog="Example: rsmq client ban sensor-7 --for 1h")
def ban(
    client: Banned = None,
    user: User = None,
    address: Address = None,
    span: Annotated[timedelta | None, duration_option("How long. Default: until `unban`.", "--for")] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the list.")] = "",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Refuse a client, a user or an address, and end its connections. Sessions stay, and wills are published."""
    kind, name = banned(client, user, address)

    put = list[Ban]()

    async def run(broker: Broker) -> str:
        bans = MqttBans(broker.client, broker.keys)

        async def act() -> str:
            put.append(found := await bans.put(kind, name, span, reason))
            until = f"until {timestamp(found.until)}" if found.until else "without an end"
            return f"{kind} {found.name} is banned {until}"

        return await record(broker, "ban-client", partial(ban_of, bans, kind, name), act)

    text = ask_broker(url, run)
    print_result(asdict(put[0]), printable(text), as_json=as_json)


async def ban_of(bans: MqttBans, kind: BanKind, name: str) -> State:
    """The ban of a name, for the audit. Raises ConfigError for a wrong name."""
    wanted = checked(kind, name)
    found = [asdict(each) for each in await bans.in_force() if (each.kind, each.name) == (kind, wanted)]
    return {"kind": kind, "name": wanted, "ban": found[0] if found else None}


@app.command("unban", epilog="Example: rsmq client unban --user ada")
def unban(
    client: Banned = None, user: User = None, address: Address = None, url: Url = None, as_json: Json = False
) -> None:
    """End a ban. At the latest after five seconds every gateway lets the client in."""
    kind, name = banned(client, user, address)

    async def run(broker: Broker) -> str:
        bans = MqttBans(broker.client, broker.keys)

        async def act() -> str:
            if not await bans.remove(kind, name):
                raise NotFound(f"{kind} {name!r} is not banned")
            return f"{kind} {name} is not banned any more"

        return await record(broker, "unban-client", partial(ban_of, bans, kind, name), act)

    text = printable(ask_broker(url, run))
    print_result({"kind": kind, "name": name, "banned": False}, text, as_json=as_json)


@app.command("bans", epilog="Example: rsmq client bans")
def bans(url: Url = None, as_json: Json = False) -> None:
    """What is banned, until when, and why."""

    async def read(broker: Broker) -> list[Ban]:
        return await MqttBans(broker.client, broker.keys).in_force()

    found = ask_broker(url, read)
    rows = (
        (each.kind, each.name, timestamp(each.since), timestamp(each.until) if each.until else "unban", each.reason)
        for each in found
    )
    print_rows(found, ("kind", "name", "since", "until", "reason"), rows, "nothing is banned", as_json=as_json)


@app.command("trace", epilog="Example: rsmq client trace sensor-7 --for 1min")
def trace(
    client: ClientId,
    payloads: Annotated[bool, typer.Option("--payloads", help="Show payloads, too: at most 4 KiB of each.")] = False,
    span: Annotated[timedelta | None, duration_option("How long. Default: until Ctrl-C.", "--for")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the packets of a client as they pass, also when it connects later. It is noted in the audit."""

    async def act(broker: Broker) -> str:
        seen = 0

        def show(packet: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            print_json(packet, is_line=True) if as_json else print_line(packet_line(packet))

        with anyio.move_on_after(None if span is None else span.total_seconds()):
            await MqttTraces(broker.client, broker.keys).follow(client, show, payloads=payloads)
        return f"saw {count(seen, 'packet')} of {client}"

    async def run(broker: Broker) -> str:
        if await MqttClients(broker.client, broker.keys).find(client) is None:
            print_error(f"{printable(client)} is not connected: its packets are shown when it connects")

        async def state() -> State:
            return {"client": client, "payloads": payloads}

        return await record(broker, "trace-client", state, lambda: act(broker))

    with contextlib.suppress(KeyboardInterrupt):
        print_error(ask_broker(url, run))


def packet_line(packet: dict[str, Any]) -> str:
    """A packet for people."""
    at = from_epoch_ms(int(packet.pop("at_ms"))).strftime("%H:%M:%S.%f")[:-3]
    way = "<-" if packet.pop("way") == "out" else "->"
    name, size = packet.pop("packet"), packet.pop("bytes", None)
    packet.pop("client", None)
    rest = " ".join(f"{key}={printable(str(value))}" for key, value in packet.items() if value not in (None, False))
    return " ".join(filter(None, (at, way, str(name), rest, f"({size} bytes)" if size else "")))


def as_object(found: MqttClient) -> dict[str, Any]:
    """A client as JSON."""
    return asdict(found) | {"subscriptions": [each._asdict() for each in found.subscriptions]}
