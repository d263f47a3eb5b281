"""`rsmq dlq`: list, show, replay and purge dead letters."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked
from rsmq.cli.failure import print_error
from rsmq.cli.output import as_data, as_line, confirm, print_json, print_line, print_result
from rsmq.cli.parameters import (
    AnyGroup,
    AnyTopic,
    GroupName,
    Json,
    Most,
    TopicName,
    Url,
    Yes,
    duration_option,
    noun,
    parse_rate,
    time_option,
)
from rsmq.cli.tables import print_rows, print_table
from rsmq.dlq import DeadLetter, Selection, read_fields
from rsmq.dlq.selection import not_looked_into
from rsmq.inspector.state import GroupState
from rsmq.inspector.text import timestamp
from rsmq.model.message import JSON
from rsmq.model.words import count, duration, printable, shown

MOST_SHOWN = 20
"""Rows that a dry run prints; --json has the ids of all."""

app = noun("Dead letters: list, show, replay, purge.")

LetterIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="As `rsmq dlq list` prints them.", show_default=False)
]

Reason = Annotated[
    list[str] | None, typer.Option(help="Only this reason, as `rsmq dlq list` prints it. May be repeated.")
]
Error = Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Only errors that contain this text.")]
Since = Annotated[datetime | None, time_option("Only those that died at this time or later.")]
Until = Annotated[datetime | None, time_option("Only those that died before this time.")]
Key = Annotated[str | None, typer.Option("--key", help="Only those with this ordering key.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=VALUE",
        help="Only with this field in the JSON payload: a.b=5, state!=done. May be repeated. What is encrypted or in a "
        "store is read if RSMQ_KEYS and RSMQ_BODIES are set, as for `show`.",
    ),
]


@app.command("list", epilog="Example: rsmq dlq list orders billing -n 50")
def list_(
    topic: AnyTopic = None,
    group: AnyGroup = None,
    most: Most = 20,
    reason: Reason = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    where: Where = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The dead letters of a group, oldest first; without a group, the number of each group."""
    wanted = Selection(tuple(reason or ()), error, since, until, key, read_fields(where or ()))
    if topic is None or group is None:
        if not wanted.is_all:
            raise typer.BadParameter("conditions need a topic and a group")
        list_groups(topic, url, as_json)
        return

    unread = Counter[str]()

    async def read(connection: CommandConnection) -> tuple[int, list[DeadLetter]]:
        state, found = await connection.group(topic, group), await connection.topic(topic)
        letters: list[DeadLetter] = []
        async for letter in connection.dead_letters.select(found, group, wanted, unread=unread):
            letters.append(letter)
            if len(letters) == most:
                break
        return state.dead_letters, letters

    total, letters = ask(url, read)
    rows = (
        (each.id, timestamp(each.at), each.reason, each.attempts, each.key, shown(each.message_id), each.error)
        for each in letters
    )
    some = "" if wanted.is_all else "matching "
    nothing = f"{topic}/{group} has no {some}dead letters"
    columns = ("id", "at", "reason", "#attempts", "key", "message id", "error")
    print_rows([as_object(each) for each in letters], columns, rows, nothing, as_json=as_json)
    say_unread(unread)
    if total > len(letters) and wanted.is_all:
        print_error(f"{total - len(letters)} more: rsmq dlq list {topic} {group} -n {total}")


def say_unread(unread: Counter[str]) -> None:
    """That not all payloads could be read in which a field was looked for."""
    if unread:
        print_error(f"{not_looked_into(unread, 'dead letter')}: see RSMQ_KEYS and RSMQ_BODIES")


def list_groups(topic: str | None, url: str | None, as_json: bool) -> None:
    """How many dead letters each group has."""

    async def read(connection: CommandConnection) -> list[GroupState]:
        if topic is not None:
            await connection.topic(topic)
        return [state for state in await connection.inspector.groups(topic) if state.dead_letters]

    states = ask(url, read)
    value = [{"topic": each.topic, "group": each.name, "dead_letters": each.dead_letters} for each in states]
    rows = ((each.topic, each.name, each.dead_letters) for each in states)
    print_rows(value, ("topic", "group", "#dead"), rows, asked("there are no dead letters", url), as_json=as_json)


@app.command("show", epilog="Example: rsmq dlq show orders billing 3/1700000000000-0")
def show(
    topic: TopicName,
    group: GroupName,
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `rsmq dlq list` prints it.", show_default=False)],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One dead letter with its payload and where it came from."""

    async def read(connection: CommandConnection) -> DeadLetter | None:
        await connection.group(topic, group)
        return await connection.dead_letters.get(await connection.topic(topic), group, letter)

    found = ask(url, read)
    if found is None:
        raise NotFound(f"{topic}/{group} has no dead letter {letter}")
    if as_json:
        print_json(as_object(found))
        return
    for name in ("id", "reason", "error", "attempts", "origin", "member", "message_id", "key"):
        print_line(f"{name}: {printable(str(getattr(found, name)))}")
    print_line(f"at: {timestamp(found.at)}")
    for each in found.history:
        print_line(printable(each.text))
    for name, value in found.headers.items():
        print_line(f"header {printable(name)}: {printable(value)}")
    if found.traceback:
        print_line("traceback:")
    for line in found.traceback.splitlines():
        print_line(f"  {printable(line)}")
    print_line(f"data: {as_line(found.data, found.sealed)}")


@app.command("replay", epilog="Example: rsmq dlq replay orders billing --error timeout --where shop=7 --rate 50/s")
def replay(
    topic: TopicName,
    group: GroupName,
    ids: LetterIds = None,
    is_all: Annotated[bool, typer.Option("--all", help="All that exist now.")] = False,
    reason: Reason = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    where: Where = None,
    rate: Annotated[
        timedelta | None,
        typer.Option(parser=parse_rate, metavar="RATE", help="At most this rate, such as 50/s or 10/min."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be replayed.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Replay dead letters to this group only: by id, by conditions, or all.

    All conditions must hold. Exit code 1 if an id does not exist. What dies again meanwhile is not replayed twice.
    """
    wanted = Selection(tuple(reason or ()), error, since, until, key, read_fields(where or ()))
    if sum((bool(ids), is_all, not wanted.is_all)) != 1:
        raise typer.BadParameter("give one of: ids, --all, conditions such as --reason")
    if dry_run:
        show_replay(topic, group, ids, wanted, url, as_json=as_json)
        return

    unread = Counter[str]()

    async def act(connection: CommandConnection) -> int:
        await connection.group(topic, group)
        found, every = await connection.topic(topic), rate or timedelta(0)
        if ids:
            return await connection.dead_letters.replay(found, group, ids, every=every)
        return await connection.dead_letters.replay_selected(found, group, wanted, every=every, unread=unread)

    done = ask(url, act)
    print_result({"replayed": done}, f"replayed {count(done, 'dead letter')} of {topic}/{group}", as_json=as_json)
    say_unread(unread)
    if ids and done < len(ids):
        raise NotFound(f"{count(len(ids) - done, 'id does', 'ids do')} not exist, of {len(ids)}")


def show_replay(
    topic: str, group: str, ids: list[str] | None, wanted: Selection, url: str | None, *, as_json: bool
) -> None:
    """Print what a replay would replay."""

    unread = Counter[str]()

    async def read(connection: CommandConnection) -> list[tuple[str, str, str, str]]:
        await connection.group(topic, group)
        found = await connection.topic(topic)
        if ids:
            letters = [await connection.dead_letters.get(found, group, each) for each in ids]
            return [about(letter) for letter in letters if letter is not None]
        chosen = connection.dead_letters.select(found, group, wanted, unread=unread)
        return [about(letter) async for letter in chosen]

    rows = ask(url, read)
    say_unread(unread)
    if as_json:
        print_json({"would_replay": len(rows), "ids": [row[0] for row in rows]})
        return
    print_table(("id", "message id", "reason", "error"), rows[:MOST_SHOWN], "nothing would be replayed")
    if len(rows) > MOST_SHOWN:
        print_line(f"... and {len(rows) - MOST_SHOWN} more")
    print_line(f"{count(len(rows), 'dead letter')} of {topic}/{group} would be replayed")


def about(letter: DeadLetter) -> tuple[str, str, str, str]:
    """A row of a dry run: short, because a million must fit into memory."""
    return letter.id, letter.message_id, letter.reason, letter.error[:200]


@app.command("purge", epilog="Example: rsmq dlq purge orders billing --older-than 30d --yes")
def purge(
    topic: TopicName,
    group: GroupName,
    older_than: Annotated[timedelta | None, duration_option("Only those older than this, such as 30d.")] = None,
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good."""
    state = ask(url, lambda connection: connection.group(topic, group))
    letters = f"{count(state.dead_letters, 'dead letter')} of {topic}/{group}"
    older = "" if older_than is None else f", those older than {duration(older_than)}"
    confirm(f"Delete the {letters}{older}?", is_agreed=yes)

    async def act(connection: CommandConnection) -> int:
        return await connection.dead_letters.purge(await connection.topic(topic), group, older_than)

    done = ask(url, act)
    print_result({"purged": done}, f"deleted {count(done, 'dead letter')} of {topic}/{group}", as_json=as_json)


def as_object(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as JSON, without the raw fields that it was read from."""
    about, content_type = asdict(letter), dict(reversed(letter.fields)).get(b"type", JSON.encode())
    del about["fields"], about["data"], about["sealed"]
    return about | as_data(letter.data, content_type.decode(errors="replace"), letter.sealed)
