"""The charts of a report: what they say, and when all messages lie within a second. No Spark."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `spark`")

from rsmq.pipeline.report.charts import lines, stacked

AT = datetime(2026, 1, 1, 12)
DAY = [AT + timedelta(hours=n) for n in range(24)]
SECOND = [AT + timedelta(milliseconds=100 * n) for n in range(10)]


def texts(svg: str) -> list[str]:
    """All labels."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("times", [[AT], SECOND, DAY], ids=["one time", "one second", "a day"])
@pytest.mark.parametrize("draw", [stacked, lines])
@pytest.mark.parametrize("most", [3.0, 700.0, 1e6])
def test_labels_are_plain_and_of_the_right_time(draw: Callable[..., str], times: list[datetime], most: float) -> None:
    """No markup of formulas, a scale with numbers, and no year that has no message."""
    values = [1.0 + most * n / len(times) for n in range(len(times))]
    found = texts(draw("x", times, [("a", values), ("$b$", values)], "ms"))
    assert not [label for label in found if "mathdefault" in label]
    assert "$b$" in found
    assert not {"2024", "2025", "2027"} & set(found), found
    assert [label for label in found if re.fullmatch(r"[0-9.]+( [kMG])?", label)], found
