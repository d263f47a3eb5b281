"""`rsmq publish`: one message from the command line, or one for every line of stdin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, Any

import anyio.to_thread
import typer

from rsmq.broker import Broker
from rsmq.cli.connection import ask_broker, codecs_for_topic, writing_with
from rsmq.cli.failure import print_error
from rsmq.cli.output import print_result
from rsmq.cli.parameters import (
    PAYLOAD,
    AsText,
    Json,
    Plain,
    TopicName,
    Url,
    duration_option,
    example,
    parse_headers,
    parse_payload,
    time_option,
)
from rsmq.errors import BrokerError
from rsmq.model.message_ref import MessageRef
from rsmq.model.words import count, suggestion

STDIN, READ = 0, 1 << 16
MOST_AT_ONCE = 500

Publish = Callable[[Any], Awaitable[MessageRef]]


@example("""rsmq publish orders '{"n": 1}' --key c-42 --delay 5s""")
def publish(
    topic: TopicName,
    payload: Annotated[str, typer.Argument(help=f"{PAYLOAD} -: one message for each line of stdin.")] = "-",
    key: Annotated[str | None, typer.Option(help="Messages with the same key stay in order.")] = None,
    band: Annotated[str | None, typer.Option(help="A band of the topic, such as urgent.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header. May be repeated.")] = None,
    delay: Annotated[timedelta | None, duration_option("Deliver it after this time, such as 5s.")] = None,
    at: Annotated[datetime | None, time_option("Deliver it at this time, such as 2026-01-31T12:00:00Z.")] = None,
    expires: Annotated[timedelta | None, duration_option("No attempt starts after this time, such as 1h.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="With --expires: a dead letter then, not dropped.")] = False,
    unique: Annotated[str | None, typer.Option(metavar="NAME", help="One message at a time has this name.")] = None,
    until: Annotated[str, typer.Option(help="With --unique: settled, started, or a time such as 1m.")] = "settled",
    on_conflict: Annotated[str, typer.Option(help="With --unique: keep, replace, or extend.")] = "keep",
    message_id: Annotated[str | None, typer.Option("--id", help="Message id: it is stored only once.")] = None,
    text: AsText = False,
    plain: Plain = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish a message, and print its id when the server has confirmed it.

    It is encrypted if the newest message of the topic is, and in an empty topic if RSMQ_KEYS is set.
    """
    if payload == "-" and message_id is not None:
        raise typer.BadParameter("--id cannot be used with stdin: every line would get the same id")
    if payload == "-" and unique is not None:
        raise typer.BadParameter("--unique cannot be used with stdin: every line would get the same name")
    options: dict[str, Any] = {
        "key": key, "band": band, "headers": parse_headers(header or []), "delay": delay, "at": at,
        "message_id": message_id, "expires": expires, "on_expiry": "dead" if dead else None,
    }  # fmt: skip

    if unique is not None:
        options |= {"unique": unique, "until": until, "on_conflict": on_conflict}
    content = None if payload == "-" else parse_payload(payload, is_text=text)

    async def act(connected: Broker) -> None:
        client, keys, found = connected.client, connected.keys, await connected.topics.find(topic)
        codecs = [] if plain else await codecs_for_topic(client, keys, found)
        async with writing_with(connected, codecs) as broker:
            published = await act_by(broker)
        if published and found is None and not as_json:
            print_error(f"topic {topic!r} is new, and no group reads it yet{await other_topics(connected, topic)}")

    async def act_by(broker: Broker) -> int:
        async def store(content: Any) -> MessageRef:
            return await broker.publish(topic, content, **options)

        if payload == "-":
            published = await publish_lines(store, is_text=text)
            done = f"published {count(published, 'message')} to {topic}"
            print_result({"topic": topic, "published": published}, done, as_json=as_json)
            return published
        stored = await store(content)
        about = {"topic": topic, "id": stored} | ({} if unique is None else {"is_new": stored.is_new})
        is_kept = unique is not None and stored.is_new is False
        print_result(about, f"{stored} has the name: nothing is stored" if is_kept else stored, as_json=as_json)
        return 1

    ask_broker(url, act)


async def other_topics(broker: Broker, topic: str) -> str:
    """Those that may have been meant. A user who may only publish does not see them."""
    try:
        others = set(await broker.topics.names()) - {topic}
    except BrokerError:
        return ""
    return f": {suggestion(topic, others, 'topics')}" if others else ""


async def publish_lines(store: Publish, *, is_text: bool) -> int:
    """Publish lines as they arrive, without empty ones. Returns how many.

    A line that is wrong ends it: BadParameter says which one. All lines before it are published.
    """
    if os.isatty(STDIN):
        print_error("each line that you type is a message; Ctrl-D ends it")
    published = number = 0
    async for lines in read_lines():
        contents, wrong = parse_lines(lines, number, is_text=is_text)
        for at in range(0, len(contents), MOST_AT_ONCE):
            published += len(await asyncio.gather(*map(store, contents[at : at + MOST_AT_ONCE])))
        if wrong:
            raise typer.BadParameter(f"{wrong} (published before it: {published})")
        number += len(lines)
    return published


def parse_lines(lines: list[bytes], number: int, *, is_text: bool) -> tuple[list[Any], str]:
    """The payloads of lines up to one that is wrong, and what is wrong with it. `number`: of the line before them."""
    contents = list[Any]()
    for line in lines:
        number += 1
        try:
            if line.rstrip(b"\r"):
                contents.append(parse_payload(decode(line), is_text=is_text))
        except typer.BadParameter as error:
            return contents, f"line {number} of stdin: {error}"
    return contents, ""


async def read_lines() -> AsyncIterator[list[bytes]]:
    """The lines of stdin, in batches of what has arrived."""
    parts = list[bytes]()  # of a line whose end has not arrived: put together once, however long it is
    while chunk := await anyio.to_thread.run_sync(os.read, STDIN, READ, abandon_on_cancel=True):
        head, *others = chunk.split(b"\n")
        parts.append(head)
        if others:
            yield [b"".join(parts), *others[:-1]]
            parts = others[-1:]
    yield [b"".join(parts)]


def decode(line: bytes) -> str:
    """A line without its end. Raises BadParameter if it is not UTF-8."""
    try:
        return line.rstrip(b"\r").decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"it is not UTF-8 ({error})") from None
