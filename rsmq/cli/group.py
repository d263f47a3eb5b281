"""`rsmq group`: how far each group is, who owns what, and where it starts again."""

from __future__ import annotations

from typing import Annotated

import typer

from rsmq.cli.option import AnyTopic, GroupName, Json, TopicName, Url, Yes, noun
from rsmq.cli.printer import confirm, dump, say, span, tabulate
from rsmq.cli.session import Session, ask
from rsmq.cli.value import parse_place
from rsmq.errors import RsmqError
from rsmq.group import delete_group, reset_group, set_paused
from rsmq.inspector import GroupState, ShareState

app = noun("Groups: list, show, reset, pause, resume, delete.")


@app.command("list", epilog="Example: rsmq group list orders")
def list_(topic: AnyTopic = None, url: Url = None, as_json: Json = False) -> None:
    """All groups: what is left to deliver, in hand, waiting for a retry, dead."""

    async def look(session: Session) -> list[GroupState]:
        if topic is not None:
            await session.topic(topic)
        return await session.inspector.groups(topic)

    states = ask(url, look)
    if as_json:
        dump(states)
        return
    rows = (
        (state.topic, state.name, lag(state), state.pending, state.parked, state.dead_letters, len(state.members),
         state.distribution, "paused" if state.is_paused else "")
        for state in states
    )  # fmt: skip
    columns = ("topic", "group", "#lag", "#pending", "#parked", "#dead", "#members", "distribution", "state")
    tabulate(columns, rows, "there are no groups")


@app.command("show", epilog="Example: rsmq group show orders billing")
def show(topic: TopicName, group: GroupName, url: Url = None, as_json: Json = False) -> None:
    """One group, partition by partition: owner, epoch, lease, lag."""
    state = ask(url, lambda session: session.group(topic, group))
    if as_json:
        dump(state)
        return
    say(f"{group} of {topic}: {state.distribution or 'never joined'}, {'paused' if state.is_paused else 'running'}")
    say(f"members: {', '.join(state.members) or 'none'}")
    rows = (
        (each.partition, each.owner, each.epoch, lease(each), lag(each), each.pending, each.parked, each.dead_letters,
         each.consumers, each.last_delivered_id)
        for each in state.shares
    )  # fmt: skip
    columns = (
        "#partition", "owner", "#epoch", "lease", "#lag", "#pending", "#parked", "#dead", "#consumers", "delivered to",
    )  # fmt: skip
    tabulate(columns, rows, "it has no partitions")


@app.command("reset", epilog="Example: rsmq group reset orders billing --to 2026-01-31T12:00:00Z --yes")
def reset(
    topic: TopicName,
    group: GroupName,
    to: Annotated[
        str,
        typer.Option("--to", metavar="PLACE", help="earliest, latest, a stream id, or a time."),
    ],
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a group handle its topic again from a place. What is pending or waits for a retry is dropped."""
    place = parse_place(to)
    before = ask(url, lambda session: session.group(topic, group))
    confirm(
        f"Start group {group} of {topic} again at {to}, dropping {before.pending} pending and {before.parked} parked?",
        is_agreed=yes,
    )

    async def act(session: Session) -> GroupState:
        await reset_group(session.client, session.keys, await session.topic(topic), group, place)
        return await session.group(topic, group)

    after = ask(url, act)
    dump(after) if as_json else say(f"{group} of {topic} starts again at {to}: {lag(after)} messages before it")


@app.command("delete", epilog="Example: rsmq group delete orders billing --yes")
def delete(topic: TopicName, group: GroupName, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Forget a group that is not needed any more, with its retries and dead letters: it holds nothing back then."""

    async def look(session: Session) -> GroupState:
        state = await session.group(topic, group)
        members = await session.inspector.members(topic, group)
        living = [member.id for member in members if member.heard_ago is not None]
        if living:
            raise RsmqError(f"group {group!r} of {topic!r} is being served: stop {', '.join(living)} first")
        return state

    state = ask(url, look)
    confirm(
        f"Forget group {group} of {topic}, {lag(state)} messages before it, with {state.parked} parked and "
        f"{state.dead_letters} dead letters?",
        is_agreed=yes,
    )

    async def act(session: Session) -> None:
        await delete_group(session.client, session.keys, await session.topic(topic), group)

    ask(url, act)
    dump({"topic": topic, "deleted": group}) if as_json else say(f"deleted {group} of {topic}")


@app.command("pause", epilog="Example: rsmq group pause orders billing")
def pause(topic: TopicName, group: GroupName, url: Url = None, as_json: Json = False) -> None:
    """Deliver nothing new to a group. Its members keep their leases and finish what is in hand."""
    switch(topic, group, url, as_json, paused=True)


@app.command("resume", epilog="Example: rsmq group resume orders billing")
def resume(topic: TopicName, group: GroupName, url: Url = None, as_json: Json = False) -> None:
    """Deliver again."""
    switch(topic, group, url, as_json, paused=False)


def switch(topic: str, group: str, url: str | None, as_json: bool, *, paused: bool) -> None:
    """Pause or resume."""

    async def act(session: Session) -> None:
        await session.group(topic, group)
        await set_paused(session.client, session.keys, topic, group, paused=paused)

    ask(url, act)
    word = "paused" if paused else "running"
    dump({"topic": topic, "group": group, "is_paused": paused}) if as_json else say(f"{group} of {topic} is {word}")


def lag(state: GroupState | ShareState) -> str:
    """What was not delivered; after a reset into the middle the server knows only a bound."""
    return f"{'' if state.is_lag_exact else '<= '}{state.lag}"


def lease(share: ShareState) -> str:
    """How long the lease still runs."""
    if share.lease_left is None:
        return "free"
    left = share.lease_left
    return f"{span(left)} left" if left.total_seconds() > 0 else f"ran out {span(-left)} ago"
