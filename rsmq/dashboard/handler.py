"""The handlers of groups: what has become of their calls, how long these took, and what the handler allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from rsmq.dashboard.chart import Point, bars
from rsmq.dashboard.html import Content, Row, tag
from rsmq.dashboard.page import Visit
from rsmq.dashboard.queries import TimedBoard
from rsmq.inspector.state import NO_CALLS, MemberState
from rsmq.inspector.trend import Board, GroupTrend, calls_since
from rsmq.model.call_counts import BOUNDS, CallCounts
from rsmq.model.words import duration, number

RECENT: Final = timedelta(minutes=3)
SMOOTH: Final = timedelta(seconds=10)
"""Members tell their counts every few seconds: a rate is taken over this time."""
COLUMNS: Final = (
    "handler", "#processes", "#settled", "#failed", "#retried", "#dead", "#p50", "#p99", "#attempts", "#timeout",
    "limits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HandlerCalls:
    """The calls of one handler in all processes that run now: `total` since these began, `recent` of late."""

    name: str
    members: tuple[MemberState, ...]
    total: CallCounts
    recent: CallCounts


def handlers_of(group: GroupTrend, earlier: GroupTrend | None) -> list[HandlerCalls]:
    """The handlers that serve a group, usually one. `earlier`: the same group some minutes ago, if it was seen then."""
    names = sorted({member.handler for member in group.members})
    before = () if earlier is None else earlier.members
    found = []
    for name in names:
        members = tuple(each for each in group.members if each.handler == name)
        total = sum((each.calls for each in members), NO_CALLS)
        found.append(HandlerCalls(name, members, total, calls_since(before, members)))
    return found


def handler_parts(visit: Visit, group: GroupTrend) -> list[Content]:
    """The table of the handlers of a group, and how long their calls took."""
    found = handlers_of(group, some_minutes_ago(visit.queries.poller.history, group))
    rows = [Row(each.name, row_of(each)) for each in found]
    shown = visit.live.table("handlers", COLUMNS, rows, "no process has told of a handler")
    charts = [
        bars(visit.live, f"durations-{at}", f"calls of {each.name} by duration", durations(recent_of(each)))
        for at, each in enumerate(found)
        if each.total.calls
    ]
    said = (
        "Numbers are since the processes began that run now; durations of the last three minutes, or since then if "
        "there were no calls of late. They come with the heartbeats."
    )
    return [tag("h2", "Handlers"), shown, tag("p", said, class_="dim"), tag("div", charts, class_="charts")]


def recent_of(each: HandlerCalls) -> CallCounts:
    """The calls of which durations are shown."""
    return each.recent if each.recent.calls else each.total


def row_of(each: HandlerCalls) -> tuple[Content, ...]:
    """A row of the table."""
    total, recent = each.total, recent_of(each)
    attempts = {member.attempts for member in each.members if member.attempts is not None}
    timeouts = {member.timeout for member in each.members}
    limits = {text for member in each.members for text in member.limits}
    return (
        each.name, len(each.members), number(total.settled), number(total.failed), number(total.retried),
        number(total.dead), took(recent.quantile(0.5)), took(recent.quantile(0.99)),
        " or ".join(map(str, sorted(attempts))) or "?",
        " or ".join(sorted("none" if span is None else duration(span) for span in timeouts)),
        "; ".join(sorted(limits)) or "none",
    )  # fmt: skip


def took(seconds: float | None) -> str:
    """A duration that was estimated from counts."""
    if seconds is None:
        return "–"
    if seconds == float("inf"):
        return f"> {duration(timedelta(seconds=BOUNDS[-1]))}"
    if seconds <= BOUNDS[0]:
        return f"≤ {duration(timedelta(seconds=BOUNDS[0]))}"
    return f"~ {duration(timedelta(seconds=float(f'{seconds:.2g}')))}"


def durations(calls: CallCounts) -> list[tuple[str, int]]:
    """Labels and counts of the bars, without empty ones at the ends."""
    labels = [*(compact(each) for each in BOUNDS), "more"]
    counts = [*calls.took, *[0] * (len(labels) - len(calls.took))]
    used = [at for at, count in enumerate(counts) if count]
    first, last = (max(used[0] - 1, 0), min(used[-1] + 2, len(labels))) if used else (0, len(labels))
    return list(zip(labels[first:last], counts[first:last], strict=True))


def compact(seconds: float) -> str:
    """An upper bound as a label: 2.5ms, 1s, 5min."""
    return duration(timedelta(seconds=seconds)).replace(" ", "")


def some_minutes_ago(history: Sequence[TimedBoard], group: GroupTrend) -> GroupTrend | None:
    """The group as the oldest board of the last minutes has it."""
    since = datetime.now(UTC) - RECENT
    board = next((each.board for each in history if each.at >= since), None)
    return None if board is None else same_group(board, group)


def same_group(board: Board, group: GroupTrend) -> GroupTrend | None:
    """A group on an earlier board."""
    name = group.topic, group.name
    return next((each for each in board.groups if (each.topic, each.name) == name), None)


def failure_series(boards: Sequence[tuple[datetime, Board]]) -> dict[str, list[Point]]:
    """Failed attempts and retries a second, each over the time before it."""
    made: dict[str, list[Point]] = {"failed": [], "retried": []}
    start = 0
    for at, (when, board) in enumerate(boards):
        while start < at and when - boards[start + 1][0] >= SMOOTH:
            start += 1
        earlier_at, earlier = boards[start]
        seconds = (when - earlier_at).total_seconds()
        if seconds < 1:
            continue
        told = {(each.topic, each.name): each for each in earlier.groups}
        calls = NO_CALLS
        for each in board.groups:
            before = told.get((each.topic, each.name))
            calls += calls_since(() if before is None else before.members, each.members)
        made["failed"].append((when, round(calls.failed / seconds, 2)))
        made["retried"].append((when, round(calls.retried / seconds, 2)))
    return made
