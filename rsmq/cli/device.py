"""`rsmq device`: devices, their inboxes, and a session in the terminal."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from rsmq.broker import Broker
from rsmq.cli.connection import OTHERWISE, NotFound, ask_broker, asked, writing_with
from rsmq.cli.failure import print_error
from rsmq.cli.output import as_data, confirm, print_json, print_line, print_result
from rsmq.cli.parameters import (
    PAYLOAD,
    AsText,
    Json,
    Most,
    Plain,
    Url,
    Yes,
    duration_option,
    noun,
    parse_headers,
    parse_payload,
)
from rsmq.cli.tables import print_rows
from rsmq.codecs.reading import Reading, codecs_beside, codecs_of
from rsmq.errors import Malformed
from rsmq.inspector.key_in_use import key_of_inbox
from rsmq.inspector.text import timestamp
from rsmq.model.words import count, printable
from rsmq.persistence import Device, Devices, Letter
from rsmq.persistence.inbox_cursor import LARGEST_WINDOW

LONGEST = 1000
"""Characters of a payload shown to people; --json shows all."""
NUMBERS = ("backlog", "seq", "last_packet_id", "received", "dropped", "expired", "late")

app = noun("Devices and their inboxes: list, show, send, tail, purge.")

ClientId = Annotated[str, typer.Argument(metavar="CLIENT", help="The device's client id.", show_default=False)]


@app.command("list", epilog="Example: rsmq device list --waiting -n 50")
def list_(
    most: Most = 20,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only devices with letters.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Devices with their backlog and dropped letters, in no order: there may be millions."""

    async def read(broker: Broker) -> tuple[list[Device], bool]:
        found: list[Device] = []
        async for device in broker.devices.iterate():
            if len(found) == most:
                return found, True
            if device.backlog or not waiting:
                found.append(device)
        return found, False

    devices, is_more = ask_broker(url, read)
    columns = ("device", "#backlog", "#seq", "connected", "seen", "#dropped", "#expired", "#late")
    rows = (
        (each.client_id, each.backlog, each.seq, timestamp(each.connected_at), timestamp(each.seen_at), each.dropped,
         each.expired, each.late)
        for each in devices
    )  # fmt: skip
    nothing = asked("no device has letters" if waiting else "there are no devices", url)
    print_rows(devices, columns, rows, nothing, as_json=as_json)
    if is_more:
        print_error(f"there are more devices: rsmq device list -n {most * 10}")


@app.command("show", epilog="Example: rsmq device show phone-42 -n 5")
def show(
    client: ClientId,
    most: Annotated[int, typer.Option("-n", min=1, max=1000, help="How many letters at most.")] = 10,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One device: its state, its counters, and its next letters. Changes nothing."""

    async def read(broker: Broker) -> tuple[Device | None, list[Letter]]:
        devices = Devices(broker.client, broker.keys, Reading())
        return await devices.find(client), await devices.peek(client, count=most)

    device, letters = ask_broker(url, read)
    if device is None:
        raise NotFound(f"device {client!r} is unknown: it never got a letter, or its state has expired")
    if as_json:
        print_json(asdict(device) | {"letters": [as_object(letter) for letter in letters]})
        return
    print_line(f"device: {printable(device.client_id)}")
    for name in NUMBERS:
        print_line(f"{name.replace('_', ' ')}: {getattr(device, name)}")
    by = f"{timestamp(device.connected_at)} by {printable(device.gateway)}" if device.gateway else "no"
    print_line(f"connected: {by}")
    print_line(f"seen: {timestamp(device.seen_at) or 'never'}")
    for letter in letters:
        print_line(as_line(letter))


@app.command("send", epilog="""Example: rsmq device send phone-42 '{"text": "hello"}' --topic alerts --expires 2h""")
def send(
    client: ClientId,
    payload: Annotated[str, typer.Argument(help=PAYLOAD, show_default=False)],
    topic: Annotated[str, typer.Option(help="The letter's topic.")] = "",
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header. May be repeated.")] = None,
    expires: Annotated[timedelta | None, duration_option("Drop it after this time, such as 2h.")] = None,
    text: AsText = False,
    plain: Plain = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Add a letter to an inbox. It is encrypted if the newest letter is, and in an empty inbox if RSMQ_KEYS is set."""
    content, headers = parse_payload(payload, is_text=text), parse_headers(header or [])

    async def act(broker: Broker) -> None:
        newest = "" if plain else await key_of_inbox(broker.client, broker.keys, client)
        async with writing_with(broker, codecs_beside(newest, f"the inbox of {client!r}", OTHERWISE)) as sender:
            await sender.send(client, content, topic=topic, headers=headers, expires=expires)

    ask_broker(url, act)
    print_result({"device": client, "stored": 1}, f"stored for {printable(client)}", as_json=as_json)


@app.command("tail", epilog="Example: rsmq device tail --client phone-42 --no-ack")
def tail(
    client: Annotated[str, typer.Option(metavar="CLIENT", help="The device to connect as.", show_default=False)],
    clean: Annotated[bool, typer.Option("--clean", help="Delete the stored letters first.")] = False,
    window: Annotated[
        int, typer.Option(min=1, max=LARGEST_WINDOW, help="How many letters may be unacknowledged.")
    ] = 100,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Acknowledge nothing: all letters are delivered again later.")
    ] = False,
    most: Annotated[int | None, typer.Option("-n", min=1, help="End after this many letters.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Connect as a device, print its letters as they come, and acknowledge them. Ends the device's other session.

    A letter whose key is not in RSMQ_KEYS is not acknowledged: the command ends there.
    """

    async def act(broker: Broker) -> None:
        async with broker.connect(client, clean=clean, window=window) as session:
            count = 0
            async for letter in session:
                if not no_ack:
                    require_key(letter)
                print_json(as_object(letter), is_line=True) if as_json else print_line(as_line(letter))
                if not no_ack:
                    await session.ack(letter)
                count += 1
                if count == most:
                    break

    with contextlib.suppress(KeyboardInterrupt):
        ask_broker(url, act, codecs=codecs_of())


@app.command("purge", epilog="Example: rsmq device purge phone-42 --yes")
def purge(client: ClientId, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Delete the letters of an inbox. A connected device continues with later letters."""
    device = ask_broker(url, lambda broker: broker.devices.find(client))
    if device is None:
        raise NotFound(f"device {client!r} is unknown")
    confirm(f"Delete {count(device.backlog, 'letter')} of device {client!r}?", is_agreed=yes)
    purged = ask_broker(url, lambda broker: broker.devices.purge(client))
    text = f"deleted {count(purged, 'letter')} of {printable(client)}"
    print_result({"device": client, "purged": purged}, text, as_json=as_json)


def require_key(letter: Letter) -> None:
    """Raise CannotDecode for a letter that needs a key or a codec that this process does not have."""
    with contextlib.suppress(Malformed):  # which is shown as such
        letter.data  # noqa: B018


def as_line(letter: Letter) -> str:
    """A letter as a line for people."""
    mark = " received" if letter.is_received else " redelivered" if letter.is_redelivered else ""
    try:
        about = f" {printable(letter.topic)}" if letter.topic else ""
        sealed = letter.sealed
        data = f"({sealed})" if sealed else printable(letter.data.decode(errors="backslashreplace"))
    except Malformed as error:
        return f"{letter.seq} packet {letter.packet_id}{mark} unreadable: {error}"
    if len(data) > LONGEST:
        data = f"{data[:LONGEST]}… ({count(len(letter.data), 'byte')})"  # not sealed: that text is short
    at = "" if letter.is_received else f"{letter.timestamp.strftime('%Y-%m-%d %H:%M:%S.%f')[:-3]}Z "
    return f"{at}{letter.seq} packet {letter.packet_id}{mark}{about} {data}"


def as_object(letter: Letter) -> dict[str, Any]:
    """A letter as JSON."""
    numbers: dict[str, Any] = {"seq": letter.seq, "packet_id": letter.packet_id}
    marks = {"redelivered": letter.is_redelivered, "received": letter.is_received}
    try:
        about: dict[str, Any] = {"topic": letter.topic, "type": letter.type, "headers": letter.headers}
        sealed = letter.sealed
    except Malformed as error:
        return numbers | marks | {"malformed": str(error)}
    times = {"timestamp": letter.timestamp, "expires": letter.expires}
    return numbers | marks | about | times | as_data(None if sealed else letter.data, letter.type, sealed)
