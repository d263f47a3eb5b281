"""`rsmq retained`: the retained messages of MQTT."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rsmq.broker import Broker
from rsmq.cli.connection import ask_broker
from rsmq.cli.failure import print_error
from rsmq.cli.output import as_data, as_line, confirm, print_result
from rsmq.cli.parameters import Json, Most, Url, Yes, noun
from rsmq.cli.tables import print_rows
from rsmq.codecs.reading import Reading
from rsmq.errors import ConfigError
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.protocol.topic_filter import is_valid_filter
from rsmq.inspector.text import timestamp
from rsmq.model.words import count, printable
from rsmq.persistence.retained_messages import RetainedMessage, retained_message

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
    most: Most = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Retained messages that a filter matches."""
    check(pattern)

    async def read(broker: Broker) -> list[bytes]:
        return [each async for each in messages(broker).find(pattern, most + 1)]

    encoding = Reading()
    found = [retained_message(each, encoding) for each in ask_broker(url, read)]
    rows = (
        (each.topic, each.qos, timestamp(each.published), timestamp(each.expires), short(each)) for each in found[:most]
    )
    columns = ("topic", "#qos", "published", "expires", "payload")
    told = [as_object(each) for each in found[:most]]
    print_rows(told, columns, rows, f"no retained message matches {printable(pattern)}", as_json=as_json)
    if len(found) > most:
        print_error(f"there are more: rsmq retained list {printable(pattern)} -n {most * 10}")


@app.command("purge", epilog="Example: rsmq retained purge 'house/#' --yes")
def purge(
    pattern: Annotated[str, typer.Argument(metavar="FILTER", help="A topic filter; '#' is all.", show_default=False)],
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Remove the retained messages that a filter matches. Clients that have got them keep them.

    As in MQTT, a filter that begins with a wildcard matches no topic name that begins with $: name these, as '$app/#'.
    """
    check(pattern)
    confirm(f"Remove the retained messages of {printable(pattern)}?", is_agreed=yes)
    removed = ask_broker(url, lambda broker: messages(broker).purge(pattern))
    text = f"removed {count(removed, 'retained message')}"
    if pattern[0] in "#+":
        text += "; topic names that begin with $ stay, unless a filter begins with that level, such as '$app/#'"
    print_result({"filter": pattern, "purged": removed}, text, as_json=as_json)


def as_object(message: RetainedMessage) -> dict[str, Any]:
    """A message as JSON. Without its key `sealed` says why its payload is not shown."""
    about = {
        "topic": message.topic, "qos": message.qos, "published_at": message.published, "expires": message.expires
    }  # fmt: skip
    return about | as_data(message.data, None, message.sealed)


def short(message: RetainedMessage) -> str:
    """A payload for people."""
    text = as_line(message.data, message.sealed)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
