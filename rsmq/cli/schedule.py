"""`rsmq schedule`: what is published by the clock, when it comes next, and who leads it."""

from __future__ import annotations

from datetime import datetime, timedelta

from rsmq.cli.option import AnyTopic, Json, Url, noun
from rsmq.cli.printer import dump, span, tabulate
from rsmq.cli.session import Session, ask
from rsmq.schedule import Rule
from rsmq.timetable import ScheduleState, look_up

app = noun("Schedules: list.")


@app.callback()
def schedules() -> None:
    """Keeps `list` a word of its own while it is the only one."""


@app.command("list", epilog="Example: rsmq schedule list reports")
def list_(topic: AnyTopic = None, url: Url = None, as_json: Json = False) -> None:
    """What `broker.every` publishes: its rule, the next and the last tick, and the member that leads it."""

    async def look(session: Session) -> list[ScheduleState]:
        if topic is not None:
            await session.topic(topic)
        return await look_up(session.client, session.keys, session.topics, topic)

    states = ask(url, look)
    if as_json:
        dump(states)
        return
    rows = (
        (each.topic, each.name, told(each.rule), moment(each.next), moment(each.last), each.leader or "nobody")
        for each in states
    )
    tabulate(("topic", "schedule", "when", "next", "last", "leader"), rows, "there are no schedules")


def told(rule: Rule) -> str:
    """When it ticks."""
    if rule.every_ms is not None:
        return f"every {span(timedelta(milliseconds=rule.every_ms))}"
    return "" if rule.cron is None else f"{rule.cron} {rule.timezone}"


def moment(at: datetime | None) -> str:
    """In UTC, to the second."""
    return "" if at is None else at.strftime("%Y-%m-%d %H:%M:%SZ")
