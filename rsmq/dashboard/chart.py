"""Charts as SVG, drawn here: their colours follow the browser's light or dark scheme. A gap in the data is a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from rsmq.dashboard.html import Html, Live, tag
from rsmq.model.words import number

WIDTH: Final = 480
HEIGHT: Final = 150
LEFT: Final = 44
TOP: Final = 8
BOTTOM: Final = 20
STEPS: Final = (1, 2, 5)

Point = tuple[datetime, float | None]


Mark = tuple[datetime, str]
"""A time, and what happened then."""


def chart(
    live: Live, name: str, title: str, series: Mapping[str, Sequence[Point]], gap: timedelta,
    marks: Sequence[Mark] = (),
) -> Html:  # fmt: skip
    """Lines over time. One is broken where a value is unknown, or where more than `gap` lies between two points.
    `marks` are upright lines; those outside of the time of the points are left out."""
    points = [point for line in series.values() for point in line]
    legend = [tag("span", each, class_=f"key s{at}") for at, each in enumerate(series)]
    head = tag("figcaption", tag("b", title), legend)
    if not points:
        return live.part(name, head, tag("p", "no data yet", class_="nothing"), element="figure")
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    most = top_of(max((value for _, value in points if value is not None), default=0.0))
    seconds = max((last - first).total_seconds(), 1.0)

    def position(point: Point) -> str:
        x = LEFT + (WIDTH - LEFT - 4) * (point[0] - first).total_seconds() / seconds
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (point[1] or 0.0) / most)
        return f"{x:.1f},{y:.1f}"

    drawn = []
    for at, line in enumerate(series.values()):
        for part in unbroken(line, gap):
            shape = "".join(f" {position(point)}" for point in part)
            drawn.append(tag("polyline", points=shape.strip(), class_=f"s{at}"))
            if len(part) == 1:
                x, _, y = position(part[0]).partition(",")
                drawn.append(tag("circle", cx=x, cy=y, r=2, class_=f"s{at}"))
    for when, text in marks:
        if first <= when <= last:
            x = position((when, 0.0)).partition(",")[0]
            upright = tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark")
            drawn.append(tag("g", tag("title", f"{when:%H:%M:%S} UTC: {text}"), upright))
    grid = []
    for share in (0.0, 1.0) if most % 2 else (0.0, 0.5, 1.0):  # there are no 2.5 messages
        y = f"{TOP + (HEIGHT - TOP - BOTTOM) * (1 - share):.1f}"
        grid.append(tag("line", x1=LEFT, x2=WIDTH - 4, y1=y, y2=y))
        grid.append(tag("text", short(most * share), x=LEFT - 6, y=y, dy=4, text_anchor="end"))
    form = "%H:%M:%S" if seconds < 600 else "%H:%M"
    times = [
        tag("text", f"{first:{form}}", x=LEFT, y=HEIGHT - 4),
        tag("text", f"{last:{form}} UTC", x=WIDTH - 4, y=HEIGHT - 4, text_anchor="end"),
    ]
    picture = tag("svg", grid, times, drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return live.part(name, head, picture, element="figure")


def bars(live: Live, name: str, title: str, values: Sequence[tuple[str, int]]) -> Html:
    """A bar for each value, with its label below."""
    most = top_of(max((value for _, value in values), default=0))
    wide = (WIDTH - LEFT - 4) / max(len(values), 1)
    drawn, floor = [], HEIGHT - BOTTOM
    for at, (label, value) in enumerate(values):
        height, x = (floor - TOP) * value / most, LEFT + wide * at
        text = tag("title", f"{label}: {number(value)}")
        drawn.append(tag("g", text, tag("rect", x=f"{x + 1:.1f}", y=f"{floor - height:.1f}", width=f"{wide - 2:.1f}",
                                        height=f"{height:.1f}", class_="s0")))  # fmt: skip
        drawn.append(tag("text", label, x=f"{x + wide / 2:.1f}", y=HEIGHT - 4, text_anchor="middle", class_="small"))
    for share in (0.0, 1.0):
        y = f"{TOP + (floor - TOP) * (1 - share):.1f}"
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - 4, y1=y, y2=y))
        drawn.append(tag("text", short(most * share), x=LEFT - 6, y=y, dy=4, text_anchor="end"))
    picture = tag("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return live.part(name, tag("figcaption", tag("b", title)), picture, element="figure")


def unbroken(line: Sequence[Point], gap: timedelta) -> list[list[Point]]:
    """The parts of a line without a gap."""
    parts: list[list[Point]] = []
    before: datetime | None = None
    for at, value in line:
        if value is None:
            before = None
            continue
        if before is None or at - before > gap:
            parts.append([])
        parts[-1].append((at, value))
        before = at
    return parts


def top_of(most: float) -> float:
    """The end of the scale: 1, 2 or 5 times a power of ten, at least 1."""
    power = 1.0
    while True:
        for step in STEPS:
            if step * power >= most:
                return step * power
        power *= 10


def short(value: float) -> str:
    """A number of a scale."""
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 10_000 else number(int(value)) if value == int(value) else f"{value:g}"
