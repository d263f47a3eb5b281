"""`rsmq dlq`: dead letters, and what becomes of them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from rsmq.cli.option import AnyGroup, AnyTopic, GroupName, Json, TopicName, Url, Yes, noun
from rsmq.cli.printer import as_data, confirm, dump, printable, say, tabulate
from rsmq.cli.selection import Error, Key, Reason, Since, Until, Where, selection_of
from rsmq.cli.session import NotFound, Session, ask
from rsmq.cli.value import parse_rate, parse_span
from rsmq.dlq import DeadLetter, Selection
from rsmq.inspector import GroupState

MOST_SHOWN = 20
"""Of a dry run, to people; --json has the ids of all."""

app = noun("Dead letters: list, show, replay, purge.")

LetterIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="As `rsmq dlq list` prints them.", show_default=False)
]


@app.command("list", epilog="Example: rsmq dlq list orders billing -n 50")
def list_(
    topic: AnyTopic = None,
    group: AnyGroup = None,
    most: Annotated[int, typer.Option("-n", min=1, help="Most of them.")] = 20,
    reason: Reason = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    where: Where = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The dead letters of a group, oldest first; without a group how many each group has."""
    wanted = selection_of(reason, error, since, until, key, where)
    if topic is None or group is None:
        if not wanted.is_all:
            raise typer.BadParameter("to choose among dead letters, name a topic and a group")
        list_groups(topic, url, as_json)
        return

    async def look(session: Session) -> tuple[int, list[DeadLetter]]:
        state, found = await session.group(topic, group), await session.topic(topic)
        letters: list[DeadLetter] = []
        async for letter in session.dead_letters.select(found, group, wanted):
            letters.append(letter)
            if len(letters) == most:
                break
        return state.dead_letters, letters

    count, letters = ask(url, look)
    if as_json:
        dump([as_object(each) for each in letters])
        return
    rows = ((each.id, moment(each), each.reason, each.attempts, each.key, each.error) for each in letters)
    some = "" if wanted.is_all else "such "
    nothing = f"{group} of {topic} has no {some}dead letters"
    tabulate(("id", "at", "reason", "#attempts", "key", "error"), rows, nothing)
    if count > len(letters) and wanted.is_all:
        say(f"{count - len(letters)} more: rsmq dlq list {topic} {group} -n {count}")


def list_groups(topic: str | None, url: str | None, as_json: bool) -> None:
    """How many dead letters each group has."""

    async def look(session: Session) -> list[GroupState]:
        if topic is not None:
            await session.topic(topic)
        return [state for state in await session.inspector.groups(topic) if state.dead_letters]

    states = ask(url, look)
    if as_json:
        dump([{"topic": each.topic, "group": each.name, "dead_letters": each.dead_letters} for each in states])
        return
    rows = ((each.topic, each.name, each.dead_letters) for each in states)
    tabulate(("topic", "group", "#dead"), rows, "there are no dead letters")


@app.command("show", epilog="Example: rsmq dlq show orders billing 3/1700000000000-0")
def show(
    topic: TopicName,
    group: GroupName,
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `rsmq dlq list` prints it.", show_default=False)],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One dead letter with its payload and where it came from."""

    async def look(session: Session) -> DeadLetter | None:
        return await session.dead_letters.get(await session.topic(topic), group, letter)

    found = ask(url, look)
    if found is None:
        raise NotFound(f"{group} of {topic} has no dead letter {letter}")
    if as_json:
        dump(as_object(found))
        return
    for name in ("id", "reason", "error", "attempts", "origin", "member", "message_id", "key"):
        say(f"{name}: {printable(str(getattr(found, name)))}")
    say(f"at: {moment(found)}")
    for name, value in found.headers.items():
        say(f"header {printable(name)}: {printable(value)}")
    say(f"data: {'(none)' if found.data is None else printable(found.data.decode(errors='backslashreplace'))}")


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
        timedelta | None, typer.Option(parser=parse_rate, metavar="RATE", help="At most so many, as 50/s or 10/min.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which: replay nothing.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Give dead letters another life, in this group only: by id, by what they say, or all.

    All conditions must hold. Exit code 1 if an id was not there. What fails again meanwhile is not replayed twice.
    """
    wanted = selection_of(reason, error, since, until, key, where)
    if sum((bool(ids), is_all, not wanted.is_all)) != 1:
        raise typer.BadParameter("give ids, or --all, or conditions such as --reason (one of the three)")
    if dry_run:
        rehearse(topic, group, ids, wanted, url, as_json=as_json)
        return

    async def act(session: Session) -> int:
        await session.group(topic, group)
        found, every = await session.topic(topic), rate or timedelta(0)
        if ids:
            return await session.dead_letters.replay(found, group, ids, every=every)
        return await session.dead_letters.replay_selected(found, group, wanted, every=every)

    count = ask(url, act)
    dump({"replayed": count}) if as_json else say(f"replayed {count} dead letters of {group} of {topic}")
    if ids and count < len(ids):
        raise NotFound(f"{len(ids) - count} of the {len(ids)} ids were not there")


def rehearse(
    topic: str, group: str, ids: list[str] | None, wanted: Selection, url: str | None, *, as_json: bool
) -> None:
    """Show what a replay would take, and take nothing."""

    async def look(session: Session) -> list[tuple[str, str, str]]:
        await session.group(topic, group)
        found = await session.topic(topic)
        if ids:
            letters = [await session.dead_letters.get(found, group, each) for each in ids]
            return [about(letter) for letter in letters if letter is not None]
        return [about(letter) async for letter in session.dead_letters.select(found, group, wanted)]

    rows = ask(url, look)
    if as_json:
        dump({"would_replay": len(rows), "ids": [row[0] for row in rows]})
        return
    tabulate(("id", "reason", "error"), rows[:MOST_SHOWN], "nothing would be replayed")
    if len(rows) > MOST_SHOWN:
        say(f"... and {len(rows) - MOST_SHOWN} more")
    say(f"{len(rows)} dead letters of {group} of {topic} would be replayed")


def about(letter: DeadLetter) -> tuple[str, str, str]:
    """So little of each that a million fit into memory."""
    return letter.id, letter.reason, letter.error[:200]


@app.command("purge", epilog="Example: rsmq dlq purge orders billing --older-than P30D --yes")
def purge(
    topic: TopicName,
    group: GroupName,
    older_than: Annotated[
        timedelta | None, typer.Option(parser=parse_span, metavar="SPAN", help="Only those older than that, as P30D.")
    ] = None,
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good."""
    state = ask(url, lambda session: session.group(topic, group))
    which = "all" if older_than is None else f"those older than {older_than} of the"
    confirm(f"Delete {which} {state.dead_letters} dead letters of {group} of {topic}?", is_agreed=yes)

    async def act(session: Session) -> int:
        return await session.dead_letters.purge(await session.topic(topic), group, older_than)

    count = ask(url, act)
    dump({"purged": count}) if as_json else say(f"deleted {count} dead letters of {group} of {topic}")


def moment(letter: DeadLetter) -> str:
    """When it died, to the second."""
    return letter.at.strftime("%Y-%m-%d %H:%M:%SZ")


def as_object(letter: DeadLetter) -> dict[str, Any]:
    """For programs: without the raw fields, of which the others are the readable form."""
    about = asdict(letter)
    del about["fields"], about["data"]
    return about | as_data(letter.data)
