"""`rsmq retained`: the retained messages of MQTT."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rsmq.broker import Broker
from rsmq.cli.connection import ask_broker
from rsmq.cli.failure import print_error
from rsmq.cli.output import as_data, confirm, print_result
from rsmq.cli.parameters import Json, Url, Yes, noun
from rsmq.cli.tables import print_rows
from rsmq.codecs.reading import Reading
from rsmq.errors import ConfigError, MessageError
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.protocol.topic_filter import is_valid_filter
from rsmq.inspector.text import timestamp
from rsmq.model.clock import from_epoch_ms
from rsmq.model.encoding import Encoding, why_sealed
from rsmq.model.words import count, printable
from rsmq.persistence.letter import EXPIRES, read_mqtt

LONGEST = 60
"""Characters of a payload shown to people; --json shows all."""

app = noun("Retained messages of MQTT: list, purge.")

Filter = Annotated[str, typer.Argument(metavar="FILTER", help="A topic filter, such as 'house/#'.")]


def check(pattern: str) -> None:
    """Raise ConfigError for a filter that does not exist."""
    if not is_valid_filter(pattern):
        raise ConfigError(f"{pattern!r} is no topic filter: use text such as 'house/+/temperature' or '#'")


def messages(broker: Broker) -> Retained:
    """The retained messages of a server."""
    return Retained(broker.client, broker.keys, None, 0)


@app.command("list", epilog="Example: rsmq retained list 'house/#'")
def list_(
    pattern: Filter = "#",
    most: Annotated[int, typer.Option("-n", min=1, help="How many at most.")] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Retained messages that a filter matches."""
    check(pattern)

    async def read(broker: Broker) -> list[bytes]:
        return [each async for each in messages(broker).find(pattern, most + 1)]

    encoding = Reading()
    found = [as_object(each, encoding) for each in ask_broker(url, read)]
    rows = (
        (each["topic"], each["qos"], timestamp(each["published_at"]), timestamp(each["expires"]), short(each))
        for each in found[:most]
    )
    columns = ("topic", "#qos", "published", "expires", "payload")
    print_rows(found[:most], columns, rows, f"no retained message matches {printable(pattern)}", as_json=as_json)
    if len(found) > most:
        print_error(f"there are more: rsmq retained list {printable(pattern)} -n {most * 10}")


@app.command("purge", epilog="Example: rsmq retained purge 'house/#' --yes")
def purge(
    pattern: Annotated[str, typer.Argument(metavar="FILTER", help="A topic filter; '#' is all.", show_default=False)],
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Remove the retained messages that a filter matches. Clients that have got them keep them."""
    check(pattern)
    confirm(f"Remove the retained messages of {printable(pattern)}?", is_agreed=yes)
    removed = ask_broker(url, lambda broker: messages(broker).purge(pattern))
    text = f"removed {count(removed, 'retained message')}"
    print_result({"filter": pattern, "purged": removed}, text, as_json=as_json)


def as_object(envelope: bytes, encoding: Encoding) -> dict[str, Any]:
    """A message as JSON. `encoding` undoes its payload; without its key `sealed` says why that is not shown."""
    letter = read_mqtt(envelope)
    expires = from_epoch_ms(int.from_bytes(envelope[7:13], "big")) if letter.flags & EXPIRES else None
    published = from_epoch_ms(int.from_bytes(envelope[1:7], "big"))
    about = {"topic": letter.topic, "qos": letter.flags & 3, "published_at": published, "expires": expires}
    try:
        data = letter.data if letter.binding is None else encoding.undo(letter.data, letter.binding)
    except MessageError as error:
        enc = "" if letter.binding is None else letter.binding.enc.decode(errors="backslashreplace")
        return about | as_data(None, None, why_sealed(error, enc))
    return about | as_data(data, None)


def short(found: dict[str, Any]) -> str:
    """A payload for people."""
    if "sealed" in found:
        return f"({found['sealed']})"
    text = printable(str(found.get("data", found.get("data_base64", ""))))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
