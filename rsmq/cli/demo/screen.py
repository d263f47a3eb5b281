"""The output of the demo: a live table on a terminal, plain lines elsewhere, and the result at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rsmq.cli.demo.result import DemoResult, GroupResult
from rsmq.inspector.state import GroupPartition, GroupState
from rsmq.model.clock import monotonic

TITLE: Final = "Verdict, from the ledger outside the server"
COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "bright_magenta")


@dataclass
class Timeline:
    """Events, each with its time since the start."""

    started: float = field(default_factory=monotonic)
    events: list[str] = field(default_factory=list)

    def event(self, text: str) -> None:
        """Add an event."""
        self.events.append(f"{monotonic() - self.started:5.1f} s  {text}")

    def line(self) -> str:
        """The state as one line."""
        return f"{monotonic() - self.started:5.1f} s"


@dataclass
class DemoScreen(Timeline):
    """The state that is shown."""

    total: int = 0
    published: int = 0
    handled: dict[str, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    groups: list[GroupState] = field(default_factory=list)
    members: list[str] = field(default_factory=list)

    def name(self, member: str) -> str:
        """A short name for a member, always the same."""
        if not member:
            return "-"
        if member not in self.members:
            self.members.append(member)
        return f"worker {self.members.index(member) + 1}"

    def line(self) -> str:
        """The state as one line."""
        rate = sum(self.handled.values()) / max(0.1, monotonic() - self.started)
        handled = ", ".join(f"{group} {count:,}" for group, count in sorted(self.handled.items()))
        return f"{super().line()}  published {self.published:,}  handled: {handled}  {rate:,.0f}/s"

    def draw(self) -> RenderableType:
        """The state as a table."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("partition", justify="right")
        for group in self.groups:
            table.add_column(group.name, min_width=9)
            table.add_column("unread", justify="right", min_width=7)
            table.add_column("in flight", justify="right", min_width=7)
        for partition in range(max((len(group.shares) for group in self.groups), default=0)):
            cells = [str(partition)]
            row: list[Text | str] = list(cells)
            for group in self.groups:
                row += self._share(group.shares[partition])
            table.add_row(*row)
        return Group(self._progress(), table, self._channels(), *(Text(event) for event in self.events[-6:]))

    def _share(self, share: GroupPartition) -> list[Text | str]:
        name = self.name(share.owner)
        colour = COLOURS[self.members.index(share.owner) % len(COLOURS)] if share.owner else "red"
        return [Text(name, style=colour), f"{share.unread:,}", f"{share.pending:,}"]

    def _progress(self) -> RenderableType:
        rate = sum(self.handled.values()) / max(0.1, monotonic() - self.started)
        counts = {"published": self.published, **self.handled}
        return bars(counts, self.total, f"{rate:,.0f} messages a second handled")

    def _channels(self) -> Text:
        notified = "  ".join(f"{name} {count:,}" for name, count in sorted(self.channels.items()) if name != "-")
        return Text(f"passengers notified: {notified or '-'}", style="dim")


def show_result(console: Console, result: DemoResult, log: str) -> None:
    """Print what was promised and whether it held."""
    print_checks(console, TITLE, {group.group: checks(group) for group in result.groups})
    if result.was_killed:
        moved = result.recovery_seconds
        after = "never" if moved is None else f"after {moved:.2f} s"
        console.print(f"The killed worker's partitions had new owners: {after}.", highlight=False)
    console.print("All promises held." if result.is_good else f"A promise was BROKEN: the workers' log is {log}")


class Check(NamedTuple):
    """One row of the verdict for one group."""

    title: str
    value: int
    is_good: bool


def checks(group: GroupResult) -> list[Check]:
    """The rows of a group's verdict. Counts of violations are good when they are 0."""
    wrong = {
        "lost": len(group.lost),
        "out of order per aircraft": group.out_of_order,
        "repeated without a reason": group.unexplained,
        "poison without a dead letter": len(group.missing_dead_letters),
        "dead letters that are not poison": len(group.surplus_dead_letters),
    }
    return [
        Check("sent", group.expected, True),
        Check("handled", group.handled, not group.lost and not group.unexpected),
        Check("repeated after the kill", group.redelivered, True),
        *(Check(title, count, count == 0) for title, count in wrong.items()),
    ]


def bars(counts: Mapping[str, int], total: int, note: str) -> RenderableType:
    """How far each of the counts is, one under the other."""
    rows = Table.grid(padding=(0, 2))
    for name, count in counts.items():
        rows.add_row(name, ProgressBar(total=total, completed=count, width=50), f"{count:,} of {total:,}")
    rows.add_row("", Text(note, style="dim"), "")
    return rows


def print_checks(console: Console, title: str, columns: Mapping[str, Sequence[Check]]) -> None:
    """Print the rows of a verdict: a column for each group or receiver."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(row[0].title, *(mark(check) for check in row))
    console.print(table)


def mark(check: Check) -> Text:
    """A number and whether it is good."""
    return Text(f"{check.value:,} {'✓' if check.is_good else '✗'}", style="green" if check.is_good else "bold red")
