"""`rsmq device`: what waits for whom, and one living session."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeVar

import anyio
import typer

from rsmq.broker import Broker
from rsmq.cli.option import Json, Url, Yes, noun
from rsmq.cli.printer import as_data, confirm, dump, printable, say, tabulate
from rsmq.cli.session import NotFound, settings_for
from rsmq.cli.value import parse_headers, parse_payload, parse_span
from rsmq.errors import Malformed
from rsmq.persistence import Device, Letter

LONGEST = 1000
"""Characters of a payload shown to people; --json shows all."""
NUMBERS = ("backlog", "seq", "last_packet_id", "received", "dropped", "expired", "late")

T = TypeVar("T")

app = noun("Devices and their inboxes: list, show, send, tail, purge.")

ClientId = Annotated[str, typer.Argument(metavar="CLIENT", help="The device's client id.", show_default=False)]


def ask(url: str | None, question: Callable[[Broker], Awaitable[T]]) -> T:
    """Connect, do one thing, and return the answer."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)  # what preflight only warns of is for `rsmq doctor`

    async def conversation() -> T:
        async with Broker(settings_for(url)) as broker:
            return await question(broker)

    return anyio.run(conversation)


@app.command("list", epilog="Example: rsmq device list --waiting -n 50")
def list_(
    most: Annotated[int, typer.Option("-n", min=1, help="Most of them.")] = 20,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those with letters.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Devices with their backlog and what was dropped, in no order: there may be millions."""

    async def look(broker: Broker) -> tuple[list[Device], bool]:
        found: list[Device] = []
        async for device in broker.devices.iterate():
            if len(found) == most:
                return found, True
            if device.backlog or not waiting:
                found.append(device)
        return found, False

    devices, is_more = ask(url, look)
    if as_json:
        dump(devices)
        return
    columns = ("device", "#backlog", "#seq", "connected", "seen", "#dropped", "#expired", "#late")
    rows = (
        (each.client_id, each.backlog, each.seq, moment(each.connected_at), moment(each.seen_at), each.dropped,
         each.expired, each.late)
        for each in devices
    )  # fmt: skip
    tabulate(columns, rows, "no device has letters" if waiting else "there are no devices")
    if is_more:
        say(f"there are more: rsmq device list -n {most * 10}")


@app.command("show", epilog="Example: rsmq device show phone-42 -n 5")
def show(
    client: ClientId,
    most: Annotated[int, typer.Option("-n", min=1, max=1000, help="Most letters shown.")] = 10,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One device: its state, its counters, and the letters it would get next. Changes nothing."""

    async def look(broker: Broker) -> tuple[Device | None, list[Letter]]:
        return await broker.devices.find(client), await broker.devices.peek(client, count=most)

    device, letters = ask(url, look)
    if device is None:
        raise NotFound(f"nothing is known of device {client!r}: nobody has sent it anything, or it was forgotten")
    if as_json:
        dump(asdict(device) | {"letters": [as_object(letter) for letter in letters]})
        return
    say(f"device: {printable(device.client_id)}")
    for name in NUMBERS:
        say(f"{name.replace('_', ' ')}: {getattr(device, name)}")
    by = f"{moment(device.connected_at)} by {printable(device.gateway)}" if device.gateway else "no"
    say(f"connected: {by}")
    say(f"seen: {moment(device.seen_at) or 'never'}")
    for letter in letters:
        say(as_line(letter))


@app.command("send", epilog="""Example: rsmq device send phone-42 '{"text": "hello"}' --topic alerts --expiry PT2H""")
def send(
    client: ClientId,
    payload: Annotated[str, typer.Argument(help="JSON, or text.", show_default=False)],
    topic: Annotated[str, typer.Option(help="What it is about.")] = "",
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be repeated.")] = None,
    expiry: Annotated[
        timedelta | None, typer.Option(parser=parse_span, metavar="SPAN", help="Drop it after so long, as PT2H.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Take the payload as text, even if it is JSON.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Put a letter into an inbox."""
    content, headers = parse_payload(payload, is_text=text), parse_headers(header or [])

    async def act(broker: Broker) -> None:
        await broker.send(client, content, topic=topic, headers=headers, expiry=expiry)

    ask(url, act)
    dump({"device": client, "stored": 1}) if as_json else say(f"stored for {printable(client)}")


@app.command("tail", epilog="Example: rsmq device tail --client phone-42 --no-ack")
def tail(
    client: Annotated[str, typer.Option(metavar="CLIENT", help="The device to be.", show_default=False)],
    clean: Annotated[bool, typer.Option("--clean", help="Drop what is stored, and start empty.")] = False,
    window: Annotated[int, typer.Option(min=1, max=65_535, help="Most letters unacknowledged.")] = 100,
    no_ack: Annotated[bool, typer.Option("--no-ack", help="Acknowledge nothing: it all comes again.")] = False,
    most: Annotated[int | None, typer.Option("-n", min=1, help="End after so many.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Be a device: connect, which shuts out its other connection, print letters as they come, acknowledge them."""

    async def act(broker: Broker) -> None:
        async with broker.connect(client, clean=clean, window=window) as session:
            count = 0
            async for letter in session:
                dump(as_object(letter), is_line=True) if as_json else say(as_line(letter))
                if not no_ack:
                    await session.ack(letter)
                count += 1
                if count == most:
                    break

    with contextlib.suppress(KeyboardInterrupt):
        ask(url, act)


@app.command("purge", epilog="Example: rsmq device purge phone-42 --yes")
def purge(client: ClientId, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Delete what waits in an inbox. A connected device goes on with what comes afterwards."""
    device = ask(url, lambda broker: broker.devices.find(client))
    if device is None:
        raise NotFound(f"nothing is known of device {client!r}")
    confirm(f"Delete the {device.backlog} letters of device {client!r}?", is_agreed=yes)
    count = ask(url, lambda broker: broker.devices.purge(client))
    dump({"device": client, "purged": count}) if as_json else say(f"deleted {count} letters of {printable(client)}")


def moment(at: datetime | None) -> str | None:
    """To the second."""
    return None if at is None else at.strftime("%Y-%m-%d %H:%M:%SZ")


def as_line(letter: Letter) -> str:
    """For people, like a log."""
    mark = " received" if letter.is_received else " redelivered" if letter.is_redelivered else ""
    try:
        data = printable(letter.data.decode(errors="backslashreplace"))
        about = f" {printable(letter.topic)}" if letter.topic else ""
    except Malformed as error:
        return f"{letter.seq} packet {letter.packet_id}{mark} unreadable: {error}"
    if len(data) > LONGEST:
        data = f"{data[:LONGEST]}… ({len(letter.data)} bytes)"
    at = "" if letter.is_received else f"{letter.timestamp.strftime('%Y-%m-%d %H:%M:%S.%f')[:-3]}Z "
    return f"{at}{letter.seq} packet {letter.packet_id}{mark}{about} {data}"


def as_object(letter: Letter) -> dict[str, Any]:
    """For programs."""
    place: dict[str, Any] = {"seq": letter.seq, "packet_id": letter.packet_id}
    marks = {"redelivered": letter.is_redelivered, "received": letter.is_received}
    try:
        about: dict[str, Any] = {"topic": letter.topic, "type": letter.type, "headers": letter.headers}
    except Malformed as error:
        return place | marks | {"malformed": str(error)}
    times = {"timestamp": letter.timestamp, "expires_at": letter.expires_at}
    return place | marks | about | times | as_data(letter.data)
