"""The charts of a report as inline SVG. Text stays text, and colours are legible on light and dark backgrounds."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

SHORTEST: Final = timedelta(seconds=1)
"""The shortest step of a report."""
INK: Final = "#7a8290"
COLOURS: Final = ("#4c8dff", "#f2a33c", "#3fb68b", "#e0647c", "#9b7bea", "#3bb3d0", "#c9b037", "#8a94a6")
STYLE: Final[dict[str, Any]] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.2,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}

Series = Sequence[tuple[str, Sequence[float]]]
"""Names and values."""


@dataclass
class Chart:
    """The axes to draw on, and the SVG afterwards."""

    axes: Axes
    svg: str = ""


@contextmanager
def chart(name: str, height: float = 2.9) -> Iterator[Chart]:
    """A chart to draw in the block. `name` makes its SVG ids different from those of the other charts of a page."""
    with mpl.rc_context(cast(Any, {**STYLE, "svg.hashsalt": name})):
        figure = Figure(figsize=(9, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        drawing = Chart(axes)
        yield drawing
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
        drawing.svg = text.getvalue()[text.getvalue().index("<svg") :]


def stacked(name: str, times: Sequence[Any], series: Series, unit: str) -> str:
    """Stacked areas over time, each value as long as a step. A single one is as long as the shortest step."""
    if times:  # the last step ends somewhere: without an end it would have no area
        step = times[-1] - times[-2] if len(times) > 1 else SHORTEST
        times, series = [*times, times[-1] + step], [(label, [*values, values[-1]]) for label, values in series]
    with chart(name) as drawing:
        axes = drawing.axes
        axes.stackplot(
            times, *(values for _, values in series), labels=[label for label, _ in series], colors=COLOURS, alpha=0.75,
            step="post",
        )  # fmt: skip
        format_axes(axes, unit)
        if len(series) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6)
    return drawing.svg


def lines(name: str, times: Sequence[Any], series: Series, unit: str) -> str:
    """Lines over time, on a logarithmic scale."""
    with chart(name) as drawing:
        for (label, values), colour in zip(series, COLOURS, strict=False):
            drawing.axes.plot(times, [max(value, 0.5) for value in values], label=label, color=colour, marker=".")
        format_axes(drawing.axes, unit)
        if len(times) == 1:  # or the axis shows years
            drawing.axes.set_xlim(times[0] - SHORTEST, times[0] + SHORTEST)
        drawing.axes.set_yscale("log")
        drawing.axes.yaxis.set_major_formatter(FuncFormatter(short))
        lowest, highest = drawing.axes.get_ylim()
        is_narrow = highest < 10 * lowest  # then there may be no power of ten, so the ticks between them get numbers
        drawing.axes.yaxis.set_minor_formatter(FuncFormatter(short) if is_narrow else NullFormatter())
        drawing.axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6)
    return drawing.svg


def bars(name: str, labels: Sequence[str], values: Sequence[float], unit: str) -> str:
    """Horizontal bars with their values, the first on top."""
    with chart(name, height=0.7 + 0.3 * len(labels)) as drawing:
        axes = drawing.axes
        drawn = axes.barh(range(len(labels)), values, color=COLOURS[0], alpha=0.85)
        axes.bar_label(drawn, [short(value) for value in values], padding=4, color=INK)
        axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel(unit)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.margins(x=0.1)
    return drawing.svg


def columns(name: str, labels: Sequence[str], values: Sequence[float], unit: str) -> str:
    """Vertical bars with their values."""
    with chart(name) as drawing:
        axes = drawing.axes
        drawn = axes.bar(labels, values, color=COLOURS[0], alpha=0.85)
        if len(labels) <= 32:
            axes.bar_label(drawn, [short(value) for value in values], padding=2, color=INK, fontsize=8)
        axes.grid(False, axis="x")
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter(FuncFormatter(short))
        if len(labels) > 32:
            axes.xaxis.set_major_locator(MaxNLocator(16))
    return drawing.svg


def format_axes(axes: Axes, unit: str) -> None:
    """Format the x axis as time (UTC) and the y axis as numbers."""
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    axes.set_ylabel(unit)
    axes.margins(x=0.01)


def short(value: float, _: Any = None) -> str:
    """A number in a few characters."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def shortened(label: str, most: int = 40) -> str:
    """A label cut to leave room for its bar."""
    return label if len(label) <= most else f"{label[: most - 1]}…"
