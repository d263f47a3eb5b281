"""The pages of processes: where they run, since when, and what each of them does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from rsmq.dashboard.html import Content, Row, about, link, tag
from rsmq.dashboard.overview import member_table, pending_table, running_table, spoken
from rsmq.dashboard.page import Page, Visit, joined
from rsmq.dashboard.queries import PageNotFound
from rsmq.dashboard.roles import Role
from rsmq.inspector.state import MemberState
from rsmq.inspector.text import age, timestamp
from rsmq.model.words import size

COLUMNS = (
    "process", "host", "#pid", "version", "#memory", "#up for", "heard of", "#running", "#longest", "serves",
)  # fmt: skip


async def processes(visit: Visit) -> Page:
    """All worker processes that the visitor sees something of; the dead ones first, then the newest."""
    board, wanted = await visit.board(), visit.given("q").casefold()
    found = {name: some for name, some in by_process(board.members).items() if matches(some, wanted)}
    rows = [row_of(visit, some) for some in sorted(found.values(), key=order)]
    shown = visit.live.table("processes", COLUMNS, rows, "no worker runs")
    return Page("Processes", [visit.search(), shown], is_live=True)


async def process(visit: Visit, name: str) -> Page:
    """One process: what it serves, and the messages that it has now."""
    some = by_process((await visit.board()).members).get(name)
    if some is None:
        raise PageNotFound(f"there is no process {name!r}: it may have ended")
    one = some[0]
    values: dict[str, Content] = {
        "host": one.process.host, "pid": str(one.process.pid or ""),
        "version": one.process.app_version or "not known: RSMQ_APP_VERSION says it",
        "version of rsmq": one.process.version,
        "memory": memory(one), "started": timestamp(one.process.started), "up for": up_for(one),
        "heard of": heard(some), "loop lag": age(one.loop_lag),
    }  # fmt: skip
    tables: list[Content] = []
    for each in some:
        where = f"{each.topic}-{each.group}"
        if each.longest_calls:
            tables.append(tag("h2", f"Runs of {each.group} of {each.topic}"))
            tables.append(running_table(visit, each.topic, [each], f"running-{where}"))
        pending = [row for row in await visit.queries.pending(each.topic, each.group) if row.member == name]
        if pending:
            tables.append(tag("h2", f"Pending of {each.group} of {each.topic}"))
            tables.append(pending_table(visit, each.topic, pending, f"pending-{where}"))
    return Page(
        f"Process {name}",
        [
            visit.live.part("about", about(values)), ends(visit, some), tag("h2", "Serves"), member_table(visit, some),
            visit.live.part("messages", tables or tag("p", "it has no message now", class_="nothing")),
        ],
        is_live=True,
        crumbs=[("Processes", visit.url("processes"))],
    )  # fmt: skip


def ends(visit: Visit, some: Sequence[MemberState]) -> Content:
    """The buttons that let it end, for those who may act on all that they see of it."""
    if not is_alive(some) or not all(visit.visitor.may(Role.ACT, each.topic) for each in some):
        return None
    values = {"process": some[0].id}
    buttons = [
        visit.action("quiet-process", "quiet", Role.ACT, None, values),
        visit.action("stop-process", "stop", Role.ACT, None, values, danger=True),
    ]
    return tag("div", buttons, class_="bar")


def by_process(members: Iterable[MemberState]) -> dict[str, list[MemberState]]:
    """The members of each process: one for each group that it serves."""
    found: dict[str, list[MemberState]] = defaultdict(list)
    for member in members:
        found[member.id].append(member)
    return found


def matches(some: Sequence[MemberState], wanted: str) -> bool:
    """Whether a process, its host, or what it serves has this in its name."""
    words = [some[0].id, some[0].process.host, some[0].process.version]
    return any(wanted in word.casefold() for word in [*words, *(f"{each.topic}/{each.group}" for each in some)])


def order(some: Sequence[MemberState]) -> tuple[bool, float, str]:
    """Dead ones first, then the newest."""
    started = some[0].process.started
    return is_alive(some), -started.timestamp() if started else 0.0, some[0].id


def is_alive(some: Sequence[MemberState]) -> bool:
    """Whether its heartbeat has been heard of."""
    return any(each.heard_ago is not None for each in some)


def row_of(visit: Visit, some: Sequence[MemberState]) -> Row:
    """A row of the table."""
    one = some[0]
    longest = max((each.longest for each in some if each.longest is not None), default=None)
    running, most = sum(each.work.running for each in some), sum(each.concurrency for each in some)
    serves = [link(f"{each.topic}/{each.group}", visit.url("group", each.topic, each.group)) for each in some]
    return Row(one.id, (
        link(one.id, visit.url("process", one.id)), one.process.host or "?", one.process.pid or "?",
        one.process.release or "?", memory(one), up_for(one), heard(some), f"{running} of {most}",
        "–" if longest is None else spoken(longest), tag("span", joined(serves))),
    )  # fmt: skip


def heard(some: Sequence[MemberState]) -> Content:
    """The time since the last heartbeat."""
    ages = [each.heard_ago for each in some if each.heard_ago is not None]
    return f"{spoken(min(ages))} ago" if ages else tag("span", "dead", class_="unserved")


def memory(one: MemberState) -> str:
    """What it has in main memory."""
    return "?" if one.process.memory is None else size(one.process.memory)


def up_for(one: MemberState) -> str:
    """Since when it runs, by the clock of its machine."""
    started = one.process.started
    return "?" if started is None else spoken(max(timedelta(0), datetime.now(UTC) - started))
