"""The chart of a run: waiting letters, phones online, and how long reconnecting phones need for their backlog."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from history import History
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

AWAY, ON_ITS_WAY, PHONES, MARK = "#4c8dff", "#e0647c", "#3fb68b", "#7a8290"
FASTEST: Final = 0.001
"""Seconds: shorter times are drawn as this."""


def draw(history: History, end: float, path: Path) -> None:
    """Draw the chart into `path` (.png, .svg or .pdf). `end`: when all phones come online, in seconds."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    waiting, connected, catching_up = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 3))
    draw_waiting(waiting, history)
    draw_connected(connected, history)
    draw_catching_up(figure, catching_up, history)
    for axes in (waiting, connected, catching_up):
        if history.outage is not None:
            axes.axvspan(*history.outage, color=MARK, alpha=0.25, linewidth=0, label="one gateway is down")
        axes.axvline(end, color=MARK, linestyle=":", label="all phones come online")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.set_xlim(0, history.end)
    catching_up.set_xlabel("seconds")
    figure.legend(*waiting.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def draw_waiting(axes: Axes, history: History) -> None:
    """Letters that wait for their phone, and those on their way."""
    levels = [level.at(history.times) for level in (history.away, history.on_its_way)]
    labels = ("phone is offline", "on its way to an online phone")
    axes.stackplot(history.times, *levels, labels=labels, colors=(AWAY, ON_ITS_WAY), alpha=0.8)
    axes.set_title("letters", loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_connected(axes: Axes, history: History) -> None:
    """How many phones are online."""
    axes.plot(history.times, history.connected.at(history.times), color=PHONES)
    axes.set_ylim(bottom=0)
    axes.set_title("phones online", loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_catching_up(figure: Figure, axes: Axes, history: History) -> None:
    """A dot for each time a phone reconnected to waiting letters."""
    visits = history.visits
    seconds = [max(FASTEST, visit.seconds) for visit in visits]
    dots = axes.scatter(
        [visit.start for visit in visits], seconds, c=[visit.letters for visit in visits],
        s=4, cmap="viridis_r", linewidths=0, rasterized=True,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(FASTEST, 10 * max(seconds, default=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("reconnecting phones: time until the backlog is received", loc="left")
    if visits:
        figure.colorbar(dots, ax=axes, label="letters in the backlog", pad=0.01)


def format_seconds(seconds: float) -> str:
    """A duration with its unit."""
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
