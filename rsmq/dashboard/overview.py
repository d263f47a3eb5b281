"""The pages that show everything: the overview, all members, one topic, one group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nicegui import ui

from rsmq.dashboard.chart import DEAD, FLOW, WAITING, Chart, Measure
from rsmq.dashboard.frame import Frame, fill, number, rate
from rsmq.dashboard.listing import (
    group_rows,
    group_table,
    member_rows,
    member_table,
    share_rows,
    share_table,
    topic_rows,
    topic_table,
)
from rsmq.trend import Board


def overview(frame: Frame) -> None:
    """What flows, what waits, and where."""
    watcher = frame.desk.watcher
    measures = FLOW | WAITING | DEAD
    totals = tiles(measures)
    flow, waiting = charts()
    topics, groups = topic_table(), group_table()

    def draw() -> None:
        show(totals, measures, watcher.board)
        flow.draw(watcher.moments)
        waiting.draw(watcher.moments)
        fill(topics, topic_rows(frame, watcher.board.topics))
        fill(groups, group_rows(frame, watcher.board.groups))

    frame.live(draw)


def tiles(measures: Mapping[str, Measure]) -> dict[str, ui.label]:
    """A number each, with its name."""
    found = {}
    with ui.row().classes("w-full gap-4"):
        for name in measures:
            with ui.card().classes("px-4 py-2 gap-0"):
                ui.label("in/s" if name == "in" else "settled/s" if name == "settled" else name).classes("text-xs")
                found[name] = ui.label("–").classes("text-xl").mark(f"total {name}").props(f'data-total="{name}"')
    return found


def show(totals: Mapping[str, ui.label], measures: Mapping[str, Measure], board: Board) -> None:
    """The newest numbers."""
    for name, label in totals.items():
        value = measures[name](board)
        label.text = rate(value) if name in FLOW else number(None if value is None else int(value))


def charts() -> tuple[Chart, Chart]:
    """Two, side by side where there is room."""
    with ui.grid().classes("w-full grid-cols-1 md:grid-cols-2"):
        return Chart("messages a second", FLOW), Chart("waiting", WAITING)


def members(frame: Frame) -> None:
    """Who works."""
    found = member_table()
    frame.live(lambda: fill(found, member_rows(frame, frame.desk.watcher.board.members)))


def topic(frame: Frame, name: str) -> None:
    """One topic: its charts, its groups, and the way to its messages."""
    watcher = frame.desk.watcher
    ui.link("messages", frame.path("messages", name))
    flow, waiting = charts()
    topics, groups = topic_table(), group_table()

    def draw() -> None:
        board = only(watcher.board, name)
        flow.draw(moment._replace(board=only(moment.board, name)) for moment in watcher.moments)
        waiting.draw(moment._replace(board=only(moment.board, name)) for moment in watcher.moments)
        fill(topics, topic_rows(frame, board.topics))
        fill(groups, group_rows(frame, board.groups))

    frame.live(draw)


def group(frame: Frame, topic: str, name: str) -> None:
    """One group: who owns what, who works."""
    watcher = frame.desk.watcher
    with ui.row():
        ui.link(f"topic {topic}", frame.path("topic", topic))
        ui.link("dead letters", frame.path("dead-letters", topic, name))
    groups, shares, workers = group_table(), share_table(), member_table()

    def draw() -> None:
        board = only(watcher.board, topic, name)
        fill(groups, group_rows(frame, board.groups))
        fill(shares, share_rows([share for group in board.groups for share in group.shares]))
        fill(workers, member_rows(frame, board.members))

    frame.live(draw)


def only(board: Board, topic: str, group: str | None = None) -> Board:
    """A board of one topic, or of one group of it."""
    return replace(
        board,
        topics=tuple(each for each in board.topics if each.name == topic),
        groups=tuple(each for each in board.groups if each.topic == topic and group in (None, each.name)),
    )
