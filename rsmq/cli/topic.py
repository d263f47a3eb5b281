"""`rsmq topic`: what topics there are, their limits, and why one does not get shorter."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, Literal

import typer

from rsmq.cli.option import Json, TopicName, Url, Yes, noun
from rsmq.cli.printer import confirm, dump, say, tabulate
from rsmq.cli.session import NotFound, Session, ask
from rsmq.cli.value import parse_span
from rsmq.consumer.retention import Reason, reasons
from rsmq.errors import RsmqError
from rsmq.inspector import TopicState
from rsmq.topic import Topic

app = noun("Topics: list, show, set, delete, why-not-trimmed.")


@app.command("list", epilog="Example: rsmq topic list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """All topics with what is in them."""
    states = ask(url, lambda session: session.inspector.topics())
    if as_json:
        dump(states)
        return
    rows = (
        (state.topic.name, state.topic.partitions, state.length, state.delayed, limit(state.topic), state.groups)
        for state in states
    )
    tabulate(("topic", "#partitions", "#messages", "#delayed", "limit", "groups"), rows, "there are no topics")


@app.command("show", epilog="Example: rsmq topic show orders")
def show(topic: TopicName, url: Url = None, as_json: Json = False) -> None:
    """One topic: its limits and its partitions."""
    state = ask(url, lambda session: find(session, topic))
    if as_json:
        dump(state)
        return
    describe(state.topic)
    say(f"groups: {', '.join(state.groups) or 'none'}")
    rows = ((each.partition, each.length, each.first_id, each.last_id, each.delayed) for each in state.partitions)
    tabulate(("#partition", "#messages", "first id", "last id", "#delayed"), rows, "it has no partitions")


@app.command("set", epilog="Example: rsmq topic set orders --retention-age P7D --max-length 1000000 --on-full reject")
def set_(
    topic: TopicName,
    partitions: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Create it with so many; they never change.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=0, help="Most messages in a partition; 0: no limit.")] = None,
    on_full: Annotated[
        Literal["reject", "trim"] | None, typer.Option(help="What a full topic does to a publisher.")
    ] = None,
    retention_age: Annotated[
        timedelta | None, typer.Option(parser=parse_span, metavar="SPAN", help="Keep settled messages so long, as P1D.")
    ] = None,
    retention_length: Annotated[
        int | None, typer.Option(min=0, help="... or until so many newer ones are in the partition.")
    ] = None,
    archive: Annotated[
        Literal["off", "required"] | None,
        typer.Option(help="required: trim nothing that `rsmq pipeline archive` has not committed."),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change the limits of a topic, or create it with --partitions."""
    given = {
        "max_length": max_length,
        "on_full": on_full,
        "retention_age": retention_age,
        "retention_length": retention_length,
        "archive": archive,
    }
    limits: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not limits and partitions is None:
        raise typer.BadParameter(f"say what to set: {', '.join('--' + name.replace('_', '-') for name in given)}")

    async def change(session: Session) -> Topic:
        if partitions is not None:
            await session.topics.ensure(topic, partitions)
        await session.topic(topic)
        return await session.topics.change(topic, **limits)

    changed = ask(url, change)
    dump(changed) if as_json else describe(changed)


@app.command("delete", epilog="Example: rsmq topic delete orders --yes")
def delete(topic: TopicName, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Delete a topic with its messages, groups and dead letters. Its workers must have stopped."""

    async def look(session: Session) -> TopicState:
        state = await find(session, topic)
        living = [member.id for member in await session.inspector.members(topic) if member.heard_ago is not None]
        if living:
            raise RsmqError(f"topic {topic!r} is being served: stop {', '.join(living)} first (`rsmq member list`)")
        return state

    state = ask(url, look)
    confirm(f"Delete topic {topic} with {state.length} messages and {len(state.groups)} groups?", is_agreed=yes)
    ask(url, lambda session: session.topics.delete(topic))
    dump({"deleted": topic, "messages": state.length}) if as_json else say(f"deleted {topic}")


@app.command("why-not-trimmed", epilog="Example: rsmq topic why-not-trimmed orders")
def why(topic: TopicName, url: Url = None, as_json: Json = False) -> None:
    """What keeps messages of a topic: a group, the archive, or its limits. Exit code 1 if any of the first two."""

    async def look(session: Session) -> list[tuple[int, Reason]]:
        found = await session.topic(topic)
        return [
            (partition, reason)
            for partition in range(found.partitions)
            for reason in await reasons(session.client, session.keys, found, partition)
        ]

    kept = ask(url, look)
    if as_json:
        dump([{"partition": partition} | asdict(reason) for partition, reason in kept])
    else:
        rows = ((partition, each.holder, each.oldest, each.why) for partition, each in kept)
        tabulate(("#partition", "kept by", "from", "why"), rows, f"there is nothing in {topic}")
    if any(not reason.is_limit for _, reason in kept):
        raise typer.Exit(1)


async def find(session: Session, topic: str) -> TopicState:
    """The state of a topic. Raises NotFound."""
    await session.topic(topic)
    state = await session.inspector.topic(topic)
    if state is None:
        raise NotFound(f"topic {topic!r} was deleted meanwhile")
    return state


def limit(topic: Topic) -> str:
    """Its bound, for people."""
    return f"{topic.max_length} {topic.on_full}" if topic.max_length else ""


def describe(topic: Topic) -> None:
    """Its limits, a line each."""
    say(f"{topic.name}: {topic.partitions} partitions")
    bound = f"{topic.max_length} messages in a partition, then {topic.on_full}" if topic.max_length else "no limit"
    say(f"length: {bound}")
    say(f"retention: settled messages for {topic.retention_age}, at most {topic.retention_length} in a partition")
    if topic.archive == "required":
        say("archive: required, nothing is trimmed before `rsmq pipeline archive` has committed it")
