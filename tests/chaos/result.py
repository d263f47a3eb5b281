"""The results of scenarios, kept in tests/chaos/results.json, and their sections of tests/chaos/README.md."""

from __future__ import annotations

import functools
import json
import subprocess
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.section import rewrite
from tests.chaos.catalogue import ELSEWHERE, Scenario

WITH_BANK = ", with the bank"
HERE = Path(__file__).parent
PACKAGE = ":/rsmq"
"""As git takes it in any directory."""
KEPT = HERE / "results.json"
PAGE = HERE / "README.md"
MIX = """\
| server | pieces | hours | longest recovery | messages handled | handled twice | pieces not clean |
|---|---|---|---|---|---|---|"""
BANK = """\
| server | scenarios | runs | messages booked | started again | runs not clean |
|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `verdict`: clean, broken, failed (a check of the scenario itself) or skipped. Times in seconds.
    `booked`: messages in the books of the bank, if it was played with one.

    `date` is the day of the run, `commit` the state of the code.
    """

    title: str
    server: str
    seed: int
    verdict: str
    details: str = ""
    handled: int = 0
    duplicates: int = 0
    restarted: int = 0
    unknown: int = 0
    lost: int = 0
    recovery: float = 0.0
    took: float = 0.0
    note: str = ""
    booked: int = 0
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    commit: str = field(default_factory=lambda: state_of_the_code())

    @property
    def cell(self) -> str:
        """The cell of the table: verdict, messages handled twice, seconds until the workers handled messages again."""
        if self.verdict == "skipped":
            return "skipped"
        recovery = f" · {self.recovery:.1f} s" if self.recovery else ""
        lost = f" · {self.lost} lost" if self.lost else ""
        note = f" · {self.note}" if self.note else ""
        return f"{self.verdict} · {self.duplicates}{recovery}{lost}{note}"


def keep(results: Iterable[Result]) -> list[Result]:
    """Add results to those of earlier runs, in place of older ones of the same scenario, server and seed."""
    known = {(each.title, each.server, each.seed): each for each in [*read(), *results]}
    rows = [known[name] for name in sorted(known)]
    KEPT.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n", encoding="utf-8")
    return rows


def read() -> list[Result]:
    """What earlier runs have kept."""
    return [Result(**row) for row in json.loads(KEPT.read_text(encoding="utf-8"))] if KEPT.exists() else []


def sections(scenarios: Sequence[Scenario], results: Sequence[Result]) -> dict[str, str]:
    """What the runs say on the page, by the name of the section. The text around the sections is written by hand."""
    broken = [
        f"- {each.title}, {each.server}: {each.details}" for each in results if each.verdict in ("broken", "failed")
    ]
    tests = [f"| {one.number} | {one.name} | {', '.join(f'`{test}`' for test in one.tests)} |" for one in ELSEWHERE]
    return {
        "scenarios": "\n".join(by_scenario(scenarios, results)),
        "mix": "\n".join(added_up(results)),
        "bank": "\n".join(banked(results)),
        "elsewhere": "\n".join(["| # | fault | tests |", "|---|---|---|", *tests]),
        "not clean": "\n".join(broken or ["Every run in the table is clean."]),
    }


def write(scenarios: Sequence[Scenario], results: Sequence[Result], page: Path = PAGE) -> None:
    """Write the sections into the page."""
    for name, text in sections(scenarios, results).items():
        rewrite(page, name, text)


def by_scenario(scenarios: Sequence[Scenario], results: Sequence[Result]) -> list[str]:
    """How many runs are of which day and commit, and the verdict of each scenario on each server."""
    servers = list(dict.fromkeys(each.server for each in sorted(results, key=lambda each: each.server, reverse=True)))
    by_cell = defaultdict[tuple[str, str], list[Result]](list)
    for each in results:
        by_cell[each.title, each.server].append(each)
    lines = [
        *(runs_on(server, results) for server in servers),
        "",
        "| # | scenario | fault | also checked |" + "".join(f" {each} |" for each in servers),
        "|---|---|---|---|" + "---|" * len(servers),
    ]
    for one in scenarios:
        for title, _ in one.titles():
            cells = [seeds(by_cell[title, each]) for each in servers]
            lines.append(f"| {one.number} | {title} | {one.injection} | {one.bound} | {' | '.join(cells)} |")
    return lines


def seeds(results: Sequence[Result]) -> str:
    """The cell of one scenario on one server: with the seeds, if there were several."""
    if len(results) == 1:
        return results[0].cell
    if results and results[0].title == "mix":
        clean = sum(each.verdict == "clean" for each in results)
        return f"{clean} of {len(results)} pieces clean: [added up below](#the-mix-added-up)"
    return "<br>".join(f"seed {each.seed}: {each.cell}" for each in sorted(results, key=lambda each: each.seed))


def added_up(results: Sequence[Result]) -> list[str]:
    """A table of the mix: its pieces, each with another seed, count together."""
    by_server = defaultdict[str, list[Result]](list)
    for each in results:
        if each.title == "mix":
            by_server[each.server].append(each)
    lines = [MIX] if by_server else []
    for server, pieces in sorted(by_server.items(), reverse=True):
        not_clean = sum(each.verdict != "clean" for each in pieces)
        times = f"{sum(each.took for each in pieces) / 3600:.2f} | {max(each.recovery for each in pieces):.1f} s"
        counts = f"{sum(each.handled for each in pieces):,} | {sum(each.duplicates for each in pieces):,}"
        lines.append(f"| {server} | {len(pieces)} | {times} | {counts} | {not_clean} |".replace(",", " "))
    return lines


def banked(results: Sequence[Result]) -> list[str]:
    """A table of the runs with the bank: a line for each server."""
    by_server = defaultdict[str, list[Result]](list)
    for each in results:
        if each.title.endswith(WITH_BANK) and each.verdict != "skipped":
            by_server[each.server].append(each)
    lines = [BANK] if by_server else []
    for server, runs in sorted(by_server.items(), reverse=True):
        not_clean = sum(each.verdict != "clean" for each in runs)
        names = len({each.title for each in runs})
        booked, again = sum(each.booked for each in runs), sum(each.restarted for each in runs)
        lines.append(f"| {server} | {names} | {len(runs)} | {booked:,} | {again:,} | {not_clean} |".replace(",", " "))
    return lines


def runs_on(server: str, results: Sequence[Result]) -> str:
    """When the runs of a column took place, and on which commits."""
    here = [each for each in results if each.server == server]
    states = Counter(f"{each.date}, {each.commit}" for each in here)
    line = f"- {server}: " + "; ".join(f"{count} on {state}" for state, count in sorted(states.items())) + "."
    return "\n".join(textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False))


@functools.cache
def state_of_the_code() -> str:
    """The commit that changed the package last; `+` says that something was changed after it."""
    state = _git("log", "-1", "--format=%h", "--", PACKAGE)
    return (state + "+" * bool(_git("status", "--porcelain", "--", PACKAGE))) or "unknown"


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
