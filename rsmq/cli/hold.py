"""`rsmq hold`: what groups hold; hold a name, and end that."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import typer

from rsmq.cli.connection import CommandConnection, ask, asked
from rsmq.cli.output import print_result
from rsmq.cli.parameters import AnyTopic, Json, TopicName, Url, duration_argument, noun
from rsmq.cli.tables import print_rows
from rsmq.control.holding import GroupHold, Holding
from rsmq.inspector.text import timestamp
from rsmq.model.words import duration

app = noun("Holds: list, begin, end.")

Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="The name, such as a provider: what a rate, limit or breaker counts by. Default: all messages.",
    ),
]
OneGroup = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only in this group.")]


@app.command("list", epilog="Example: rsmq hold list sms")
def list_(topic: AnyTopic = None, url: Url = None, as_json: Json = False) -> None:
    """What is held, by whom, and until when: of it nothing starts."""

    async def read(connection: CommandConnection) -> list[GroupHold]:
        if topic is not None:
            await connection.topic(topic)
        states = await connection.inspector.groups(topic)
        return [GroupHold(state.topic, state.name, held) for state in states for held in state.holds]

    found = ask(url, read)
    rows = (
        (each.topic, each.group, each.held.name or "everything", each.held.kind, timestamp(each.held.until))
        for each in found
    )
    print_rows(found, ("topic", "group", "name", "by", "until"), rows, asked("nothing is held", url), as_json=as_json)


@app.command("begin", epilog="Example: rsmq hold begin sms 10min --name twilio")
def begin(
    topic: TopicName,
    span: Annotated[timedelta, typer.Argument(parser=duration_argument, metavar="DURATION", help="How long.")],
    name: Name = None,
    group: OneGroup = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let nothing of a name start for a time. What waits has no attempt. Another hold of the name is replaced.

    It counts for handlers with a rate, a limit, permits or a breaker. To stop a group of others: rsmq group pause.
    """

    async def act(connection: CommandConnection) -> tuple[datetime, list[str]]:
        until = await Holding(connection.client, connection.keys).begin(
            await connection.topic(topic), name, span, group
        )
        live = [each for each in await connection.inspector.members(topic, group) if each.heard_ago is not None]
        return until, sorted({each.group for each in live if not each.limits})

    until, unlimited = ask(url, act)
    about = {"topic": topic, "name": name, "group": group, "until": until}
    what = f"{name or 'everything'} of {topic}{f'/{group}' if group else ''}"
    text = f"{what} is held for {duration(span)}, until {timestamp(until)}"
    for each in unlimited:
        text += (
            f"\ngroup {each} has a handler without a rate, limit or breaker: unless it has permits, it goes on. "
            f"`rsmq group pause {topic} {each}` stops it"
        )
    print_result(about, text, as_json=as_json)


@app.command("end", epilog="Example: rsmq hold end sms --name twilio")
def end(topic: TopicName, name: Name = None, group: OneGroup = None, url: Url = None, as_json: Json = False) -> None:
    """End a hold now, also one of a handler or a breaker."""

    async def act(connection: CommandConnection) -> int:
        return await Holding(connection.client, connection.keys).end(await connection.topic(topic), name, group)

    ended = ask(url, act)
    what = f"{name or 'everything'} of {topic}{f'/{group}' if group else ''}"
    about = {"topic": topic, "name": name, "group": group, "ended": ended}
    print_result(about, f"{what} is held no longer" if ended else f"{what} was not held", as_json=as_json)
