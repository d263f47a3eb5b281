"""`rsmq publish`: one message from the command line, or one for every line of stdin."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, Any

import anyio
import anyio.to_thread
import typer

from rsmq.broker import Broker
from rsmq.cli.option import Json, TopicName, Url
from rsmq.cli.printer import dump, say
from rsmq.cli.session import settings_for
from rsmq.cli.value import parse_headers, parse_moment, parse_payload, parse_span

STDIN, READ = 0, 1 << 16
MOST_AT_ONCE = 500

Publish = Callable[[str], Awaitable[str]]


def publish(
    topic: TopicName,
    payload: Annotated[str, typer.Argument(help="JSON, or text; - for a message a line from stdin.")] = "-",
    key: Annotated[str | None, typer.Option(help="Messages with the same key stay in order.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be repeated.")] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=parse_span, metavar="SPAN", help="Deliver it so much later, as PT5S.")
    ] = None,
    at: Annotated[datetime | None, typer.Option(parser=parse_moment, metavar="TIME", help="Deliver it then.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="Stored once, however often it is published.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Take the payload as text, even if it is JSON.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish a message, and print its id when the server has confirmed it."""
    if payload == "-" and message_id is not None:
        raise typer.BadParameter("one id cannot be given to many lines: leave out --id")
    options: dict[str, Any] = {
        "key": key, "headers": parse_headers(header or []), "delay": delay, "at": at, "message_id": message_id,
    }  # fmt: skip

    logging.getLogger("rsmq").setLevel(logging.ERROR)  # what preflight only warns of is for `rsmq doctor`

    async def act() -> None:
        async with Broker(settings_for(url)) as broker:

            async def store(line: str) -> str:
                return await broker.publish(topic, parse_payload(line, is_text=text), **options)

            if payload == "-":
                count = await publish_lines(store)
                dump({"topic": topic, "published": count}) if as_json else say(f"published {count} messages to {topic}")
            else:
                stored = await store(payload)
                dump({"topic": topic, "id": stored}) if as_json else say(stored)

    anyio.run(act)


async def publish_lines(store: Publish) -> int:
    """Publish what comes in as it comes in; empty lines are no messages. Returns how many."""
    count = 0
    async for lines in read_lines():
        for at in range(0, len(lines), MOST_AT_ONCE):
            count += len(await asyncio.gather(*map(store, lines[at : at + MOST_AT_ONCE])))
    return count


async def read_lines() -> AsyncIterator[list[str]]:
    """The lines of stdin, as many at a time as have arrived."""
    rest = b""
    while chunk := await anyio.to_thread.run_sync(os.read, STDIN, READ, abandon_on_cancel=True):
        *whole, rest = (rest + chunk).split(b"\n")
        yield [text for line in whole if (text := decode(line))]
    yield [text for text in [decode(rest)] if text]


def decode(line: bytes) -> str:
    """A line without its end. What is not UTF-8 is no text: refused before anything of it is sent."""
    try:
        return line.rstrip(b"\r").decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"a line of stdin is not UTF-8: {error}") from None
