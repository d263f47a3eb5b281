"""How `rsmq top` draws a board on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rsmq.cli.printer import NOTHING, printable, span
from rsmq.trend import Board, GroupRow, MemberRow, ShareRow, TopicRow

LATE = timedelta(seconds=0.5)
"""A loop that answers later than this is marked: handlers on it wait for each other."""
TRENDS = {"growing": ("↑", "red"), "shrinking": ("↓", "green"), "steady": ("→", "")}


def draw(board: Board, title: str, *, with_shares: bool) -> RenderableType:
    """Topics, groups, members; with the partitions of each group where there is room for them."""
    parts: list[RenderableType] = [Text(title, style="bold"), Text()]
    if not board.topics:
        return Group(*parts, Text("there are no topics"))
    parts += [topics_of(board.topics), groups_of(board.groups)]
    if with_shares:
        parts += [shares_of(group) for group in board.groups]
    if board.members:
        parts.append(members_of(board.members))
    return Group(*parts)


def topics_of(rows: Sequence[TopicRow]) -> Table:
    """What comes in."""
    table = columns("topic", "#partitions", "#messages", "#delayed", "#in/s", "#groups")
    for row in rows:
        table.add_row(name(row.name), *map(number, (row.partitions, row.messages, row.delayed)), rate(row.rate_in),
                      number(row.groups))  # fmt: skip
    return table


def groups_of(rows: Sequence[GroupRow]) -> Table:
    """What goes out, and what waits."""
    table = columns("group", "state", "#out/s", "#lag", "trend", "#oldest", "#in hand", "#parked", "#dead", "owned")
    for row in rows:
        table.add_row(
            name(f"{row.topic}/{row.name}"), state(row), rate(row.rate_out), number(row.lag), trend(row),
            age(row.oldest), number(row.in_hand), number(row.parked), dead(row),
            Text(f"{row.owned}/{len(row.shares)}"),
        )  # fmt: skip
    return table


def shares_of(group: GroupRow) -> Table:
    """Who owns what."""
    head = f"{group.topic}/{group.name}"
    table = columns(head, "owner", "#epoch", "#lag", "#oldest", "#in hand", "#parked", "#dead")
    for row in group.shares:
        table.add_row(Text(str(row.partition)), owner(row), *map(number, (row.epoch, row.lag)), age(row.oldest),
                      *map(number, (row.in_hand, row.parked, row.dead_letters)))  # fmt: skip
    return table


def members_of(rows: Sequence[MemberRow]) -> Table:
    """Who works, and how they do."""
    table = columns("member", "serves", "handler", "#heard", "#loop lag", "#in hand", "partitions")
    for row in rows:
        table.add_row(
            name(row.id), name(f"{row.topic}/{row.group}"), name(row.handler), heard(row), loop_lag(row),
            Text(f"{row.in_hand}/{row.concurrency}"), Text(" ".join(map(str, row.partitions)) or NOTHING),
        )  # fmt: skip
    return table


def columns(*names: str) -> Table:
    """A table; a column that starts with `#` holds numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for each in names:
        table.add_column(Text(each.removeprefix("#")), justify="right" if each.startswith("#") else "left")
    return table


def name(text: str) -> Text:
    """Somebody else's word."""
    return Text(printable(text) or NOTHING)


def number(value: int | None) -> Text:
    """Nothing is dim, unknown is a question mark."""
    if value is None:
        return Text("?")
    return Text(f"{value:,}".replace(",", " "), style="" if value else "dim")


def rate(value: float | None) -> Text:
    """Messages a second."""
    if value is None:
        return Text(NOTHING, style="dim")
    return Text(f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}".replace(",", " "), style="" if value else "dim")


def age(value: timedelta | None) -> Text:
    """How old the oldest is."""
    return Text(NOTHING, style="dim") if value is None else Text(span(value))


def state(row: GroupRow) -> Text:
    """One word."""
    if row.is_paused:
        return Text("paused", style="yellow")
    return Text("unserved", style="red") if row.is_unserved else Text("running", style="green")


def trend(row: GroupRow) -> Text:
    """Where the backlog goes, and when it will be gone."""
    if row.growth is None:
        return Text(NOTHING, style="dim")
    arrow, style = TRENDS[row.trend]
    if row.trend == "steady":
        return Text(arrow)
    until = f", empty in {span(row.empty_in)}" if row.empty_in is not None else ""
    return Text(f"{arrow} {row.growth:+,.0f}/s{until}", style=style)


def dead(row: GroupRow) -> Text:
    """Dead letters, those that have just come in red."""
    text = number(row.dead_letters)
    return text.append(f" +{row.new_dead_letters}", style="red") if row.new_dead_letters else text


def owner(row: ShareRow) -> Text:
    """Whose it is."""
    return name(row.owner) if row.owner else Text("nobody", style="dim")


def heard(row: MemberRow) -> Text:
    """Its last sign of life."""
    return Text("dead", style="red") if row.heard_ago is None else Text(span(row.heard_ago))


def loop_lag(row: MemberRow) -> Text:
    """How late its loop is."""
    if row.loop_lag is None:
        return Text(NOTHING, style="dim")
    return Text(span(row.loop_lag), style="red" if row.loop_lag > LATE else "")
