"""The live pages: the overview with its charts, all members, one topic, one group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from nicegui import ui

from rsmq.dashboard.layout import PageLayout, Row, fill, table
from rsmq.dashboard.queries import TimedBoard
from rsmq.inspector.state import GroupPartition, MemberState
from rsmq.inspector.text import age, rate, state, trend
from rsmq.inspector.trend import Board, GroupTrend, TopicTrend
from rsmq.model.words import duration, number

Measure = Callable[[Board], float | None]


class LiveChart:
    """A few measures of the boards over time. Where one is unknown, its line has a gap."""

    def __init__(self, title: str, measures: Mapping[str, Measure]) -> None:
        self._measures = measures
        self._drawn: object = None
        self._chart = ui.echart(options(title, measures), renderer="svg").classes("w-full h-56")

    def draw(self, history: Iterable[TimedBoard]) -> None:
        """Show these boards."""
        shown = list(history)
        newest = shown[-1].at if shown else None
        if newest == self._drawn:
            return
        self._drawn = newest
        for series, measure in zip(self._chart.options["series"], self._measures.values(), strict=True):
            series["data"] = [[each.at.isoformat(), measure(each.board)] for each in shown]
        self._chart.update()


def options(title: str, names: Iterable[str]) -> dict[str, Any]:
    """The options for ECharts. The tooltip is drawn as SVG, so no name can be markup."""
    return {
        "title": {"text": title, "left": 8, "textStyle": {"fontSize": 13, "fontWeight": "normal"}},
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 36, "bottom": 8, "containLabel": True},
        "legend": {"right": 8, "top": 0},
        "tooltip": {"trigger": "axis", "renderMode": "richText"},
        "xAxis": {"type": "time", "axisLabel": {"hideOverlap": True}},
        "yAxis": {"type": "value", "min": 0, "minInterval": 1},
        "series": [{"name": name, "type": "line", "showSymbol": False, "data": []} for name in names],
    }


def summed(parts: Iterable[float | None]) -> float | None:
    """The sum of the known parts, None if there is none."""
    known = [part for part in parts if part is not None]
    return round(sum(known), 1) if known else None


FLOW: Final[dict[str, Measure]] = {
    "in": lambda board: summed(topic.rate_in for topic in board.topics),
    "settled": lambda board: summed(group.rate_out for group in board.groups),
}
WAITING: Final[dict[str, Measure]] = {
    "lag": lambda board: summed(group.lag for group in board.groups),
    "in flight": lambda board: summed(group.in_flight for group in board.groups),
    "parked": lambda board: summed(group.parked for group in board.groups),
}
DEAD: Final[dict[str, Measure]] = {"dead letters": lambda board: summed(group.dead_letters for group in board.groups)}


def overview(layout: PageLayout) -> None:
    """Totals and charts, all topics, all groups."""
    poller = layout.queries.poller
    measures = FLOW | WAITING | DEAD
    totals = tiles(measures)
    flow, waiting = charts()
    topics, groups = topic_table(), group_table()

    def draw() -> None:
        for name, label in totals.items():
            value = measures[name](poller.board)
            label.text = rate(value) if name in FLOW else number(None if value is None else int(value))
        flow.draw(poller.history)
        waiting.draw(poller.history)
        fill(topics, topic_rows(layout, poller.board.topics))
        fill(groups, group_rows(layout, poller.board.groups))

    layout.live(draw)


def tiles(measures: Mapping[str, Measure]) -> dict[str, ui.label]:
    """A card with name and number for each measure."""
    found = {}
    with ui.row().classes("w-full gap-4"):
        for name in measures:
            with ui.card().classes("px-4 py-2 gap-0"):
                ui.label("in/s" if name == "in" else "settled/s" if name == "settled" else name).classes("text-xs")
                found[name] = ui.label("–").classes("text-xl").mark(f"total {name}").props(f'data-total="{name}"')
    return found


def charts() -> tuple[LiveChart, LiveChart]:
    """Two charts, side by side where there is room."""
    with ui.grid().classes("w-full grid-cols-1 md:grid-cols-2"):
        return LiveChart("messages a second", FLOW), LiveChart("waiting", WAITING)


def members(layout: PageLayout) -> None:
    """All members."""
    found = member_table()
    layout.live(lambda: fill(found, member_rows(layout, layout.queries.poller.board.members)))


def topic(layout: PageLayout, name: str) -> None:
    """One topic: its charts, its groups, and a link to its messages."""
    poller = layout.queries.poller
    ui.link("messages", layout.path("messages", name))
    flow, waiting = charts()
    topics, groups = topic_table(), group_table()

    def draw() -> None:
        board = only(poller.board, name)
        flow.draw(each._replace(board=only(each.board, name)) for each in poller.history)
        waiting.draw(each._replace(board=only(each.board, name)) for each in poller.history)
        fill(topics, topic_rows(layout, board.topics))
        fill(groups, group_rows(layout, board.groups))

    layout.live(draw)


def group(layout: PageLayout, topic: str, name: str) -> None:
    """One group: its partitions with their owners, and its members."""
    poller = layout.queries.poller
    with ui.row():
        ui.link(f"topic {topic}", layout.path("topic", topic))
        ui.link("dead letters", layout.path("dead-letters", topic, name))
    groups, partitions, members_ = group_table(), partition_table(), member_table()

    def draw() -> None:
        board = only(poller.board, topic, name)
        fill(groups, group_rows(layout, board.groups))
        fill(partitions, partition_rows([share for group in board.groups for share in group.shares]))
        fill(members_, member_rows(layout, board.members))

    layout.live(draw)


def only(board: Board, topic: str, group: str | None = None) -> Board:
    """A board of one topic, or of one group of it."""
    return replace(
        board,
        topics=tuple(each for each in board.topics if each.name == topic),
        groups=tuple(each for each in board.groups if each.topic == topic and group in (None, each.name)),
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def topic_table() -> ui.table:
    """The topic table, without rows."""
    return table(["topic", "#partitions", "#messages", "#delayed", "#in/s", "#groups"], link="topic", title="Topics")


def topic_rows(layout: PageLayout, topics: Sequence[TopicTrend]) -> list[Row]:
    """A row for each topic."""
    return [
        {
            "topic": topic.name, "partitions": topic.partitions, "messages": number(topic.messages),
            "delayed": number(topic.delayed), "in/s": rate(topic.rate_in), "groups": topic.groups,
            "url": layout.url("topic", topic.name),
        }
        for topic in topics
    ]  # fmt: skip


def group_table() -> ui.table:
    """The group table, without rows."""
    columns = ["group", "topic", "state", "#settled/s", "#lag", "trend", "#oldest", "#in flight", "#parked", "#dead"]
    return table([*columns, "owned"], link="group", title="Groups")


def group_rows(layout: PageLayout, groups: Sequence[GroupTrend]) -> list[Row]:
    """A row for each group."""
    return [
        {
            "group": group.name, "topic": group.topic, "state": state(group), "settled/s": rate(group.rate_out),
            "lag": number(group.lag), "trend": trend(group), "oldest": age(group.oldest),
            "in flight": number(group.in_flight), "parked": number(group.parked), "dead": number(group.dead_letters),
            "owned": f"{group.owned}/{len(group.shares)}", "url": layout.url("group", group.topic, group.name),
        }
        for group in groups
    ]  # fmt: skip


def partition_table() -> ui.table:
    """The partition table, without rows."""
    columns = ["#partition", "owner", "#epoch", "#lag", "#oldest", "#in flight", "#parked", "#dead"]
    return table(columns, title="Partitions")


def partition_rows(shares: Sequence[GroupPartition]) -> list[Row]:
    """A row for each partition."""
    return [
        {
            "partition": share.partition, "owner": share.owner if share.is_owned else "none", "epoch": share.epoch,
            "lag": number(share.lag if share.is_lag_exact else None), "oldest": age(share.oldest),
            "in flight": share.pending, "parked": share.parked, "dead": share.dead_letters,
        }
        for share in shares
    ]  # fmt: skip


def member_table() -> ui.table:
    """The member table, without rows."""
    columns = ["member", "serves", "handler", "heard of", "loop lag", "#in flight", "#concurrency", "partitions"]
    return table(columns, link="serves", title="Members")


def member_rows(layout: PageLayout, members: Sequence[MemberState]) -> list[Row]:
    """A row for each member."""
    return [
        {
            "member": member.id, "serves": f"{member.topic}/{member.group}", "handler": member.handler,
            "heard of": "dead" if member.heard_ago is None else f"{duration(member.heard_ago)} ago",
            "loop lag": age(member.loop_lag), "in flight": member.in_flight, "concurrency": member.concurrency,
            "partitions": " ".join(map(str, member.partitions)) or "–",
            "url": layout.url("group", member.topic, member.group),
        }
        for member in members
    ]  # fmt: skip
