"""Where benchmarks write: their figures and full reports beside them, and a short section of docs/benchmarks.md each.

A section stands between two marks. The text around it is written by hand. `python -m benchmarks.page` writes all
sections and reports again from the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.prose import wrapped

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
URL: Final = "https://github.com/rsmq/rsmq/blob/main/benchmarks/results/"

Found = Any
"""What a benchmark has measured, as JSON."""


@dataclass(frozen=True, slots=True)
class Section:
    """How the figures of a benchmark become text: the section of the page, and a report with all of them."""

    name: str
    short: Callable[[Found], str]
    full: Callable[[Found], str] | None = None

    def read(self, results: Path = RESULTS) -> Found:
        """The figures of the last run. Raises FileNotFoundError if there are none."""
        return json.loads((results / f"{self.name}.json").read_text(encoding="utf-8"))

    def keep(self, found: Found, results: Path = RESULTS, page: Path = PAGE) -> None:
        """Write figures, report and section."""
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        (results / f"{self.name}.json").write_text(text, encoding="utf-8")
        self.write(results, page)

    def write(self, results: Path = RESULTS, page: Path = PAGE) -> None:
        """Write report and section again, from the figures."""
        found = self.read(results)
        if self.full is not None:
            (results / f"{self.name}.md").write_text(wrapped(self.full(found)), encoding="utf-8")
        rewrite(page, self.name, self.short(found))

    @property
    def link(self) -> str:
        """Where all figures are."""
        kind = "json" if self.full is None else "md"
        return f"[all figures]({URL}{self.name}.{kind})"


def marks(name: str) -> tuple[str, str]:
    """The lines around a section."""
    return f"<!-- measured: {name} -->", f"<!-- end: {name} -->"


def section(page: Path, name: str) -> str:
    """What stands between the marks. Raises ValueError if the page has not one pair of them, in this order."""
    begin, end = marks(name)
    text = page.read_text(encoding="utf-8")
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"{page} has no single section between {begin} and {end}")
    return text.partition(begin)[2].partition(end)[0].strip("\n")


def rewrite(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks, and nothing else; its prose is wrapped."""
    section(page, name)
    begin, end = marks(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    new = wrapped(text.strip("\n"))
    page.write_text(f"{before}{begin}\n\n{new}\n\n{end}{after}", encoding="utf-8")
