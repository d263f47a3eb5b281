"""`rsmq topic`: topics, their limits, and why one is not trimmed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

import anyio
import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked
from rsmq.cli.failure import print_error
from rsmq.cli.group import COLUMNS, group_row
from rsmq.cli.output import confirm, print_json, print_line, print_result
from rsmq.cli.parameters import Json, TopicName, Url, Yes, duration_option, noun
from rsmq.cli.tables import print_rows, print_table
from rsmq.inspector.retention_holds import RetentionHold, retention_holds
from rsmq.inspector.state import Snapshot, TopicState, left_before
from rsmq.inspector.text import describe_left, limits_of
from rsmq.inspector.trend import compare
from rsmq.model.words import count, shown
from rsmq.redis.layouts import describe_unaware
from rsmq.redis.topics import Topic, Topics

OPENING_SECONDS = 10.0

app = noun("Topics: list, show, set, resize, delete, why-not-trimmed.")


@app.command("list", epilog="Example: rsmq topic list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """All topics with their messages, limits and groups."""
    states = ask(url, lambda connection: connection.inspector.topics())
    rows = (
        (state.topic.name, state.topic.partitions, state.length, state.delayed, limit(state.topic), state.groups)
        for state in states
    )
    columns = ("topic", "#partitions", "#messages", "#delayed", "limit", "groups")
    print_rows(states, columns, rows, asked("there are no topics", url), as_json=as_json)


@app.command("show", epilog="Example: rsmq topic show orders")
def show(topic: TopicName, url: Url = None, as_json: Json = False) -> None:
    """One topic: its limits, its groups with their backlog, and its partitions."""

    async def read(connection: CommandConnection) -> Snapshot:
        await connection.topic(topic)
        return await connection.inspector.snapshot([topic])

    found = ask(url, read)
    if not found.topics:
        raise NotFound(f"topic {topic!r} was deleted meanwhile")
    (state,) = found.topics
    if as_json:
        print_json(state)
        return
    describe(state.topic)
    print_table(COLUMNS, map(group_row, compare(None, found).groups), "groups: none")
    print_line("")
    rows = ((each.partition, each.length, each.first_id, each.last_id, each.delayed) for each in state.partitions)
    print_table(("#partition", "#messages", "first id", "last id", "#delayed"), rows, "it has no partitions")


@app.command("set", epilog="Example: rsmq topic set orders --retention-age 7d --max-length 1000000 --on-full reject")
def set_(
    topic: TopicName,
    partitions: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Create it with this number; later use resize.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=0, help="Limit of messages in a partition; 0: none.")] = None,
    on_full: Annotated[
        Literal["reject", "trim"] | None,
        typer.Option(help="When it is full: reject a publish, or trim the oldest messages, handled or not."),
    ] = None,
    retention_age: Annotated[
        timedelta | None, duration_option("Keep settled messages for this time, such as 1d.")
    ] = None,
    retention_length: Annotated[
        int | None, typer.Option(min=0, help="Keep at most this number of settled messages in a partition.")
    ] = None,
    archive: Annotated[
        Literal["off", "required"] | None,
        typer.Option(help="required: trim only what `rsmq pipeline archive` has committed."),
    ] = None,
    bands: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Its bands, the most urgent first: urgent,normal,bulk.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change the limits of a topic or its bands, or create it with --partitions."""
    given = {
        "max_length": max_length, "on_full": on_full, "retention_age": retention_age,
        "retention_length": retention_length, "archive": archive,
    }  # fmt: skip
    limits: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not limits and partitions is None and bands is None:
        names = [*given, "bands"]
        raise typer.BadParameter(f"nothing to set: use {', '.join('--' + name.replace('_', '-') for name in names)}")

    async def change(connection: CommandConnection) -> Topic:
        if partitions is not None:
            await connection.topics.ensure(topic, partitions)
        await connection.topic(topic)
        if bands is not None:
            await connection.topics.set_bands(topic, [each.strip() for each in bands.split(",")])
            unaware.extend(await opened(connection.topics, topic))
        return await connection.topics.change(topic, **limits)

    unaware: list[str] = []
    changed = ask(url, change)
    print_json(changed) if as_json else describe(changed)
    if unaware:
        print_error(
            f"not open yet: {describe_unaware(unaware)} must be started again with a version that knows bands; until "
            f"then their messages go to the band normal, and workers open them by themselves"
        )
        raise typer.Exit(1)


@app.command("resize", epilog="Example: rsmq topic resize orders 16")
def resize(
    topic: TopicName,
    partitions: Annotated[
        int | None, typer.Argument(min=1, max=1024, help="How many it is to have: a multiple of what it has.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show how far it is, and what it waits for.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Give up a resize whose partitions are not used yet.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a topic grow while everything runs; messages of a key stay in order. Exit code 1 while it waits."""
    if (partitions is not None) + status + abort != 1:
        raise typer.BadParameter("give the number of partitions, or --status, or --abort")

    async def give_up(connection: CommandConnection) -> bool:
        await connection.topic(topic)
        return await connection.topics.abort_resize(topic)

    if abort:
        if not ask(url, give_up):
            raise NotFound(f"topic {topic!r} is not being resized, or its new partitions are used already")
        print_result({"topic": topic, "aborted": True}, f"{topic}: the resize is given up", as_json=as_json)
        return

    async def grow(connection: CommandConnection) -> ResizeState:
        waits_for = ""
        if partitions is not None:
            await connection.topic(topic)
            await connection.topics.resize(topic, partitions)
            waits_for = await finished(connection.topics, topic)
        return await resize_state(connection, topic, waits_for)

    state = ask(url, grow)
    print_json(state) if as_json else describe_resize(state)
    if state.waits_for:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class ResizeState:
    """How far a resize is. `partitions` are used now, `resizing_to` is what it waits for, None for nothing; `left`: of
    each group, how many messages of sealed partitions it has not settled; `left_in`: of each group that has some, the
    partitions, and how many in each."""

    topic: str
    partitions: int
    resizing_to: int | None
    waits_for: str
    left: dict[str, int]
    left_in: dict[str, dict[int, int]]


async def resize_state(connection: CommandConnection, name: str, waits_for: str) -> ResizeState:
    """Without a word about what it waits for, members are asked."""
    topic = await connection.topic(name)
    found = await connection.inspector.snapshot([name])
    left = {group.name: group.left_before for group in found.groups} if topic.layout.is_resized else {}
    left_in = {group.name: some for group in found.groups if (some := left_before(topic.layout, group.shares))}
    added = topic.layout.following
    if added is not None and not waits_for:
        waits_for = await connection.topics.unaware_of_resize(topic, [group.name for group in found.groups])
        behind = [group for group, number in left.items() if number]
        if behind and not waits_for:
            waits_for = f"groups that have not handled what was published before: {', '.join(behind)}"
        waits_for = waits_for or "a worker, or this command again, to go on"
    return ResizeState(name, topic.partitions, None if added is None else added.count, waits_for, left, left_in)


async def finished(topics: Topics, name: str) -> str:
    """Wait for the members to know the partitions, as long as a heartbeat of a dead one may last. Returns what it
    waits for then."""
    waits_for = await topics.go_on_with_resize(name)
    with anyio.move_on_after(OPENING_SECONDS):
        while waits_for:
            await anyio.sleep(0.2)
            waits_for = await topics.go_on_with_resize(name)
    return waits_for


def describe_resize(state: ResizeState) -> None:
    """Print it, with a bar for each group that still handles what was published before."""
    print_line(f"{state.topic}: {count(state.partitions, 'partition')}")
    if state.resizing_to is not None:
        print_line(f"to {state.resizing_to} partitions: it waits for {state.waits_for}; workers go on by themselves")
    for group, number in state.left.items():
        said = f"{describe_left(state.left_in[group])} of before the resize left" if number else "past the resize"
        print_line(f"group {group}: {said}")


@app.command("delete", epilog="Example: rsmq topic delete orders --yes")
def delete(topic: TopicName, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Delete a topic with its messages, groups and dead letters. Its workers must have stopped."""

    async def read(connection: CommandConnection) -> TopicState:
        state = await find(connection, topic)
        await connection.check_unserved(topic)
        return state

    state = ask(url, read)
    confirm(
        f"Delete topic {topic} with {count(state.length, 'message')} and {count(len(state.groups), 'group')}?",
        is_agreed=yes,
    )
    ask(url, lambda connection: connection.topics.delete(topic))
    print_result({"deleted": topic, "messages": state.length}, f"deleted {topic}", as_json=as_json)


@app.command("why-not-trimmed", epilog="Example: rsmq topic why-not-trimmed orders")
def why(topic: TopicName, url: Url = None, as_json: Json = False) -> None:
    """Say who holds messages of a topic: a group, the archive or its limits. Exit code 1 for a group or the archive."""

    async def read(connection: CommandConnection) -> list[tuple[int, RetentionHold]]:
        found = await connection.topic(topic)
        return [
            (partition, hold)
            for partition in found.numbers
            for hold in await retention_holds(connection.client, connection.keys, found, partition)
        ]

    kept = ask(url, read)
    if as_json:
        print_json([{"partition": partition} | asdict(hold) for partition, hold in kept])
    else:
        rows = ((partition, each.holder, each.oldest, shown(each.message_id), each.why) for partition, each in kept)
        print_table(("#partition", "held by", "from", "message id", "why"), rows, f"there is nothing in {topic}")
    if any(not hold.is_limit for _, hold in kept):
        raise typer.Exit(1)


async def find(connection: CommandConnection, topic: str) -> TopicState:
    """The state of a topic. Raises NotFound."""
    await connection.topic(topic)
    state = await connection.inspector.topic(topic)
    if state is None:
        raise NotFound(f"topic {topic!r} was deleted meanwhile")
    return state


async def opened(topics: Topics, name: str) -> list[str]:
    """Wait for the members to know the bands, as long as a heartbeat of a dead one may last. Returns who does not."""
    unaware = await topics.open_bands(name)
    with anyio.move_on_after(OPENING_SECONDS):
        while unaware:
            await anyio.sleep(0.2)
            unaware = await topics.open_bands(name)
    return unaware


def limit(topic: Topic) -> str:
    """Its limit as text."""
    return f"{topic.max_length} {topic.on_full}" if topic.max_length else ""


def describe(topic: Topic) -> None:
    """Print its limits, a line each."""
    print_line(f"{topic.name}: {count(topic.partitions, 'partition')}")
    for name, said in limits_of(topic).items():
        print_line(f"{name}: {said}")
