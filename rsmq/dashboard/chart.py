"""Lines over the last minutes, drawn as SVG by ECharts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from nicegui import ui

from rsmq.dashboard.watcher import Moment
from rsmq.trend import Board

Measure = Callable[[Board], float | None]


class Chart:
    """A few measures of a board over time. A moment for which one is not known is a gap in its line."""

    def __init__(self, title: str, measures: Mapping[str, Measure]) -> None:
        self._measures = measures
        self._drawn: object = None
        self._chart = ui.echart(options(title, measures), renderer="svg").classes("w-full h-56")

    def draw(self, moments: Iterable[Moment]) -> None:
        """Show these moments."""
        shown = list(moments)
        newest = shown[-1].at if shown else None
        if newest == self._drawn:
            return
        self._drawn = newest
        for series, measure in zip(self._chart.options["series"], self._measures.values(), strict=True):
            series["data"] = [[each.at.isoformat(), measure(each.board)] for each in shown]
        self._chart.update()


def options(title: str, names: Iterable[str]) -> dict[str, Any]:
    """As ECharts wants it. The tooltip is drawn, not written as markup."""
    return {
        "title": {"text": title, "left": 8, "textStyle": {"fontSize": 13, "fontWeight": "normal"}},
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 36, "bottom": 8, "containLabel": True},
        "legend": {"right": 8, "top": 0},
        "tooltip": {"trigger": "axis", "renderMode": "richText"},
        "xAxis": {"type": "time", "axisLabel": {"hideOverlap": True}},
        "yAxis": {"type": "value", "min": 0, "minInterval": 1},
        "series": [{"name": name, "type": "line", "showSymbol": False, "data": []} for name in names],
    }


def summed(parts: Iterable[float | None]) -> float | None:
    """The sum of what is known, None when nothing is."""
    known = [part for part in parts if part is not None]
    return round(sum(known), 1) if known else None


FLOW: Final[dict[str, Measure]] = {
    "in": lambda board: summed(topic.rate_in for topic in board.topics),
    "settled": lambda board: summed(group.rate_out for group in board.groups),
}
WAITING: Final[dict[str, Measure]] = {
    "lag": lambda board: summed(group.lag for group in board.groups),
    "in hand": lambda board: summed(group.in_hand for group in board.groups),
    "parked": lambda board: summed(group.parked for group in board.groups),
}
DEAD: Final[dict[str, Measure]] = {
    "dead letters": lambda board: summed(group.dead_letters for group in board.groups),
}
