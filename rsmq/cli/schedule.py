"""`rsmq schedule`: schedules with their rules, runs and leaders; publish now, pause, change, add and remove them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any

import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked, codecs_for_topic
from rsmq.cli.output import print_line, print_result
from rsmq.cli.parameters import (
    PAYLOAD,
    AnyTopic,
    AsText,
    Json,
    Plain,
    TopicName,
    Url,
    duration_option,
    noun,
    parse_payload,
)
from rsmq.cli.tables import print_rows
from rsmq.control import Schedules
from rsmq.errors import ConfigError
from rsmq.inspector.schedules import ScheduleState, look_up
from rsmq.inspector.text import note_of, result_of, rules, timestamp
from rsmq.model.duration import Duration
from rsmq.model.encoding import Encoding
from rsmq.model.words import duration, suggestion

app = noun("Schedules: list, show, run, pause, resume, set, add, remove.")

Name = Annotated[str, typer.Argument(help="The schedule.", metavar="SCHEDULE", show_default=False)]
Cron = Annotated[str | None, typer.Option(help="A cron expression, such as '0 6 * * MON-FRI'.")]
Zone = Annotated[str, typer.Option(help="Time zone of the cron expression, such as Europe/Berlin.")]


@app.command("list", epilog="Example: rsmq schedule list reports")
def list_(topic: AnyTopic = None, url: Url = None, as_json: Json = False) -> None:
    """The schedules: rule, next tick, last run and what became of it, and the member that leads each."""

    async def read(connection: CommandConnection) -> list[ScheduleState]:
        if topic is not None:
            await connection.topic(topic)
        return await look_up(connection.client, connection.keys, connection.topics, topic)

    states = ask(url, read)
    rows = (
        (each.topic, each.name, rules(each), "paused" if each.paused else timestamp(each.next),
         timestamp(each.last) or "never", result_of(each), each.leader or "none")
        for each in states
    )  # fmt: skip
    columns = ("topic", "schedule", "when", "next", "last", "result", "leader")
    print_rows(states, columns, rows, asked("there are no schedules", url), as_json=as_json)


@app.command("show", epilog="Example: rsmq schedule show reports morning")
def show(topic: TopicName, name: Name, url: Url = None, as_json: Json = False) -> None:
    """The last runs of a schedule, the newest first, and the traceback of what fails now."""
    state = ask(url, lambda connection: one(connection, topic, name))
    rows = ((timestamp(run.time), run.result, duration(timedelta(seconds=run.seconds)), note_of(run))
            for run in reversed(state.runs))  # fmt: skip
    if not as_json:
        paused = f", paused since {timestamp(state.paused)}" if state.paused else ""
        print_line(f"{topic}/{name}: {rules(state)}{paused}; next {timestamp(state.next) or 'none'}")
    print_rows(state, ("tick", "result", "took", "note"), rows, "it has not run yet", as_json=as_json)
    if state.trace and not as_json:
        print_line(state.trace.rstrip())


@app.command("run", epilog="Example: rsmq schedule run reports morning")
def run(topic: TopicName, name: Name, url: Url = None, as_json: Json = False) -> None:
    """Publish a schedule once now, beside its ticks. The worker that leads it does so, within a third of a lease."""

    async def write(connection: CommandConnection) -> tuple[Any, str]:
        state = await one(connection, topic, name)
        return await commands(connection).run(topic, name), state.leader

    asked_at, leader = ask(url, write)
    by = f"{leader} publishes it" if leader else "no worker leads it: it is published when one starts"
    about = {"topic": topic, "name": name, "asked": asked_at, "leader": leader}
    print_result(about, f"{name} of {topic} is asked for: {by}", as_json=as_json)


@app.command("pause", epilog="Example: rsmq schedule pause reports morning")
def pause(topic: TopicName, name: Name, url: Url = None, as_json: Json = False) -> None:
    """Publish no tick of a schedule until it is resumed, also over restarts and deployments."""
    changed(url, topic, name, lambda each: each.pause(topic, name), "is paused", as_json=as_json)


@app.command("resume", epilog="Example: rsmq schedule resume reports morning")
def resume(topic: TopicName, name: Name, url: Url = None, as_json: Json = False) -> None:
    """Go on with the next tick of a schedule: none of those in between is published."""
    changed(url, topic, name, lambda each: each.resume(topic, name), "goes on with its next tick", as_json=as_json)


@app.command("set", epilog="Example: rsmq schedule set reports morning --cron '0 7 * * *' --timezone Asia/Seoul")
def set_(
    topic: TopicName,
    name: Name,
    every: Annotated[timedelta | None, duration_option("An interval, such as 5m.")] = None,
    cron: Cron = None,
    timezone: Zone = "UTC",
    reset: Annotated[bool, typer.Option("--reset", help="Back to the rule of the code.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Give a schedule another rule than its code, from now on, also over restarts and deployments."""
    if reset:
        said = "has the rule of its code again"
        changed(url, topic, name, lambda each: each.reset(topic, name), said, as_json=as_json)
        return
    rule = rule_of(every, cron)
    change: Callable[[Schedules], Awaitable[None]] = lambda each: each.set(topic, name, rule, timezone=timezone)  # noqa: E731
    changed(url, topic, name, change, "has its new rule", as_json=as_json)


@app.command("add", epilog="""Example: rsmq schedule add reports customer-7 '{"customer": 7}' --every 1h""")
def add(
    topic: TopicName,
    name: Name,
    payload: Annotated[str, typer.Argument(help=PAYLOAD)],
    every: Annotated[timedelta | None, duration_option("An interval, such as 5m.")] = None,
    cron: Cron = None,
    timezone: Zone = "UTC",
    key: Annotated[str | None, typer.Option(help="The ordering key of its messages.")] = None,
    band: Annotated[str | None, typer.Option(help="The band of its messages, such as urgent.")] = None,
    text: AsText = False,
    plain: Plain = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Add a schedule that no code has, or change it. A worker publishes the payload at each tick.

    The payload is encrypted as by `rsmq publish`. Workers then need the key.
    """
    rule, content = rule_of(every, cron), parse_payload(payload, is_text=text)

    async def write(connection: CommandConnection) -> None:
        client, keys, topics = connection.client, connection.keys, connection.topics
        codecs = [] if plain else await codecs_for_topic(client, keys, await topics.find(topic))
        schedules = Schedules(client, keys, topics, Encoding(codecs, connection.encoding.limit))
        await schedules.upsert(name, rule, topic, content, key=key, band=band, timezone=timezone)

    ask(url, write)
    print_result({"topic": topic, "name": name}, f"{name} of {topic} is added", as_json=as_json)


@app.command("remove", epilog="Example: rsmq schedule remove reports customer-7")
def remove(topic: TopicName, name: Name, url: Url = None, as_json: Json = False) -> None:
    """Delete a schedule that was added, or one whose code is gone."""
    changed(url, topic, name, lambda each: each.remove(topic, name), "is removed", as_json=as_json)


def commands(connection: CommandConnection) -> Schedules:
    """The commands on this connection."""
    return Schedules(connection.client, connection.keys, connection.topics)


async def one(connection: CommandConnection, topic: str, name: str) -> ScheduleState:
    """The schedule, or NotFound."""
    await connection.topic(topic)
    states = {each.name: each for each in await look_up(connection.client, connection.keys, connection.topics, topic)}
    if name not in states:
        some = suggestion(name, states, "schedules") or "it has no schedules"
        raise NotFound(f"topic {topic!r} has no schedule {name!r}: {some}")
    return states[name]


def changed(
    url: str | None, topic: str, name: str, change: Callable[[Schedules], Awaitable[None]], said: str, *, as_json: bool
) -> None:
    """Change a schedule that exists, and say so."""

    async def write(connection: CommandConnection) -> None:
        await one(connection, topic, name)
        await change(commands(connection))

    ask(url, write)
    print_result({"topic": topic, "name": name}, f"{name} of {topic} {said}", as_json=as_json)


def rule_of(every: timedelta | None, cron: str | None) -> Duration:
    """The rule that was given. Raises ConfigError for none, and for two."""
    if (every is None) == (cron is None):
        raise ConfigError("give --every or --cron")
    return every if every is not None else str(cron)
