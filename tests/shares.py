"""`python -m tests.shares REPORT.xml [--write]`: how long each area of the tests takes, from a report of pytest.

`make shares` runs all tests with such a report, and writes the table of tests/README.md. The times are those of the
tests, several of which run at once: the sum is more than the minutes of the run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from benchmarks.section import rewrite
from benchmarks.table import table

README: Final = Path(__file__).with_name("README.md")


def shares(report: Path) -> dict[str, tuple[int, float]]:
    """Tests and seconds of each area: a folder of tests/, or its files."""
    found = defaultdict[str, list[float]](list)
    for case in ElementTree.parse(report).iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        area = parts[1] if len(parts) > 2 else "(files)"
        found[area].append(float(case.get("time") or 0))
    return {area: (len(times), sum(times)) for area, times in found.items()}


def text(found: dict[str, tuple[int, float]], wall: float, day: str) -> str:
    """The table, longest first."""
    total = sum(seconds for _, seconds in found.values()) or 1.0
    rows = [
        (area, tests, f"{seconds:.0f}", f"{100 * seconds / total:.0f} %")
        for area, (tests, seconds) in sorted(found.items(), key=lambda each: -each[1][1])
    ]
    lines = table(("area", "tests", "seconds", "share"), rows)
    return "\n".join([f"Measured on {day}: the whole run took {wall / 60:.1f} minutes.", "", *lines])


def main(arguments: Sequence[str]) -> None:
    """Print the table, and write it into README.md."""
    report = Path(arguments[0])
    wall = max(float(each.get("time") or 0) for each in ElementTree.parse(report).iter("testsuite"))
    said = text(shares(report), wall, f"{datetime.fromtimestamp(report.stat().st_mtime, UTC):%Y-%m-%d}")
    print(said)
    if "--write" in arguments:
        rewrite(README, "shares", said)


if __name__ == "__main__":
    main(sys.argv[1:])
