"""`rsmq schedule`: schedules with their rule, next and last tick, and leader."""

from __future__ import annotations

from datetime import timedelta

from rsmq.cli.connection import CommandConnection, ask, asked
from rsmq.cli.output import print_rows
from rsmq.cli.parameters import AnyTopic, Json, Url, noun
from rsmq.handler.schedule import ScheduleRule
from rsmq.inspector.schedules import ScheduleState, look_up
from rsmq.inspector.text import timestamp
from rsmq.model.words import duration

app = noun("Schedules: list.")


@app.callback()
def schedules() -> None:
    """Makes `list` a command of its own although it is the only one."""


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


def described(rule: ScheduleRule) -> str:
    """When it ticks."""
    if rule.every_ms is not None:
        return f"every {duration(timedelta(milliseconds=rule.every_ms))}"
    return "" if rule.cron is None else f"{rule.cron} {rule.timezone}"
