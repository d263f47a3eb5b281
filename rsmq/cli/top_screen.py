"""Draws a board of `rsmq top` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rsmq.cli.tables import NOTHING
from rsmq.cli.top_view import STATES
from rsmq.inspector import text
from rsmq.inspector.state import GroupPartition, MemberState
from rsmq.inspector.trend import Board, GroupTrend, TopicTrend
from rsmq.model.words import duration, number, printable

LATE = timedelta(seconds=0.5)
"""An event loop with more lag than this is marked: its handlers wait for each other."""
TRENDS = {"growing": "red", "shrinking": "green", "steady": "", "": "dim"}


def draw(board: Board, title: str, *, with_partitions: bool) -> RenderableType:
    """Topics, groups, members; also the partitions of each group if there is room."""
    parts: list[RenderableType] = [Text(title, style="bold"), Text()]
    if not board.topics:
        return Group(*parts, Text("there are no topics"))
    parts += [topics_of(board.topics), groups_of(board.groups)]
    if with_partitions:
        parts += [partitions_of(group) for group in board.groups]
    if board.members:
        parts.append(members_of(board.members))
    return Group(*parts)


def topics_of(rows: Sequence[TopicTrend]) -> Table:
    """The topics."""
    table = columns("topic", "#partitions", "#messages", "#delayed", "#in/s", "#groups")
    for row in rows:
        table.add_row(name(row.name), *map(amount, (row.partitions, row.messages, row.delayed)), rate(row.rate_in),
                      amount(row.groups))  # fmt: skip
    return table


def groups_of(rows: Sequence[GroupTrend]) -> Table:
    """The groups."""
    table = columns("group", "state", "#out/s", "#backlog", "#unread", "#ready", "#running", "waiting", "trend",
                    "#oldest", "#dead", "owned")  # fmt: skip
    for row in rows:
        table.add_row(
            name(f"{row.topic}/{row.name}"), state(row), rate(row.rate_out), amount(row.backlog), amount(row.unread),
            ready(row), amount(row.work.running), Text(text.waiting(row.work)), trend(row), age(row.oldest), dead(row),
            Text(f"{row.owned}/{len(row.shares)}"),
        )  # fmt: skip
        for band in row.bands:
            table.add_row(
                name(f"  {band.name}"), Text(), Text(), amount(band.unread + band.pending), amount(band.unread), Text(),
                Text(),
                Text(f"{number(band.pending)} pending"), Text(), age(band.oldest), amount(band.dead_letters), Text(),
            )  # fmt: skip
    return table


def partitions_of(group: GroupTrend) -> Table:
    """The partitions of a group with their owners."""
    head = f"{group.topic}/{group.name}"
    table = columns(head, "owner", "#epoch", "#unread", "#oldest", "#pending", "#retry", "#dead")
    for row in group.shares:
        unread = row.unread if row.is_unread_exact else None
        table.add_row(Text(str(row.partition)), owner(row), *map(amount, (row.epoch, unread)), age(row.oldest),
                      *map(amount, (row.pending, row.waiting_for_retry, row.dead_letters)))  # fmt: skip
    return table


def members_of(rows: Sequence[MemberState]) -> Table:
    """The members."""
    table = columns("member", "serves", "handler", "#heard", "#loop lag", "#running", "#pending", "partitions")
    for row in rows:
        table.add_row(
            name(row.id), name(f"{row.topic}/{row.group}"), name(row.handler), heard(row), loop_lag(row),
            running(row), amount(row.pending), Text(" ".join(map(str, row.partitions)) or NOTHING),
        )  # fmt: skip
    return table


def columns(*names: str) -> Table:
    """A table; a column that starts with `#` holds numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for each in names:
        table.add_column(Text(each.removeprefix("#")), justify="right" if each.startswith("#") else "left")
    return table


def name(word: str) -> Text:
    """A name, which another program may have chosen."""
    return Text(printable(word) or NOTHING)


def amount(value: int | None) -> Text:
    """A number; 0 is dim."""
    return Text(number(value), style="dim" if value == 0 else "")


def rate(value: float | None) -> Text:
    """Messages a second; none is dim."""
    return Text(text.rate(value), style="" if value else "dim")


def age(value: timedelta | None) -> Text:
    """The age of the oldest message; none is dim."""
    return Text(text.age(value), style="dim" if value is None else "")


def state(row: GroupTrend) -> Text:
    """Whether it is paused, unserved, stalled or running."""
    word = text.state(row)
    return Text(word, style=STATES[word])


def ready(row: GroupTrend) -> Text:
    """What is ready; 0 is dim."""
    return Text(text.ready(row), style="" if row.work.ready else "dim")


def trend(row: GroupTrend) -> Text:
    """Whether the backlog grows or shrinks."""
    return Text(text.trend(row), style=TRENDS[row.trend])


def dead(row: GroupTrend) -> Text:
    """Dead letters, new ones in red."""
    count = amount(row.dead_letters)
    return count.append(f" +{row.new_dead_letters}", style="red") if row.new_dead_letters else count


def owner(row: GroupPartition) -> Text:
    """The member with a running lease."""
    return name(row.owner) if row.is_owned else Text("none", style="dim")


def heard(row: MemberState) -> Text:
    """The time since its last heartbeat."""
    return Text("dead", style="red") if row.heard_ago is None else Text(duration(row.heard_ago))


def running(row: MemberState) -> Text:
    """What it runs of what it may run, and whose messages wait."""
    waits = printable(text.waiting_of(row))
    return Text(f"{row.work.running}/{row.concurrency}" + (f", {waits}" if waits else ""))


def loop_lag(row: MemberState) -> Text:
    """The lag of its event loop."""
    if row.loop_lag is None:
        return Text(NOTHING, style="dim")
    return Text(text.age(row.loop_lag), style="red" if row.loop_lag > LATE else "")
