"""The pages of schedules: all of them, and one with its last runs."""

from __future__ import annotations

from datetime import timedelta

from rsmq.dashboard.html import Content, Row, about, block, link, table, tag, text_field
from rsmq.dashboard.page import Page, Visit
from rsmq.dashboard.queries import PageNotFound
from rsmq.dashboard.roles import Role
from rsmq.inspector.schedules import ScheduleState, look_up
from rsmq.inspector.text import note_of, result_of, rules, timestamp
from rsmq.model.words import duration

COLUMNS = ("schedule", "topic", "when", "next", "last", "result", "leader", "")


async def schedules(visit: Visit) -> Page:
    """All schedules that the visitor sees; those that fail first."""
    queries = visit.queries
    found = [each for each in await look_up(queries.client, queries.keys, queries.topics) if visit.sees(each.topic)]
    wanted = visit.given("q").casefold()
    shown = sorted((each for each in found if wanted in f"{each.topic}/{each.name}".casefold()), key=worst_first)
    rows = [row_of(visit, each) for each in shown]
    body = visit.live.table("schedules", COLUMNS, rows, "there are no schedules")
    return Page("Schedules", [visit.search(), body], is_live=True)


def worst_first(state: ScheduleState) -> tuple[bool, bool, str, str]:
    """Those that fail, those without a leader, then by name."""
    return not state.failures, bool(state.leader or state.paused), state.topic, state.name


def row_of(visit: Visit, state: ScheduleState) -> Row:
    """A row of a table of schedules."""
    cells: tuple[Content, ...] = (
        link(state.name, visit.url("schedule", state.topic, state.name)),
        link(state.topic, visit.url("topic", state.topic)),
        rules(state),
        "paused" if state.paused else timestamp(state.next) or "–",
        timestamp(state.last) or "never",
        result_of(state),
        state.leader or ("any worker" if state.is_added else "none"),
        buttons(visit, state),
    )
    return Row(f"{state.topic}/{state.name}", cells, "bad" if state.failures else "")


async def schedule(visit: Visit, topic: str, name: str) -> Page:
    """One schedule: its rules, its last runs, and the traceback of what fails now."""
    visit.check(topic)
    queries = visit.queries
    found = {each.name: each for each in await look_up(queries.client, queries.keys, queries.topics, topic)}
    if name not in found:
        raise PageNotFound(f"topic {topic!r} has no schedule {name!r}")
    state = found[name]
    values = {
        "topic": topic, "when": rules(state), "next": "paused" if state.paused else timestamp(state.next) or "–",
        "last": timestamp(state.last) or "never", "leader": state.leader or "none",
        "failures": str(state.failures), "paused since": timestamp(state.paused) or "–",
    }  # fmt: skip
    rows = [
        Row(str(run.tick), (timestamp(run.time), run.result, duration(timedelta(seconds=run.seconds)), note_of(run)))
        for run in reversed(state.runs)
    ]
    return Page(
        f"Schedule {name}",
        [
            about(values), buttons(visit, state), changes(visit, state),
            tag("h2", "Last runs"), table(("tick", "result", "took", "note"), rows, "it has not run yet"),
            [tag("h2", "Traceback"), block(state.trace, "payload")] if state.trace else None,
        ],
        crumbs=[("Schedules", visit.url("schedules"))],
    )  # fmt: skip


def buttons(visit: Visit, state: ScheduleState) -> Content:
    """What may be done to it."""
    return tag("div", [run_now(visit, state), switch(visit, state)], class_="bar")


def changes(visit: Visit, state: ScheduleState) -> Content:
    """The forms for another rule, back to that of the code, and to delete one that no worker has in its code."""
    subject = {"topic": state.topic, "schedule": state.name}
    fields = [
        text_field("rule", "rule", placeholder="5m, or 0 6 * * *", required=True),
        text_field("timezone", "time zone", "UTC"),
    ]
    made = [visit.action("set-schedule", "set", Role.ACT, state.topic, subject, fields)]
    if state.set_rule is not None:
        made.append(visit.action("reset-schedule", "back to the code's rule", Role.ACT, state.topic, subject))
    if state.is_added or not state.leader:
        made.append(visit.action("remove-schedule", "remove", Role.ADMIN, state.topic, subject, danger=True))
    return tag("div", made, class_="bar")


def add_form(visit: Visit, topic: str) -> Content:
    """The form that adds a schedule to a topic."""
    if not visit.visitor.may(Role.ACT, topic):
        return None
    fields = [
        text_field("schedule", "name", required=True), text_field("rule", "rule", placeholder="5m", required=True),
        text_field("timezone", "time zone", "UTC"), text_field("payload", "payload (JSON)", required=True),
        text_field("key", "key"),
    ]  # fmt: skip
    shown = visit.action("add-schedule", "add", Role.ACT, topic, {"topic": topic}, fields)
    return tag("details", tag("summary", "add a schedule"), tag("div", shown, class_="bar"))


def run_now(visit: Visit, state: ScheduleState) -> Content:
    """A button, or that its run is asked for."""
    if state.run_asked is not None:
        return "asked for"
    values = {"topic": state.topic, "schedule": state.name}
    return visit.action("run-schedule", "run now", Role.ACT, state.topic, values)


def switch(visit: Visit, state: ScheduleState) -> Content:
    """The button that pauses it, or lets it go on."""
    name = "resume" if state.paused else "pause"
    return visit.action(f"{name}-schedule", name, Role.ACT, state.topic, {"topic": state.topic, "schedule": state.name})
