"""The picture and the page of `benchmarks.growth`: a curve a dimension, and whether it grows faster than it may."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot

from benchmarks.section import Section
from benchmarks.table import table

ALLOWED = 1.2
"""Times the least cost at a smaller value: what a message may cost at the largest."""
FIGURES = {"client_us": "client CPU, µs", "server_us": "server CPU, µs", "commands": "commands"}
FITTED = 3
"""Points through which the power is fitted."""
NOISE = 0.15
"""A power below this is none."""
AMOUNTS = ("backlog", "payload", "pending")
LIMITS = {"payload": "at most 256 MiB, ", "concurrency": "at most 2,000 for each at once, "}
REASONS = {
    "partitions": "One read serves all partitions of a member, and one script call settles what was done in all of "
    "them.",
    "fixed part": "What a run costs beside its messages, in one process: connections and scripts, presence, one lease "
    "a partition, the group of each stream, and all of it given back at the end.",
    "members": "Each member reads, settles and beats for itself; a read carries less when there is less for each.",
    "backlog": "A stream is appended at its end and read from a position: neither looks at what lies between.",
    "payload": "Bytes are copied and parsed once; beyond the caches of the processor a byte costs somewhat more.",
    "concurrency": "Calls made at the same time share one write: a single one pays for all of it, a thousand for next "
    "to nothing, and what is left is a task switch each. A handler that suspends beside a thousand others is woken by "
    "itself; among few, the next message is there before its worker sleeps.",
    "pending": "A message that may have been started is charged an attempt before it starts again, with a script "
    "call of its own that is awaited; those of the messages that start at the same time share one write. That makes it "
    "dearer than a new one, and equally so for each.",
}


def growth(values: list[int], costs: list[float], *, per_byte: bool) -> tuple[float, float]:
    """Cost at the largest value over the least at a smaller one, and the power of the value with which it grows.

    Of a message; per byte where that is what must not grow. The power is fitted through the last points, so that one
    that a busy machine has spoiled does not decide.
    """
    if per_byte:
        costs = [cost / value for cost, value in zip(costs, values, strict=True)]
    points = [(math.log(value), math.log(max(1e-9, cost))) for value, cost in zip(values, costs, strict=True)]
    power = statistics.linear_regression(*zip(*points[-FITTED:], strict=True)).slope
    return costs[-1] / max(1e-9, min(costs[:-1])), power


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """A row a figure, a column a dimension; both axes logarithmic."""
    with mpl.rc_context({"svg.hashsalt": "growth", "font.size": 8}):
        figure, axes = pyplot.subplots(
            len(FIGURES), len(curves), figsize=(3 * len(curves), 7), squeeze=False, layout="constrained"
        )
        for column, curve in enumerate(curves):
            for row, (name, title) in enumerate(FIGURES.items()):
                panel = axes[row][column]
                for step, costs in curve["steps"].items():
                    panel.plot(curve["values"], [cost[name] for cost in costs], marker="o", markersize=3, label=step)
                panel.set_xscale("log")
                panel.set_yscale("log")
                low, high = panel.get_ylim()
                panel.set_ylim(low / 3, high * 3)  # otherwise a few per cent of noise fill the picture
                panel.grid(visible=True, alpha=0.3)
                if column == 0:
                    panel.set_ylabel(title)
                if row == 0:
                    panel.set_title(curve["name"])
                    panel.legend(fontsize=7)
                if row == len(FIGURES) - 1:
                    panel.set_xlabel(curve["unit"])
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def full(found: dict[str, Any]) -> str:
    """What was measured, in words and numbers."""
    facts, curves = found["facts"], found["curves"]
    lines = [
        "# How the cost of a message grows",
        "",
        f"Measured with `python -m benchmarks.growth` on {facts['machine']}, Python {facts['python']}. CPU time, not "
        "wall-clock time: on a busy machine it swings, too, but less (here by a third or so).",
        "",
        "![curves](growth.svg)",
        "",
        "`growth` is the cost at the largest value over the least at a smaller one "
        f"(for payloads: per byte); up to {ALLOWED} counts as constant.",
    ]
    for curve in curves:
        lines += ["", f"## {curve['name'].capitalize()}", "", amount(curve), ""]
        lines += ["| | figure | " + " | ".join(f"{value:,}" for value in curve["values"]) + " | growth |"]
        lines += ["|---|---|" + "--:|" * (len(curve["values"]) + 1)]
        for step, costs in curve["steps"].items():
            for name, title in FIGURES.items():
                row = [cost[name] for cost in costs]
                ratio, _ = growth(curve["values"], row, per_byte=curve["per_byte"])
                digits = 0 if curve["of"] != "message" else 3 if name == "commands" else 1
                lines.append(
                    f"| {step} | {title} a {curve['of']} | "
                    + " | ".join(f"{x:,.{digits}f}" for x in row)
                    + f" | {ratio:.2f} |"
                )
        lines += ["", verdict(curve)]
    return "\n".join(lines) + "\n"


def short(found: dict[str, Any]) -> str:
    """The section of the page: a row for each dimension."""
    facts, rows = found["facts"], []
    for curve in found["curves"]:
        worst = {
            name: max(
                growth(curve["values"], [cost[name] for cost in costs], per_byte=curve["per_byte"])[0]
                for costs in curve["steps"].values()
            )
            for name in FIGURES
        }
        span = f"{curve['values'][0]:,} – {curve['values'][-1]:,} {curve['unit']}"
        of = "byte" if curve["per_byte"] else curve["of"]
        linear = "no" if verdict(curve).startswith("**Not") else "YES"
        rows.append((f"{curve['name']}: {span}", of, *(f"× {worst[name]:.2f}" for name in FIGURES), linear))
    head = ("from – to", "cost of a", *(title.partition(",")[0] for title in FIGURES.values()), "faster than linear")
    day = f", {facts['date']}" if "date" in facts else ""
    return f"""{chr(10).join(table(head, rows))}

`python -m benchmarks.growth --write`{day}: {facts["machine"]}, Python {facts["python"]} ({SECTION.link}).
"""


def amount(curve: dict[str, Any]) -> str:
    """How often a point was measured, and with how many messages."""
    count = f"{curve['messages']:,} messages a point, " if curve["of"] == "message" else ""
    text = f"{count}{LIMITS.get(curve['name'], '')}the least of {curve['rounds']} rounds."
    return text[0].upper() + text[1:]


def verdict(curve: dict[str, Any]) -> str:
    """Whether it grows, how fast, and why.

    Where the value is an amount of work (messages, bytes) a message or byte must cost the same, whatever the amount;
    where it is a shape (partitions, members, how many at once) its cost may at most grow in proportion.
    """
    limit = NOISE if curve["name"] in AMOUNTS else 1 + NOISE
    grown, faster = [], False
    for step, costs in curve["steps"].items():
        for name, title in FIGURES.items():
            row = [cost[name] for cost in costs]
            ratio, power = growth(curve["values"], row, per_byte=curve["per_byte"])
            if ratio > ALLOWED:
                grown.append(f"{step}, {title.partition(',')[0]} × {ratio:.1f} (power {power:.2f})")
                faster = faster or power > limit
    what = "byte" if curve["per_byte"] else curve["of"]
    said = "**Faster than linear.** " if faster else "**Not faster than linear.** "
    said += f"What grows for a {what}: {'; '.join(grown)}." if grown else f"The cost of a {what} is constant."
    return f"{said} {REASONS[curve['name']]}"


SECTION: Final = Section("growth", short, full)
