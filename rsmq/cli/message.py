"""`rsmq message`: one message, found by its id; `rsmq trace`: where it is."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, cast

import typer

from rsmq.broker import Broker
from rsmq.cli.connection import CommandConnection, NotFound, ask, ask_broker
from rsmq.cli.failure import print_error
from rsmq.cli.output import as_data, as_line, print_json, print_line, print_result
from rsmq.cli.parameters import Json, Most, TopicName, Url, duration_option, example, noun, parse_headers, time_option
from rsmq.cli.pipeline import load
from rsmq.cli.tables import print_rows, print_table
from rsmq.control import (
    Answer,
    Cancelled,
    Criteria,
    Findings,
    FindState,
    GroupStatus,
    Hit,
    Look,
    MessageStatus,
    Search,
)
from rsmq.control.finder import Finder, Found
from rsmq.control.search import STATES
from rsmq.dlq import read_fields
from rsmq.dlq.selection import not_looked_into
from rsmq.inspector.text import timestamp
from rsmq.model.words import count, printable
from rsmq.redis.topics import Topic

MessageId = Annotated[
    str,
    typer.Argument(metavar="ID", help="The message id, or the stream id as 3/1700000000000-0.", show_default=False),
]
OfTopic = Annotated[
    str | None, typer.Option("--topic", help="The topic. Without it all topics are searched.", show_default=False)
]
Archive = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Also look in this archive, where `rsmq pipeline archive` has written.", show_default=False
    ),
]
OfKey = Annotated[str | None, typer.Option("--key", help="Its ordering key. Without it all partitions are searched.")]

app = noun("Messages: find, show, cancel, reschedule.")


@example("rsmq trace 01980000-0000-7000-8000-000000000000 --topic orders --key c-42")
def trace(
    message: MessageId,
    topic: OfTopic = None,
    key: OfKey = None,
    archive: Archive = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Where a message is, for each group: unread, running, waiting, settled, or dead. Reads only."""

    async def read(connection: CommandConnection) -> MessageStatus:
        status = MessageStatus(message, topic, "unknown", key=key)
        for each in await topics_of(connection, topic):
            found = await Look(connection.client, connection.keys).at(message, each, key)
            if found.partition is not None:
                return found
            if topic is not None or found.state == "removed":
                status = found
        return status

    status = ask(url, read)
    if archive is not None and status.state in ("removed", "unknown"):
        status = in_archive(status, archive)
    if as_json:
        print_json(status)
    else:
        describe(status)
    if status.partition is None:
        raise NotFound(f"message {message} is {'removed' if status.state == 'removed' else 'not found'}")


def in_archive(status: MessageStatus, archive: str) -> MessageStatus:
    """The status with what the archive has of a message that is not in its stream."""
    found = archived(archive, status.id, status.topic)
    if found is None:
        return status
    return replace(
        status, id=found.id, topic=found.topic, state="archived", partition=found.partition, key=found.key,
        stream_id=found.stream_id, archive=f"{archive.rstrip('/')}/{found.part}",
    )  # fmt: skip


def archived(archive: str, message: str, topic: str | None) -> Any:
    """A message of the archive (`ArchivedMessage`), or None. Raises ConfigError if the extra is not installed."""
    return load("jobs.lookup").find_archived(archive, message, topic=topic)


def describe(status: MessageStatus) -> None:
    """Print a status for people."""
    key = "" if status.key is None else f", key {printable(status.key)}"
    batch = "" if status.batch is None else f", in batch {printable(status.batch)}"
    print_line(f"{printable(status.id)}: {status.text}{key}{batch}")
    rows = ((each.group, each.state, printable(advice(status, each))) for each in status.groups)
    if status.state == "stored" or status.groups:
        print_table(("group", "state", "where"), rows, "the topic has no groups")
    failed = [(each.group, failed) for each in status.groups for failed in each.failed]
    if failed:
        tries = ((group, each.attempt, timestamp(each.at), each.error) for group, each in failed)
        print_table(("group", "#attempt", "failed at", "error"), tries, "")


def advice(status: MessageStatus, each: GroupStatus) -> str:
    """Where it is for a group, and for a dead letter what to do."""
    replay = f"; replay it: rsmq dlq replay {status.topic} {each.group} {each.letter}" if each.letter else ""
    return each.text + replay


@app.command("show", epilog="Example: rsmq message show 01980000-0000-7000-8000-000000000000 --topic orders")
def show(
    message: MessageId,
    topic: OfTopic = None,
    key: OfKey = None,
    archive: Archive = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One message with its payload. Consumes nothing; `rsmq trace` says where it is."""

    async def read(connection: CommandConnection) -> tuple[Found | None, str]:
        for each in await topics_of(connection, topic):
            found = await Finder(connection.client, connection.keys).find(message, each, key)
            if found is not None:
                return found, found.message.open(connection.encoding)
        return None, ""

    found, sealed = ask(url, read)
    kept = None if found is not None or archive is None else archived(archive, message, topic)
    if found is not None:
        about, data = as_object(found), found.message.data
    elif kept is not None:
        about, data = asdict(kept), kept.data or b""
        del about["data"]
    else:
        raise NotFound(f"there is no message {message}: `rsmq trace` looks among the dead letters, too")
    if as_json:
        print_json(about | as_data(data, about["type"], sealed))
        return
    headers = about.pop("headers")
    for name, value in about.items():
        if value is not None:
            print_line(f"{name}: {printable(timestamp(value) if isinstance(value, datetime) else str(value))}")
    for name, value in headers.items():
        print_line(f"header {printable(name)}: {printable(value)}")
    print_line(f"data: {as_line(data, sealed)}")


@app.command("find", epilog="Example: rsmq message find orders --where customer.id=7 --since 2026-01-01T00:00:00Z")
def find(
    topic: TopicName,
    key: Annotated[str | None, typer.Option("--key", help="Only with this ordering key.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only with this field in the JSON payload: a.b=5, state!=done. What is encrypted or in a store is "
            "read if RSMQ_KEYS and RSMQ_BODIES are set.",
        ),
    ] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only with this header.")] = None,
    since: Annotated[datetime | None, time_option("Stored at this time or later (delayed: due, dead: died).")] = None,
    until: Annotated[datetime | None, time_option("Before this time.")] = None,
    state: Annotated[str, typer.Option(help=f"One of {', '.join(STATES)}.")] = "stored",
    group: Annotated[
        str | None, typer.Option("--group", help="The group whose unread, running, waiting or dead ones are meant.")
    ] = None,
    most: Most = 20,
    scan: Annotated[int, typer.Option(min=1, help="Look at so many messages at most.")] = 100_000,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Find messages by key, payload field, header, time and state. Consumes nothing."""
    headers, step = parse_headers(header or []), 50_000

    def progress(looked_at: int) -> None:
        nonlocal step
        if looked_at >= step:
            print_error(f"looked at {count(looked_at, 'message')}")
            step += 50_000

    wanted = Criteria(key, read_fields(where or ()), headers, since, until)

    async def search(connection: CommandConnection) -> Findings:
        about = (connection.client, connection.keys, await connection.topics.existing(topic))
        searching = Search(*about, cast("FindState", state), group, connection.encoding)
        return await searching.run(wanted, most=most, scan=scan, progress=progress)

    found = ask(url, search)
    rows = (
        (timestamp(each.at), f"{each.partition}/{each.stream_id or '-'}", each.id, each.key, each.letter, preview(each))
        for each in found.hits
    )
    nothing = f"no such message ({count(found.looked_at, 'message')} looked at)"
    columns = ("at", "stream id", "message id", "key", "dead letter", "data")
    print_rows([hit_as_object(each) for each in found.hits], columns, rows, nothing, as_json=as_json)
    if found.unread:
        print_error(f"{not_looked_into(found.unread, 'message')}: see RSMQ_KEYS and RSMQ_BODIES")
    if not found.is_all:
        print_error(f"not all was looked at ({count(found.looked_at, 'message')}): raise -n or --scan, or narrow it")


def preview(hit: Hit) -> str:
    """The beginning of its payload, or why that cannot be shown."""
    text = f"({hit.sealed})" if hit.sealed else hit.data[:240].decode(errors="backslashreplace")
    return text if len(text) <= 60 else f"{text[:60]}…"


def hit_as_object(hit: Hit) -> dict[str, Any]:
    """A hit as JSON."""
    about = {
        "id": hit.id, "topic": hit.topic, "partition": hit.partition, "stream_id": hit.stream_id, "key": hit.key,
        "type": hit.type, "state": hit.state, "at": hit.at, "letter": hit.letter,
    }  # fmt: skip
    return about | as_data(hit.data, hit.type, hit.sealed)


@app.command("cancel", epilog="Example: rsmq message cancel 01980000-0000-7000-8000-000000000000 --topic orders")
def cancel(
    message: MessageId,
    topic: Annotated[str, typer.Option("--topic", help="The topic.", show_default=False)],
    key: OfKey = None,
    group: Annotated[str | None, typer.Option("--group", help="Only for this group.", show_default=False)] = None,
    running: Annotated[bool, typer.Option("--running", help="Also interrupt the handler if it runs.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Cancel a message that is not handled yet. Exit code 1 if it comes too late or is not found."""

    async def act(broker: Broker) -> tuple[Answer, dict[str, Any]]:
        ids = await ids_of(broker, message, topic, key)  # before: without a group a cancelled message is removed
        return await broker.cancel(message, topic=topic, key=key, group=group, running=running), ids

    answer, ids = ask_broker(url, act)
    word = type(answer).__name__.lower()
    groups = ", ".join(f"{name}: {each}" for name, each in sorted(answer.groups.items()))
    about = ids | {"answer": word, "groups": dict(answer.groups)}
    unknown = " (it is not there, or its owner has not answered: `rsmq trace` says where it is)"
    more = f" ({groups})" if groups else unknown if word == "unknown" else ""
    print_result(about, word + more, as_json=as_json)
    if not isinstance(answer, Cancelled):
        raise typer.Exit(1)


@app.command("reschedule", epilog="Example: rsmq message reschedule order-17 --topic orders --delay 10m")
def reschedule(
    message: MessageId,
    topic: Annotated[str, typer.Option("--topic", help="The topic.", show_default=False)],
    delay: Annotated[timedelta | None, duration_option("Deliver it after this time from now, such as 5s.")] = None,
    at: Annotated[datetime | None, time_option("Deliver it at this time, such as 2026-01-31T12:00:00Z.")] = None,
    key: OfKey = None,
    group: Annotated[str | None, typer.Option("--group", help="Only where it waits for a retry of this group.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Give a message that is delayed, or waits for a retry, another due time."""
    about = {"topic": topic, "key": key, "group": group}

    async def act(broker: Broker) -> tuple[datetime, dict[str, Any]]:
        due = await broker.reschedule(message, at=at, delay=delay, **about)
        return due, await ids_of(broker, message, topic, key)

    due, ids = ask_broker(url, act)
    print_result(ids | {"due": due}, f"due at {due}", as_json=as_json)


async def ids_of(broker: Broker, message: str, topic: str, key: str | None) -> dict[str, Any]:
    """The message id and the stream id of a message, whichever of them was given."""
    found = await Finder(broker.client, broker.keys).find(message, await broker.topics.existing(topic), key)
    stream_id = None if found is None or found.stream_id is None else f"{found.partition}/{found.message.stream_id}"
    return {"id": message if found is None else found.message.id, "stream_id": stream_id}


def as_object(found: Found) -> dict[str, Any]:
    """A message as JSON, without its payload."""
    message = found.message
    return {
        "id": message.id, "topic": found.topic.name, "partition": found.partition,
        "stream_id": None if found.stream_id is None else message.stream_id, "due": found.due, "key": message.key,
        "type": message.type, "headers": message.headers, "published": message.timestamp,
    }  # fmt: skip


async def topics_of(connection: CommandConnection, topic: str | None) -> list[Topic]:
    """The topics to search."""
    if topic is not None:
        return [await connection.topic(topic)]
    return await connection.topics.find_all(await connection.topics.names())
