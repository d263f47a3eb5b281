"""`rsmq group`: backlog, owners and state of groups; reset, pause, resume and delete them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked
from rsmq.cli.output import confirm, print_json, print_line, print_result
from rsmq.cli.parameters import AnyTopic, GroupName, Json, TopicName, Url, Yes, noun, parse_start
from rsmq.cli.tables import print_rows, print_table
from rsmq.control import Batches
from rsmq.inspector import text
from rsmq.inspector.state import GroupPartition, GroupState, Snapshot
from rsmq.inspector.trend import GroupTrend, compare
from rsmq.model.words import count, duration, number, printable
from rsmq.redis.streams import delete_group, reset_group, set_paused

MOST_NAMED: Final = 5
"""Batches that a question names."""

app = noun("Groups: list, show, reset, pause, resume, delete.")


@app.command("list", epilog="Example: rsmq group list orders")
def list_(topic: AnyTopic = None, url: Url = None, as_json: Json = False) -> None:
    """All groups with their backlog: messages that are unread, ready, running or waiting, but not for a time."""

    async def read(connection: CommandConnection) -> Snapshot:
        if topic is not None:
            await connection.topic(topic)
        return await connection.inspector.snapshot(None if topic is None else [topic])

    found = ask(url, read)
    groups = compare(None, found).groups
    rows = ((each.topic, *group_row(each), each.distribution) for each in groups)
    values = [as_object(state, group) for state, group in zip(found.groups, groups, strict=True)]
    columns = ("topic", *COLUMNS, "distribution")
    print_rows(values, columns, rows, asked("there are no groups", url), as_json=as_json)


@app.command("show", epilog="Example: rsmq group show orders billing")
def show(topic: TopicName, group: GroupName, url: Url = None, as_json: Json = False) -> None:
    """One group: its backlog, then partition by partition the owner, epoch, lease, and what is unread."""

    async def read(connection: CommandConnection) -> Snapshot:
        await connection.group(topic, group)
        return await connection.inspector.snapshot([topic])

    found = ask(url, read)
    for state, trend in zip(found.groups, compare(None, found).groups, strict=True):
        if state.name == group:
            show_group(state, trend, as_json=as_json)
            return
    raise NotFound(f"group {group!r} of {topic!r} was deleted meanwhile")


def show_group(state: GroupState, trend: GroupTrend, *, as_json: bool) -> None:
    """Print one group."""
    if as_json:
        print_json(as_object(state, trend))
        return
    print_line(f"{state.topic}/{state.name}: {state.distribution or 'never joined'}, {text.state(trend)}")
    print_line(f"members: {', '.join(state.members) or 'none'}")
    waits = text.waiting(trend.work)
    print_line(
        f"backlog: {number(trend.backlog)}: {number(trend.unread)} unread, "
        f"{text.ready(trend)} ready, {number(trend.work.running)} running, "
        f"{number(trend.work.waiting)} waiting{f' ({waits})' if waits else ''}; oldest {text.age(trend.oldest)}"
    )
    if trend.untold:
        print_line(printable(text.untold(trend)))
    for held in state.holds:
        print_line(printable(text.held(held)))
    rows = (
        (each.partition, each.owner, each.epoch, lease(each), unread(each), each.pending, each.waiting_for_retry,
         each.dead_letters, each.consumers, each.last_delivered_id)
        for each in state.shares
    )  # fmt: skip
    columns = ("#partition", "owner", "#epoch", "lease", "#unread", "#pending", "#retry", "#dead", "#consumers")
    print_table((*columns, "delivered to"), rows, "it has no partitions")


@app.command("reset", epilog="Example: rsmq group reset orders billing --to 2026-01-31T12:00:00Z --yes")
def reset(
    topic: TopicName,
    group: GroupName,
    to: Annotated[
        str, typer.Option(metavar="START", help="Where it begins: earliest, latest, a stream id, or a time.")
    ],
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a group handle its topic again from a start. Messages that are pending or wait for a retry are dropped."""
    start = parse_start(to)

    async def read(connection: CommandConnection) -> tuple[GroupState, list[str]]:
        batches = Batches(connection.client, connection.keys, connection.topics)
        return await connection.group(topic, group), await batches.open_in(topic, group)

    before, batches = ask(url, read)
    dropped = f"{before.pending} pending messages and {before.waiting_for_retry} that wait for a retry"
    names = ", ".join(map(repr, batches[:MOST_NAMED]))
    missing = f" Open batches may have members there, and what it skips is missing in them: {names}." if batches else ""
    confirm(f"Reset {topic}/{group} to {to}, dropping {dropped}?{missing}", is_agreed=yes)

    async def act(connection: CommandConnection) -> GroupState:
        await reset_group(connection.client, connection.keys, await connection.topic(topic), group, start)
        return await connection.group(topic, group)

    after = ask(url, act)
    print_result(after, f"{topic}/{group} starts at {to}, with {messages(after)} unread", as_json=as_json)


@app.command("delete", epilog="Example: rsmq group delete orders billing --yes")
def delete(topic: TopicName, group: GroupName, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Delete a group with its retries and dead letters. It no longer keeps its topic from being trimmed."""

    async def read(connection: CommandConnection) -> GroupState:
        state = await connection.group(topic, group)
        await connection.check_unserved(topic, group)
        return state

    state = ask(url, read)
    dead = count(state.dead_letters, "dead letter")
    what = f"{messages(state)} unread, {state.waiting_for_retry} waiting for a retry and {dead}"
    confirm(f"Delete {topic}/{group}, with {what}?", is_agreed=yes)

    async def act(connection: CommandConnection) -> None:
        await delete_group(connection.client, connection.keys, await connection.topic(topic), group)

    ask(url, act)
    print_result({"topic": topic, "deleted": group}, f"deleted {topic}/{group}", as_json=as_json)


@app.command("pause", epilog="Example: rsmq group pause orders billing")
def pause(topic: TopicName, group: GroupName, url: Url = None, as_json: Json = False) -> None:
    """Deliver no new messages to a group. Its members keep their leases and finish what they have."""
    switch(topic, group, url, as_json, paused=True)


@app.command("resume", epilog="Example: rsmq group resume orders billing")
def resume(topic: TopicName, group: GroupName, url: Url = None, as_json: Json = False) -> None:
    """Deliver messages to a paused group again."""
    switch(topic, group, url, as_json, paused=False)


def switch(topic: str, group: str, url: str | None, as_json: bool, *, paused: bool) -> None:
    """Pause or resume."""

    async def act(connection: CommandConnection) -> None:
        await connection.group(topic, group)
        await set_paused(connection.client, connection.keys, topic, group, paused=paused)

    ask(url, act)
    word = "paused" if paused else "running"
    print_result({"topic": topic, "group": group, "is_paused": paused}, f"{topic}/{group} is {word}", as_json=as_json)


COLUMNS: Final = (
    "group", "state", "#backlog", "#unread", "#ready", "#running", "waiting", "#oldest", "#dead", "#members",
)  # fmt: skip


def group_row(group: GroupTrend) -> tuple[object, ...]:
    """A group under COLUMNS."""
    work = group.work
    return (
        group.name, text.state(group), number(group.backlog), number(group.unread), text.ready(group), work.running,
        text.waiting(work) or "0", group.oldest, group.dead_letters, len(group.members),
    )  # fmt: skip


def as_object(state: GroupState, trend: GroupTrend) -> dict[str, Any]:
    """A group as JSON: what the server has of it, and its backlog in the words of an operator."""
    return asdict(state) | {
        "backlog": trend.backlog, "oldest": trend.oldest, "work": asdict(trend.work), "untold": trend.untold,
    }  # fmt: skip


def unread(state: GroupState | GroupPartition) -> str:
    """What is unread. After a reset into the middle of a stream only an upper bound is known."""
    return f"{'' if state.is_unread_exact else '<= '}{state.unread}"


def messages(state: GroupState) -> str:
    """The same with its noun."""
    return f"{unread(state)} message{'' if state.unread == 1 else 's'}"


def lease(partition: GroupPartition) -> str:
    """How long the lease still runs, or when it expired."""
    left = partition.lease_left
    if left is None:
        return "free"
    return f"{duration(left)} left" if left.total_seconds() > 0 else f"expired {duration(-left)} ago"
