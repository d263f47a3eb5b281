"""The live pages: the overview with its charts, all members, one topic, one group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from rsmq.dashboard.chart import Mark, Point, chart
from rsmq.dashboard.flow import flows
from rsmq.dashboard.handler import failure_series, handler_parts
from rsmq.dashboard.history import GAP, HistoryMinute
from rsmq.dashboard.html import Content, Html, Row, about, link, tag, text_field
from rsmq.dashboard.page import Page, Visit, joined
from rsmq.dashboard.queries import EVERY, MOST_NAMED, PendingMessage
from rsmq.dashboard.roles import Role
from rsmq.dashboard.schedule import COLUMNS, add_form, row_of
from rsmq.inspector.obstacles import obstacles
from rsmq.inspector.schedules import look_up
from rsmq.inspector.state import GroupPartition, MemberState, PartitionState, left_before
from rsmq.inspector.text import (
    age,
    describe_left,
    limits_of,
    rate,
    ready,
    state,
    timestamp,
    trend,
    untold,
    waiting,
    waiting_of,
)
from rsmq.inspector.trend import Board, GroupTrend, TopicTrend
from rsmq.model.clock import from_epoch_ms
from rsmq.model.words import count, duration, number
from rsmq.redis.outboxes import OutboxState, read_outboxes
from rsmq.redis.topics import Topic

T = TypeVar("T")

UNSERVED: Final = timedelta(seconds=30)
"""A relay counts every five seconds: after this time there is none."""
MOST_ROWS: Final = 50
"""Rows of a table of the overview."""

MOST_SAID: Final = 10
"""Lines about what stands in the way of backlogs."""

Measure = Callable[[Board], float | None]

RANGES: Final = {"": ("3 minutes", 0), "1h": ("1 hour", 1), "6h": ("6 hours", 6), "24h": ("24 hours", 24)}


def summed(parts: Iterable[float | None]) -> float | None:
    """The sum of the known parts; None if there are some and none is known."""
    found = list(parts)
    known = [part for part in found if part is not None]
    return round(sum(known), 1) if known or not found else None


FLOW: Final[dict[str, Measure]] = {
    "in": lambda board: summed(topic.rate_in for topic in board.topics),
    "settled": lambda board: summed(group.rate_out for group in board.groups),
}
WHOLE: Final[dict[str, Measure]] = {"backlog": lambda board: summed(group.backlog for group in board.groups)}
BACKLOG: Final[dict[str, Measure]] = {
    "unread": lambda board: summed(group.unread for group in board.groups),
    "ready": lambda board: summed(group.work.ready for group in board.groups),
    "running": lambda board: summed(group.work.running for group in board.groups),
    "waiting": lambda board: summed(group.work.waiting for group in board.groups),
}
DEAD: Final[dict[str, Measure]] = {"dead letters": lambda board: summed(group.dead_letters for group in board.groups)}


async def overview(visit: Visit) -> Page:
    """Totals and charts, topics and groups; the worst groups first."""
    board = await visit.board()
    wanted = visit.given("q").casefold()
    topics = [each for each in board.topics if wanted in each.name.casefold()]
    groups = [each for each in board.groups if wanted in f"{each.topic}/{each.name}".casefold()]
    search = tag(
        "form", text_field("q", "name contains", visit.given("q"), type="search"), tag("button", "show"), class_="bar"
    )
    return Page(
        "Overview",
        [
            tiles(visit, board), obstacle_list(visit, sorted(groups, key=worst_first)), ranges(visit),
            charts(visit, {each.name for each in board.topics}), search,
            tag("h2", "Groups"), group_table(visit, first(visit, sorted(groups, key=worst_first))),
            more(visit, "groups", len(groups)),
            tag("h2", "Topics"), topic_table(visit, first(visit, topics)), more(visit, "topics", len(topics)),
            outbox_table(visit, await read_outboxes(visit.queries.client, visit.queries.keys)),
        ],
        is_live=True,
    )  # fmt: skip


def first(visit: Visit, rows: Sequence[T]) -> Sequence[T]:
    """The first MOST_ROWS, or all if the visitor wants them: a browser needs long for a table of hundreds of rows."""
    return rows if visit.given("rows") == "all" else rows[:MOST_ROWS]


def more(visit: Visit, name: str, count: int) -> Html:
    """How many of a table are not shown, and the way to them."""
    rest = 0 if visit.given("rows") == "all" else count - MOST_ROWS
    if rest <= 0:
        return visit.live.part(f"more-{name}", class_="none")
    given = {each: visit.given(each) for each in ("q", "range") if visit.given(each)}
    show = link(f"show all {number(count)} {name}", visit.url(**given, rows="all"))
    return visit.live.part(f"more-{name}", f"{number(rest)} more: ", show, ", or filter by name")


async def members(visit: Visit) -> Page:
    """All members."""
    board = await visit.board()
    return Page("Members", [member_table(visit, board.members)], is_live=True)


async def topic(visit: Visit, name: str) -> Page:
    """One topic: its charts, groups, partitions, and what waits for a time."""
    visit.check(name)
    found, board = await visit.queries.topic(name), only(await visit.board(), name)
    links = [link("messages", visit.url("messages", name)), link("delayed", visit.url("delayed", name))]
    if visit.visitor.may(Role.ACT, name):
        links.append(link("publish", visit.url("publish", name)))
    keys, queries = visit.queries.keys, visit.queries
    schedules = await look_up(queries.client, keys, queries.topics, name)
    rows = [row_of(visit, each) for each in schedules]
    state_of = visit.queries.poller.topic_state(name)
    return Page(
        f"Topic {found.name}",
        [
            tag("p", joined(links, " · ")), about({**limits_of(found)}), ranges(visit), charts(visit, {name}),
            tag("h2", "Groups"), group_table(visit, board.groups), topic_table(visit, board.topics),
            left_of(visit, found, board.groups) if found.layout.is_resized else None,
            tag("h2", "Partitions"), partitions_of_topic(visit, state_of.partitions if state_of else ()),
            [tag("h2", "Schedules"), visit.live.table("schedules", COLUMNS, rows, "")] if rows else None,
            add_form(visit, name),
        ],
        is_live=True,
        crumbs=[("Overview", visit.url())],
    )  # fmt: skip


async def group(visit: Visit, name: str, group: str) -> Page:
    """One group: its partitions with their owners, its members and what they run, and what may be done to it."""
    visit.check(name)
    board = only(await visit.board(), name, group)
    if not board.groups:
        await visit.queries.group(name, group)  # it may be newer than the board
    shown = next(iter(board.groups), None)
    pending = await visit.queries.pending(name, group)
    links = [
        link("dead letters", visit.url("dead-letters", name, group)),
        link("parked", visit.url("parked", name, group)),
    ]
    subject = {"topic": name, "group": group}
    is_paused = shown is not None and shown.is_paused
    switch = ("resume", "resume") if is_paused else ("pause", "pause")
    actions = [
        visit.live.part("switch", visit.action(*switch, Role.ACT, name, subject)),
        visit.action(
            "reset", "reset", Role.ADMIN, name, subject,
            tag("label", "to", tag("select", [tag("option", each) for each in ("earliest", "latest")], name="to")),
            text_field("at", "or to a time (UTC)", type="datetime-local", step=1), danger=True,
        ),
    ]  # fmt: skip
    return Page(
        f"Group {group} of {name}",
        [
            tag("p", links[0], " · ", links[1]), group_table(visit, board.groups), obstacle_list(visit, board.groups),
            tag("div", actions, class_="bar"),
            ranges(visit), charts(visit, {name}, group),
            flows(visit, shown) if shown else None,
            *hold_table(visit, shown),
            handler_parts(visit, shown) if shown else None,
            tag("h2", "Members"), member_table(visit, board.members),
            tag("h2", "Running"), running_table(visit, name, board.members),
            tag("h2", "Pending"), pending_table(visit, name, pending),
            tag("h2", "Partitions"), share_table(visit, shown.shares if shown else ()),
        ],
        is_live=True,
        crumbs=[("Overview", visit.url()), (f"topic {name}", visit.url("topic", name))],
    )  # fmt: skip


def obstacle_list(visit: Visit, groups: Sequence[GroupTrend]) -> Html:
    """What stands in the way of backlogs, as the doctor says it: of the first groups that have something."""
    found = [said for each in groups for said in (*obstacles(each), *([untold(each)] if each.untold else []))]
    rest = [tag("li", f"and {number(len(found) - MOST_SAID)} more: rsmq doctor")] if len(found) > MOST_SAID else []
    lines = [*(tag("li", said.replace("`", "")) for said in found[:MOST_SAID]), *rest]
    return visit.live.part("obstacles", *lines, element="ul", class_="obstacles" if found else "none")


def hold_table(visit: Visit, shown: GroupTrend | None) -> list[Html]:
    """The names of which nothing starts, if there are any."""
    if shown is None or not shown.holds:
        return []
    subject = {"topic": shown.topic, "group": shown.name}
    rows = [
        Row(
            each.name,
            (
                each.name or "everything", each.kind, timestamp(each.until),
                visit.action("end-hold", "end", Role.ACT, shown.topic, {**subject, "name": each.name}),
            ),
        )
        for each in shown.holds
    ]  # fmt: skip
    return [tag("h2", "Held"), visit.live.table("held", ("name", "by", "until", ""), rows, "nothing is held")]


def only(board: Board, topic: str, group: str | None = None) -> Board:
    """A board of one topic, or of one group of it."""
    return Board(
        board.span,
        tuple(each for each in board.topics if each.name == topic),
        tuple(each for each in board.groups if each.topic == topic and group in (None, each.name)),
    )


def worst_first(group: GroupTrend) -> tuple[bool, bool, int, str, str]:
    """Groups that need a look come first: with work and without members, then by backlog."""
    backlog = group.known_backlog
    return (not (group.is_unserved and backlog), not group.dead_letters, -backlog, group.topic, group.name)


# -- totals and charts ------------------------------------------------------------------------------------------------


def tiles(visit: Visit, board: Board) -> Html:
    """A number for each measure."""
    made = []
    for name, measure in (WHOLE | FLOW | BACKLOG | DEAD).items():
        value = measure(board)
        text = rate(value) if name in FLOW else number(None if value is None else int(value))
        label = f"{name} a second" if name in FLOW else name
        made.append(visit.live.part(f"total-{name.replace(' ', '-')}", tag("span", label), tag("b", text),
                                      class_="tile", data_total=name))  # fmt: skip
    oldest = max((each.oldest for each in board.groups if each.oldest is not None), default=None)
    made.insert(1, visit.live.part("total-oldest", tag("span", "oldest"), tag("b", age(oldest)), class_="tile"))
    return tag("div", made, class_="tiles")


def ranges(visit: Visit) -> Html:
    """Links to other times."""
    wanted = visit.given("range")
    base = visit.back().partition("?")[0]
    made = [
        tag(
            "a", text, href=f"{base}{f'?range={name}' if name else ''}", aria_current="true" if name == wanted else None
        )
        for name, (text, _) in RANGES.items()
    ]
    return tag("p", tag("span", "last ", class_="dim"), joined(made), class_="ranges")


def charts(visit: Visit, seen: set[str], group: str | None = None) -> Html:
    """Charts, side by side where there is room, with a mark where processes have started."""
    name = visit.given("range")
    gap = GAP if RANGES.get(name, ("", 0))[1] else timedelta(seconds=3 * EVERY)
    made, starts = [], marks(visit, seen, group)
    for at, (title, measures) in enumerate((("messages a second", FLOW), ("backlog", BACKLOG))):
        if group is not None:
            measures = {each: measure for each, measure in measures.items() if each != "in"}
        made.append(chart(visit.live, f"chart-{at}", title, series(visit, measures, seen, group), gap, starts))
    made.append(chart(visit.live, "chart-2", "failures a second", failures(visit, seen, group), gap, starts))
    return tag("div", made, class_="charts")


def failures(visit: Visit, seen: set[str], group: str | None) -> dict[str, list[Point]]:
    """Attempts that failed, and those that are tried again."""
    samples = recorded(visit)
    if samples is not None:
        return {name: [(each.at, each.total(name, seen, group)) for each in samples] for name in ("failed", "retried")}
    return failure_series([(each.at, narrowed(each.board, seen, group)) for each in visit.queries.poller.history])


def marks(visit: Visit, seen: set[str], group: str | None) -> list[Mark]:
    """When processes have started: a deployment, or a crash."""
    samples = recorded(visit)
    if samples is not None:
        found = [(each, each.started(seen, group)) for each in samples]
        return [
            (each.at - timedelta(seconds=30), f"{count(number, 'process', 'processes')} started"
             + (f" ({', '.join(releases)})" if (releases := each.released(seen, group)) else ""))
            for each, number in found if number
        ]  # fmt: skip
    started = dict[str, Mark]()
    for member in narrowed(visit.queries.poller.board, seen, group).members:
        if member.process.started is not None:
            release = f" ({member.process.release})" if member.process.release else ""
            started[member.id] = (member.process.started, f"{member.id} started{release}")
    return list(started.values())


def recorded(visit: Visit) -> list[HistoryMinute] | None:
    """The minutes of the hours that are asked for; None for the last minutes, which the poller has."""
    hours = RANGES.get(visit.given("range"), ("", 0))[1]
    if not hours:
        return None
    samples = visit.room.history.samples
    since = from_epoch_ms(0) if not samples else samples[-1].at - timedelta(hours=hours)
    return [each for each in samples if each.at >= since]


def series(visit: Visit, measures: Mapping[str, Measure], seen: set[str], group: str | None) -> dict[str, list[Point]]:
    """The lines of a chart: of the last minutes from the poller, of hours from the history."""
    shown = recorded(visit)
    if shown is not None:
        return {name: [(each.at, each.total(name, seen, group)) for each in shown] for name in measures}
    boards = [(each.at, narrowed(each.board, seen, group)) for each in visit.queries.poller.history]
    return {name: [(at, measure(board)) for at, board in boards] for name, measure in measures.items()}


def narrowed(board: Board, seen: set[str], group: str | None) -> Board:
    """What is drawn of a board."""
    return Board(
        board.span,
        tuple(each for each in board.topics if each.name in seen),
        tuple(each for each in board.groups if each.topic in seen and group in (None, each.name)),
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def topic_table(visit: Visit, topics: Sequence[TopicTrend]) -> Html:
    """Topics."""
    columns = ("topic", "#partitions", "#messages", "#delayed", "#in/s", "#groups")
    rows = [
        Row(each.name, (link(each.name, visit.url("topic", each.name)), each.partitions, number(each.messages),
                        number(each.delayed), rate(each.rate_in), each.groups))
        for each in topics
    ]  # fmt: skip
    return visit.live.table("topics", columns, rows, "there are no topics")


def group_table(visit: Visit, groups: Sequence[GroupTrend]) -> Html:
    """Groups."""
    columns = ("group", "topic", "state", "#settled/s", "#backlog", "#unread", "#ready", "#running", "waiting", "trend",
               "#oldest", "#dead", "owned")  # fmt: skip
    rows = [
        Row(
            f"{each.topic}/{each.name}",
            (
                link(each.name, visit.url("group", each.topic, each.name)),
                link(each.topic, visit.url("topic", each.topic)), tag("span", state(each), class_=state(each)),
                rate(each.rate_out), number(each.backlog), number(each.unread), ready(each), number(each.work.running),
                link(waiting(each.work) or "0", visit.url("parked", each.topic, each.name)),
                trend(each), age(each.oldest),
                linked(each.dead_letters, visit.url("dead-letters", each.topic, each.name)),
                f"{each.owned}/{len(each.shares)}",
            ),
        )
        for each in groups
    ]  # fmt: skip
    return visit.live.table("groups", columns, rows, "there are no groups")


def outbox_table(visit: Visit, outboxes: Sequence[OutboxState]) -> Html | None:
    """Outboxes of databases, if there are any. One that no relay counts any more says since when."""
    columns = ("outbox", "#waiting", "#oldest", "#refused", "relay", "counted")
    rows = [
        Row(
            each.id,
            (
                each.counted.database, number(each.counted.backlog), age(each.oldest), number(each.counted.refused),
                each.counted.member, f"{spoken(each.counted_ago)} ago" if each.counted_ago < UNSERVED else
                tag("span", f"{spoken(each.counted_ago)} ago", class_="unserved"),
            ),
        )
        for each in outboxes
    ]  # fmt: skip
    return tag("div", tag("h2", "Outboxes"), visit.live.table("outboxes", columns, rows, "")) if rows else None


def linked(value: int, url: str) -> Content:
    """A number that leads to what it counts."""
    return link(number(value), url) if value else number(value)


def left_of(visit: Visit, topic: Topic, groups: Iterable[GroupTrend]) -> Html:
    """What each group has not settled of before a resize."""
    left = {group.name: left_before(topic.layout, group.shares) for group in groups}
    said = [f"Group {name} has {describe_left(some)} of before the resize." for name, some in left.items() if some]
    return visit.live.part("left", [tag("p", each) for each in said])


def partitions_of_topic(visit: Visit, partitions: Sequence[PartitionState]) -> Html:
    """The partitions of a topic."""
    rows = [
        Row(str(each.partition), (each.partition, number(each.length), number(each.delayed), number(each.added),
                                  moment(each.first_id), moment(each.last_id)))
        for each in partitions
    ]  # fmt: skip
    columns = ("#partition", "#messages", "#delayed", "#ever added", "oldest", "newest")
    return visit.live.table("partitions", columns, rows, "not read yet")


def moment(stream_id: str | None) -> str:
    """The time of a stream id."""
    return "–" if stream_id is None else timestamp(from_epoch_ms(int(stream_id.partition("-")[0])))


def share_table(visit: Visit, shares: Sequence[GroupPartition]) -> Html:
    """The partitions of a group."""
    columns = ("#partition", "owner", "#epoch", "#unread", "#oldest", "#pending", "#retry", "#dead")
    rows = [
        Row(str(each.partition), (
            each.partition, each.owner if each.is_owned else "none", each.epoch,
            number(each.unread if each.is_unread_exact else None), age(each.oldest), each.pending,
            each.waiting_for_retry, each.dead_letters))
        for each in shares
    ]  # fmt: skip
    return visit.live.table("partitions", columns, rows, "not read yet")


def member_table(visit: Visit, members: Sequence[MemberState]) -> Html:
    """Members, with how long their longest calls run."""
    columns = ("member", "serves", "handler", "heard of", "#loop lag", "running", "longest", "partitions")
    rows = [
        Row(
            f"{each.id}/{each.topic}/{each.group}",
            (
                link(each.id, visit.url("process", each.id)),
                link(f"{each.topic}/{each.group}", visit.url("group", each.topic, each.group)), each.handler,
                tag("span", "dead", class_="unserved") if each.heard_ago is None else f"{spoken(each.heard_ago)} ago",
                age(each.loop_lag), joined_limits(f"{each.work.running} of {each.concurrency}", each),
                f"for {spoken(each.longest)}" if each.longest is not None else "–",
                owned(each),
            ),
        )
        for each in members
    ]  # fmt: skip
    return visit.live.table("members", columns, rows, "there are no members")


def owned(member: MemberState) -> str:
    """The partitions that a member owns, and those that it cannot read."""
    cannot = f", cannot read {' '.join(map(str, member.unreadable))}" if member.unreadable else ""
    return (" ".join(map(str, member.partitions)) or "–") + cannot


def joined_limits(running: str, member: MemberState) -> str:
    """What a member runs, and whose messages wait."""
    return f"{running}, {waits}" if (waits := waiting_of(member)) else running


def running_table(visit: Visit, topic: str, members: Sequence[MemberState], name: str = "running") -> Html:
    """The messages of the longest calls, as members told them with their heartbeats; the longest first."""
    told = [(ms, where, each) for each in members if each.heard_ago is not None for where, ms in each.longest_calls]
    rows = [
        Row(f"{each.id}/{where}", (
            link(where, visit.url("message", topic, where)), each.handler, each.id,
            f"for {spoken(timedelta(milliseconds=ms))}"))
        for ms, where, each in sorted(told, key=lambda row: row[:2], reverse=True)[:MOST_NAMED]
    ]  # fmt: skip
    columns = ("partition/stream id", "handler", "member", "runs")
    return visit.live.table(name, columns, rows, "nothing runs")


def pending_table(visit: Visit, topic: str, pending: Sequence[PendingMessage], name: str = "pending") -> Html:
    """What was delivered and is not settled, longest first: its page says whether it runs, is ready or waits."""
    rows = [
        Row(f"{each.partition}/{each.id}", (
            link(each.id, visit.url("message", topic, f"{each.partition}/{each.id}")), each.message_id,
            each.partition, each.member, f"for {spoken(each.since)}", each.attempt))
        for each in pending[:MOST_NAMED]
    ]  # fmt: skip
    columns = ("stream id", "message id", "#partition", "member", "delivered", "#delivery")
    return visit.live.table(name, columns, rows, "nothing is pending")


def spoken(span: timedelta) -> str:
    """A duration, in whole seconds where it is longer than one."""
    seconds = span.total_seconds()
    return duration(timedelta(seconds=round(seconds)) if seconds >= 1 else span)
