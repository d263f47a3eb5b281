"""What the demo shows while it runs: a live table for people, plain lines where there is no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rsmq.clock import monotonic
from rsmq.demo.verdict import GroupVerdict, Verdict
from rsmq.inspector import GroupState, ShareState

COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "bright_magenta")


@dataclass
class Picture:
    """Everything that is shown, as last seen."""

    total: int
    started: float = field(default_factory=monotonic)
    published: int = 0
    handled: dict[str, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    groups: list[GroupState] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def event(self, text: str) -> None:
        """Something happened."""
        self.events.append(f"{monotonic() - self.started:5.1f} s  {text}")

    def name(self, member: str) -> str:
        """A short name that stays a member's own."""
        if not member:
            return "-"
        if member not in self.members:
            self.members.append(member)
        return f"worker {self.members.index(member) + 1}"

    def line(self) -> str:
        """The state as one line."""
        rate = sum(self.handled.values()) / max(0.1, monotonic() - self.started)
        handled = ", ".join(f"{group} {count:,}" for group, count in sorted(self.handled.items()))
        return f"{monotonic() - self.started:5.1f} s  published {self.published:,}  handled: {handled}  {rate:,.0f}/s"

    def draw(self) -> RenderableType:
        """The state as a picture."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("partition", justify="right")
        for group in self.groups:
            table.add_column(group.name, min_width=9)
            table.add_column("lag", justify="right", min_width=7)
            table.add_column("in hand", justify="right", min_width=7)
        for partition in range(max((len(group.shares) for group in self.groups), default=0)):
            cells = [str(partition)]
            row: list[Text | str] = list(cells)
            for group in self.groups:
                row += self._share(group.shares[partition])
            table.add_row(*row)
        return Group(self._progress(), table, self._channels(), *(Text(event) for event in self.events[-6:]))

    def _share(self, share: ShareState) -> list[Text | str]:
        name = self.name(share.owner)
        colour = COLOURS[self.members.index(share.owner) % len(COLOURS)] if share.owner else "red"
        return [Text(name, style=colour), f"{share.lag:,}", f"{share.pending:,}"]

    def _progress(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for name, count in {"published": self.published, **self.handled}.items():
            rows.add_row(name, ProgressBar(total=self.total, completed=count, width=50), f"{count:,} of {self.total:,}")
        rate = sum(self.handled.values()) / max(0.1, monotonic() - self.started)
        rows.add_row("", Text(f"{rate:,.0f} messages a second handled", style="dim"), "")
        return rows

    def _channels(self) -> Text:
        told = "  ".join(f"{name} {count:,}" for name, count in sorted(self.channels.items()) if name != "-")
        return Text(f"passengers told: {told or '-'}", style="dim")


def show_verdict(console: Console, verdict: Verdict, log: str) -> None:
    """The end: what was promised, and whether it held."""
    title = "Verdict, from the ledgers outside the server"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("")
    columns = [facts(group) for group in verdict.groups]
    for group in verdict.groups:
        table.add_column(group.group, justify="right")
    for row in zip(*columns, strict=True):
        table.add_row(row[0].title, *(mark(fact) for fact in row))
    console.print(table)
    if verdict.was_killed:
        moved = verdict.recovery_seconds
        after = "never" if moved is None else f"after {moved:.2f} s"
        console.print(f"The killed worker's partitions had new owners: {after}.", highlight=False)
    console.print("All promises held." if verdict.is_good else f"A promise was BROKEN: the workers' log is {log}")


class Fact(NamedTuple):
    """One line of the verdict for one group."""

    title: str
    value: int
    is_good: bool


def facts(group: GroupVerdict) -> list[Fact]:
    """What the verdict on a group rests on; what should be none is good when it is."""
    wrong = {
        "lost": len(group.lost),
        "out of order per aircraft": group.out_of_order,
        "repeated without a reason": group.unexplained,
        "planted poison not found": len(group.missing_dead_letters),
        "innocent dead letters": len(group.surplus_dead_letters),
    }
    return [
        Fact("sent", group.expected, True),
        Fact("handled", group.handled, not group.lost and not group.unexpected),
        Fact("repeated after the kill", group.redelivered, True),
        *(Fact(title, count, count == 0) for title, count in wrong.items()),
    ]


def mark(fact: Fact) -> Text:
    """A number with its verdict."""
    return Text(f"{fact.value:,} {'✓' if fact.is_good else '✗'}", style="green" if fact.is_good else "bold red")
