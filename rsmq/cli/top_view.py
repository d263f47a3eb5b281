"""The screen of `rsmq top`, without a terminal: what keys change, and what fits into the window. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from rich.text import Text

from rsmq.inspector import text
from rsmq.inspector.state import GroupPartition, MemberState
from rsmq.inspector.trend import Board, GroupTrend
from rsmq.model.words import count, duration, number, printable

HELP: Final = "q quit  s sort  / filter  i idle  ↑↓ choose  ⏎ open  esc back"
OPENED: Final = "q quit  ↑↓ scroll  esc back"
NUMBERS: Final = 7
"""Width of a column with numbers."""
LEAST_NAME: Final = 10
STATE_WIDTH: Final = 8
ALWAYS: Final = ("out/s", "unread", "ready", "running", "waiting", "oldest", "dead")
IF_ROOM: Final = {"backlog": NUMBERS, "trend": 26, "in/s": NUMBERS, "owned": NUMBERS}
"""Columns of a list where the window has room for them, with their widths."""
MOST_HOLDS: Final = 5
"""Lines of a page."""
STATES: Final = {"paused": "yellow", "unserved": "red", "stalled": "red", "running": "green"}


@dataclass(frozen=True, slots=True)
class TopView:
    """What the user has chosen. `opened` is topic and name of a group; `cursor` a line of the list, or of the page."""

    sort: int = 0
    wanted: str = ""
    is_typing: bool = False
    shows_idle: bool = False
    cursor: int = 0
    opened: tuple[str, str] | None = None
    is_done: bool = False


def is_idle(group: GroupTrend) -> bool:
    """Whether nothing happens there that an operator should see."""
    return not (group.known_backlog or group.rate_out or group.dead_letters or group.is_paused or group.holds)


SORTS: Final[tuple[tuple[str, Callable[[GroupTrend], object]], ...]] = (
    ("worst first", lambda group: (not (group.is_unserved and group.known_backlog), -group.new_dead_letters,
                                   -group.known_backlog, -group.dead_letters)),
    ("unread", lambda group: -(group.unread or 0)),
    ("oldest", lambda group: -(group.oldest or timedelta(0))),
    ("out/s", lambda group: -(group.rate_out or 0)),
    ("dead", lambda group: -group.dead_letters),
    ("name", lambda group: 0),
)  # fmt: skip


def chosen(board: Board, view: TopView) -> tuple[list[GroupTrend], int]:
    """The groups that are listed, in order, and how many idle ones are folded away."""
    wanted = view.wanted.casefold()
    found = [group for group in board.groups if wanted in f"{group.topic}/{group.name}".casefold()]
    shown = [group for group in found if view.shows_idle or wanted or not is_idle(group)]
    order = SORTS[view.sort][1]
    shown.sort(key=lambda group: (order(group), group.topic, group.name))
    return shown, len(found) - len(shown)


def press(view: TopView, key: str, board: Board, room: int) -> TopView:
    """The view after a key. `room` is how many lines the list has."""
    if key == "ctrl-c":
        return replace(view, is_done=True)
    if view.is_typing:
        return typed(view, key)
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -room, "page down": room, "home": -(10**9), "end": 10**9}
    if key in steps:
        return replace(view, cursor=view.cursor + steps[key])
    groups, _ = chosen(board, view)
    match key:
        case "q":
            return replace(view, is_done=True)
        case "esc" if view.opened is not None:
            return replace(view, opened=None, cursor=0)
        case "esc":
            return replace(view, wanted="", cursor=0)
        case "enter" if view.opened is None and groups:
            group = groups[min(max(view.cursor, 0), len(groups) - 1)]
            return replace(view, opened=(group.topic, group.name), cursor=0)
        case "s" if view.opened is None:
            return replace(view, sort=(view.sort + 1) % len(SORTS), cursor=0)
        case "i" if view.opened is None:
            return replace(view, shows_idle=not view.shows_idle, cursor=0)
        case "/" if view.opened is None:
            return replace(view, is_typing=True, wanted="", cursor=0)
    return view


def typed(view: TopView, key: str) -> TopView:
    """A key while the filter is written."""
    if key == "enter":
        return replace(view, is_typing=False)
    if key == "esc":
        return replace(view, is_typing=False, wanted="")
    if key == "backspace":
        return replace(view, wanted=view.wanted[:-1])
    return replace(view, wanted=view.wanted + key) if len(key) == 1 and key.isprintable() else view


def settled(view: TopView, board: Board, room: int) -> TopView:
    """The same with a cursor that is on a line: groups come and go."""
    lines = len(chosen(board, view)[0]) - 1 if view.opened is None else len(page_of(board, view.opened)) - room
    return replace(view, cursor=min(max(view.cursor, 0), max(lines, 0)))


@dataclass(frozen=True, slots=True)
class Columns:
    """The width of the names of a list of groups, and the columns after them for which there is room."""

    name: int
    more: tuple[str, ...]


def columns_of(groups: Sequence[GroupTrend], width: int) -> Columns:
    """Names are cut only where the window has no room for them and the columns that are always there."""
    room = max(LEAST_NAME, width - 1 - STATE_WIDTH - len(ALWAYS) * (NUMBERS + 1))
    longest = max((len(name_of(group)) for group in groups), default=LEAST_NAME)
    name, more = min(max(longest, LEAST_NAME), room), list[str]()
    left = room - name
    for column, wide in IF_ROOM.items():
        if wide + 1 <= left:
            left -= wide + 1
            more.append(column)
    return Columns(name, tuple(more))


def name_of(group: GroupTrend) -> str:
    """Topic and name of a group."""
    return printable(f"{group.topic}/{group.name}")


def picture(board: Board, view: TopView, title: str, width: int, height: int) -> list[Text]:
    """The lines of the window: never more, and none wider, than it has room for."""
    lines = [Text(title, style="bold"), totals(board)]
    room = max(height - 5, 1)
    if view.opened is not None:
        page = page_of(board, view.opened, width)
        lines += [Text(), *page[view.cursor : view.cursor + room + 1]]
        last = Text(OPENED, style="dim")
    else:
        groups, idle = chosen(board, view)
        first = max(0, min(view.cursor - room // 2, len(groups) - room))
        columns = columns_of(groups[first : first + room], width)
        rates = {topic.name: topic.rate_in for topic in board.topics}
        lines.append(heading(columns))
        for at, group in enumerate(groups[first : first + room], first):
            line = row(group, columns, rates.get(group.topic))
            if at == view.cursor:
                line.stylize("reverse")
            lines.append(line)
        lines.append(folded(groups, idle, view))
        last = Text(f"/{view.wanted}▏" if view.is_typing else HELP, style="" if view.is_typing else "dim")
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines)) + [last]
    for line in lines:
        line.truncate(width)
    return lines


def room_of(height: int) -> int:
    """How many groups a window of this height lists."""
    return max(height - 5, 1)


def totals(board: Board) -> Text:
    """All topics and groups in one line."""
    incoming = sum(topic.rate_in or 0 for topic in board.topics)
    out = sum(group.rate_out or 0 for group in board.groups)
    dead = sum(group.dead_letters for group in board.groups)
    backlog = sum(group.known_backlog for group in board.groups)
    parts = [count(len(board.topics), "topic"), count(len(board.groups), "group"),
             f"in {text.rate(incoming)}/s", f"out {text.rate(out)}/s",
             f"backlog {number(backlog)}", f"dead {number(dead)}"]  # fmt: skip
    return Text(" · ".join(parts), style="dim")


def folded(groups: Sequence[GroupTrend], idle: int, view: TopView) -> Text:
    """What is not listed, and how the rest is sorted."""
    parts = [f"{SORTS[view.sort][0]}" if groups else "no group matches" if view.wanted else "nothing to show"]
    if idle:
        parts.append(count(idle, "idle group is", "idle groups are") + " folded")
    if view.wanted:
        parts.append(f"filter {printable(view.wanted)!r}")
    return Text(" · ".join(parts), style="dim")


def heading(columns: Columns) -> Text:
    """The names of the columns."""
    more = "".join(f" {each:>{IF_ROOM[each]}}" for each in columns.more)
    numbers = "".join(f" {each:>{NUMBERS}}" for each in ALWAYS)
    return Text(f"{'group':<{columns.name}} {'state':<{STATE_WIDTH}}{numbers}{more}", style="bold")


def row(group: GroupTrend, columns: Columns, rate_in: float | None) -> Text:
    """A group in one line. `rate_in` is that of its topic."""
    room, name, state = columns.name, name_of(group), text.state(group)
    line = Text(f"{name if len(name) <= room else name[: room - 1] + '…':<{room}} ")
    line.append(f"{state:<{STATE_WIDTH}}", style=STATES[state])
    work = group.work
    ready = f"{'≤' if group.untold else ''}{short(work.ready)}"
    cells = [text.rate(group.rate_out), short(group.unread), ready, *map(short, (work.running, work.waiting)),
             text.age(group.oldest)]  # fmt: skip
    line.append("".join(f" {cell:>{NUMBERS}}" for cell in cells))
    line.append(f" {short(group.dead_letters):>{NUMBERS}}", style="red" if group.new_dead_letters else "")
    more = {
        "backlog": short(group.backlog),
        "trend": text.trend(group),
        "in/s": text.rate(rate_in),
        "owned": f"{group.owned}/{len(group.shares)}",
    }
    line.append("".join(f" {more[each]:>{IF_ROOM[each]}}" for each in columns.more))
    return line


def short(value: int | None) -> str:
    """A count in at most seven characters."""
    if value is None or value < 1_000_000:
        return number(value)
    return f"{value / 1e6:.1f}M" if value < 1_000_000_000 else f"{value / 1e9:.1f}G"


def page_of(board: Board, opened: tuple[str, str], width: int = 80) -> list[Text]:
    """All of one group: what it does, its members, its partitions."""
    found = next((group for group in board.groups if (group.topic, group.name) == opened), None)
    name = printable("/".join(opened))
    if found is None:
        return [Text(f"{name} does not exist any more")]
    lines = [
        Text(f"{name}  {text.state(found)}  {text.rate(found.rate_out)}/s out", style="bold"),
        Text(f"unread {number(found.unread)}  ready {text.ready(found)}  running {number(found.work.running)}  "
             f"waiting {text.waiting(found.work) or 0}"),
        Text(f"backlog {number(found.backlog)} {text.trend(found)}  oldest {text.age(found.oldest)}  "
             f"dead {number(found.dead_letters)}"),
        *([Text(printable(text.untold(found)), style="yellow")] if found.untold else []),
        *[Text(printable(text.held(each)), style="yellow") for each in found.holds[:MOST_HOLDS]],
        Text(), Text("members", style="bold"),
    ]  # fmt: skip
    lines += [member(each) for each in found.members] or [Text("none", style="red")]
    room = max(LEAST_NAME, width - 6 - 5 * (NUMBERS + 1))
    owner = min(room, max((len(owner_of(each)) for each in found.shares), default=LEAST_NAME))
    names = "".join(f" {each:>{NUMBERS}}" for each in ("unread", "oldest", "pending", "retry", "dead"))
    lines += [Text(), Text(f"{'part.':>5} {'owner':<{owner}}{names}", style="bold")]
    return lines + [share(each, owner) for each in found.shares]


def member(each: MemberState) -> Text:
    """A member in one line."""
    if each.heard_ago is None:
        return Text(f"{printable(each.id)}  dead", style="red")
    lag = f"  loop lag {duration(each.loop_lag)}" if each.loop_lag is not None else ""
    rate = f"  {waits}" if (waits := printable(text.waiting_of(each))) else ""
    parts = " ".join(map(str, each.partitions)) or "none"
    running = f"{each.work.running} of {each.concurrency} running, {each.pending} pending"
    return Text(f"{printable(each.id)}  {running}{rate}{lag}  partitions {parts}")


def owner_of(each: GroupPartition) -> str:
    """The member with a running lease."""
    return printable(each.owner) if each.is_owned else "none"


def share(each: GroupPartition, width: int) -> Text:
    """A partition in one line; `width` is that of its owner."""
    cells = (short(each.unread if each.is_unread_exact else None), text.age(each.oldest), short(each.pending),
             short(each.waiting_for_retry), short(each.dead_letters))  # fmt: skip
    numbers = "".join(f" {cell:>{NUMBERS}}" for cell in cells)
    return Text(f"{each.partition:>5} {owner_of(each)[:width]:<{width}}{numbers}")
