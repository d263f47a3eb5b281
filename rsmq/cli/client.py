"""`rsmq client`: the MQTT clients of all gateways."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from rsmq.broker import Broker
from rsmq.cli.connection import NotFound, ask_broker
from rsmq.cli.failure import print_error
from rsmq.cli.output import print_json, print_line, print_result
from rsmq.cli.parameters import Json, Url, noun
from rsmq.cli.tables import print_rows
from rsmq.errors import RsmqError
from rsmq.inspector.text import timestamp
from rsmq.model.words import printable
from rsmq.persistence.mqtt_clients import MqttClient, MqttClients

WAIT = 5.0
"""Seconds in which a gateway has to end a connection."""

app = noun("MQTT clients: list, show, kick.")

ClientId = Annotated[str, typer.Argument(metavar="CLIENT", help="The client id.", show_default=False)]


@app.command("list", epilog="Example: rsmq client list -n 50")
def list_(
    most: Annotated[int, typer.Option("-n", min=1, help="How many at most.")] = 20,
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

    async def read(broker: Broker) -> MqttClient | None:
        return await MqttClients(broker.client, broker.keys).find(client)

    found = ask_broker(url, read)
    if found is None:
        raise NotFound(f"MQTT client {client!r} is not connected and has no session")
    if as_json:
        print_json(as_object(found))
        return
    by = f"{timestamp(found.connected_at)} by {printable(found.gateway)}" if found.gateway else "no"
    print_line(f"client: {printable(found.client_id)}")
    print_line(f"connected: {by}")
    print_line(f"seen: {timestamp(found.seen_at) or 'never'}")
    print_line(f"session expiry: {found.expiry} s")
    print_line(f"waiting: {found.waiting}")
    print_line(f"dropped: {found.dropped}")
    print_line(f"will: {'yes' if found.has_will else 'no'}")
    for each in found.subscriptions:
        print_line(f"subscription: {printable(each.filter)} QoS {each.qos}{each.options and f', {each.options}'}")


@app.command("kick", epilog="Example: rsmq client kick sensor-7")
def kick(client: ClientId, url: Url = None, as_json: Json = False) -> None:
    """End the connection of a client. It may connect again: refuse it by password or ACL file if it should not."""

    async def act(broker: Broker) -> bool:
        try:
            return await MqttClients(broker.client, broker.keys).kick(client, WAIT)
        except TimeoutError:
            raise RsmqError(f"no gateway has ended the connection of {client!r} in {WAIT:g} s") from None

    if not ask_broker(url, act):
        raise NotFound(f"MQTT client {client!r} is not connected")
    print_result({"client": client, "kicked": True}, f"ended the connection of {printable(client)}", as_json=as_json)


def as_object(found: MqttClient) -> dict[str, Any]:
    """A client as JSON."""
    return asdict(found) | {"subscriptions": [each._asdict() for each in found.subscriptions]}
