"""`python -m tests.shares [PYTEST ARGUMENTS] [--write]`: what each area of the tests costs, in tests, CPU and seconds.

Runs the tests with a report (six at a time unless an argument says otherwise) and prints the table; `--write` writes it
into tests/README.md, as `make shares` does. CPU is that of the tests and of all that they start. It hardly depends on
what else the machine does. The seconds are those of the tests, several of which run at once: their sum is more than the
time of the run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from benchmarks.section import rewrite
from benchmarks.table import table
from tests.cpu import PROPERTY, START

README: Final = Path(__file__).with_name("README.md")
REPORT: Final = Path(__file__).parents[1] / ".cache" / "tests.xml"


@dataclass(frozen=True, slots=True)
class Share:
    """Of one area: how many tests it has, their CPU and their time in seconds."""

    tests: int
    cpu_s: float
    seconds: float


def shares(report: Path) -> dict[str, Share]:
    """That of each area: a folder of tests/, the files beside them, or what each process does before its tests."""
    found, start_s = defaultdict[str, list[tuple[float, float]]](list), 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        area = parts[1] if len(parts) > 2 else "(files)"
        found[area].append((cpu_s_of(case), float(case.get("time") or 0)))
        start_s += cpu_s_of(case, START)
    areas = {area: Share(len(each), sum(c for c, _ in each), sum(t for _, t in each)) for area, each in found.items()}
    return areas | {"(start, collect)": Share(0, start_s, 0.0)}


def cpu_s_of(case: ElementTree.Element, name: str = PROPERTY) -> float:
    """Seconds of CPU of a test in a report; 0 where none were measured."""
    found = case.find(f"properties/property[@name='{name}']")
    return 0.0 if found is None else float(found.get("value") or 0)


def text(found: dict[str, Share], wall_s: float, day: str) -> str:
    """The table, the most CPU first. `wall_s` is the time of the whole run."""
    total = sum(share.cpu_s for share in found.values())
    rows = [
        (area, share.tests, f"{share.cpu_s:.0f}", f"{100 * share.cpu_s / (total or 1):.0f} %", f"{share.seconds:.0f}")
        for area, share in sorted(found.items(), key=lambda each: -each[1].cpu_s)
    ]
    head = f"Measured on {day}: the whole run took {wall_s / 60:.1f} minutes and {total:.0f} s of CPU."
    return "\n".join([head, "", *table(("area", "tests", "CPU, s", "share", "seconds"), rows)])


def main(arguments: Sequence[str]) -> int:
    """Run the tests, print the table and write it if that is asked for. Returns pytest's exit code."""
    REPORT.parent.mkdir(exist_ok=True)
    given = [each for each in arguments if each != "--write"]
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "6", *given, "--junit-xml", str(REPORT)]
    code = subprocess.run(command, check=False).returncode
    said = text(shares(REPORT), time.monotonic() - begun, f"{datetime.now(UTC):%Y-%m-%d}")
    print(said)
    if "--write" in arguments:
        rewrite(README, "shares", said)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
