"""`rsmq schedule`: schedules with their rule, next and last tick, and leader; one run beside the ticks."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked
from rsmq.cli.output import print_result
from rsmq.cli.parameters import AnyTopic, Json, TopicName, Url, noun
from rsmq.cli.tables import print_rows
from rsmq.control import run_schedule
from rsmq.handler.schedule import ScheduleRule
from rsmq.inspector.schedules import ScheduleState, look_up
from rsmq.inspector.text import timestamp
from rsmq.model.words import duration

app = noun("Schedules: list, run.")


@app.command("list", epilog="Example: rsmq schedule list reports")
def list_(topic: AnyTopic = None, url: Url = None, as_json: Json = False) -> None:
    """The schedules of `broker.every`: rule, next and last tick, and the member that leads each."""

    async def read(connection: CommandConnection) -> list[ScheduleState]:
        if topic is not None:
            await connection.topic(topic)
        return await look_up(connection.client, connection.keys, connection.topics, topic)

    states = ask(url, read)
    rows = (
        (each.topic, each.name, described(each.rule), timestamp(each.next), timestamp(each.last), each.leader or "none")
        for each in states
    )
    columns = ("topic", "schedule", "when", "next", "last", "leader")
    print_rows(states, columns, rows, asked("there are no schedules", url), as_json=as_json)


@app.command("run", epilog="Example: rsmq schedule run reports morning")
def run(
    topic: TopicName,
    name: Annotated[str, typer.Argument(help="The schedule.", metavar="SCHEDULE", show_default=False)],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish a schedule once now, beside its ticks. The worker that leads it does so, within a third of a lease."""

    async def write(connection: CommandConnection) -> tuple[datetime, str]:
        found = await connection.topic(topic)
        states = await look_up(connection.client, connection.keys, connection.topics, topic)
        leaders = {each.name: each.leader for each in states}
        if name not in leaders:
            some = f"its schedules are {', '.join(leaders)}" if leaders else "it has no schedules"
            raise NotFound(f"topic {topic!r} has no schedule {name!r}: {some}")
        return await run_schedule(connection.client, connection.keys, found, name), leaders[name]

    asked_at, leader = ask(url, write)
    by = f"{leader} publishes it" if leader else "no worker leads it: it is published when one starts"
    about = {"topic": topic, "name": name, "asked": asked_at, "leader": leader}
    print_result(about, f"{name} of {topic} is asked for: {by}", as_json=as_json)


def described(rule: ScheduleRule) -> str:
    """When it ticks."""
    if rule.every_ms is not None:
        return f"every {duration(timedelta(milliseconds=rule.every_ms))}"
    return "" if rule.cron is None else f"{rule.cron} {rule.timezone}"
