"""What a run of a scenario has shown, kept over runs, and the page that is made from it."""

from __future__ import annotations

import functools
import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.catalogue import ELSEWHERE, Scenario

DOCS = Path(__file__).parents[2] / "docs"
KEPT, PAGE = DOCS / "chaos.json", DOCS / "chaos.md"


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `verdict`: clean, broken, failed (a check of the scenario itself), or skipped. Times in seconds.

    `played` is its day, `state` that of the code, as git names it.
    """

    title: str
    server: str
    seed: int
    verdict: str
    said: str = ""
    handled: int = 0
    duplicates: int = 0
    restarted: int = 0
    unknown: int = 0
    lost: int = 0
    recovery: float = 0.0
    took: float = 0.0
    played: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    state: str = field(default_factory=lambda: state_of_the_code())

    @property
    def cell(self) -> str:
        """In the table: verdict, messages handled twice, seconds until work went on."""
        if self.verdict == "skipped":
            return "skipped"
        recovery = f" · {self.recovery:.1f} s" if self.recovery else ""
        lost = f" · {self.lost} lost" if self.lost else ""
        return f"{self.verdict} · {self.duplicates}{recovery}{lost}"


def keep(results: Iterable[Result]) -> list[Result]:
    """Add results to those of earlier runs, in place of older ones of the same scenario, server and seed."""
    known = {(each.title, each.server, each.seed): each for each in [*read(), *results]}
    rows = [known[name] for name in sorted(known)]
    KEPT.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n", encoding="utf-8")
    return rows


def read() -> list[Result]:
    """What earlier runs have kept."""
    return [Result(**row) for row in json.loads(KEPT.read_text(encoding="utf-8"))] if KEPT.exists() else []


def page(scenarios: Sequence[Scenario], results: Sequence[Result]) -> str:
    """The page, as Markdown."""
    servers = list(dict.fromkeys(each.server for each in sorted(results, key=lambda each: each.server, reverse=True)))
    by_place = defaultdict[tuple[str, str], list[Result]](list)
    for each in results:
        by_place[each.title, each.server].append(each)
    lines = [
        TOP,
        *(played(server, results) for server in servers),
        "",
        "| # | scenario | what is done | also checked |" + "".join(f" {each} |" for each in servers),
    ]
    lines.append("|---|---|---|---|" + "---|" * len(servers))
    for one in scenarios:
        for title, _ in one.titles():
            cells = [seeds(by_place[title, each]) for each in servers]
            lines.append(f"| {one.number} | {title} | {one.injection} | {one.bound} | {' | '.join(cells)} |")
    lines += ["", "## Played by other tests", "", "| # | what | tests |", "|---|---|---|"]
    lines += [f"| {one.number} | {one.name} | {', '.join(f'`{test}`' for test in one.tests)} |" for one in ELSEWHERE]
    broken = [each for each in results if each.verdict in ("broken", "failed")]
    lines += ["", "## Not clean", ""] + [f"- {each.title}, {each.server}: {each.said}" for each in broken]
    lines += [] if broken else ["Nothing of what the table shows."]
    return "\n".join(lines) + "\n" + OPEN


def seeds(results: Sequence[Result]) -> str:
    """The cell of one scenario on one server: with its seed, if it was played with several."""
    if len(results) == 1:
        return results[0].cell
    return "<br>".join(f"seed {each.seed}: {each.cell}" for each in results)


def played(server: str, results: Sequence[Result]) -> str:
    """When a column was played, and on which states of the code."""
    here = [each for each in results if each.server == server]
    states = Counter(f"{each.played}, {each.state}" for each in here)
    return f"- {server}: " + "; ".join(f"{count} on {state}" for state, count in sorted(states.items())) + "."


@functools.cache
def state_of_the_code() -> str:
    """The commit that changed the package last; `+` says that something was changed after it."""
    state = _git("log", "-1", "--format=%h", "--", "rsmq")
    return (state + "+" * bool(_git("status", "--porcelain", "--", "rsmq"))) or "unknown"


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=DOCS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()


TOP = """# The faults that rsmq is put through

Real publishers, real worker processes, a real server; what was published and what handlers did is written to a file
outside the server. When the fault is over the backlog is drained, everybody is asked to stop, and a checker reads the
file. `make chaos` plays all of it and writes this page; `python -m tests.chaos --help` says how to play one.

A run is **clean** when nothing confirmed was lost, nothing came from nowhere, messages of a key were handled in order,
no settlement was accepted twice, no handler was started twice without a fault that explains it, the dead letters were
exactly the poison, nothing was stuck, and nobody left a member, a descriptor or an endless key behind. The checker is
tested with bad runs of each kind (`tests/chaos/test_checker.py`).

Behind the verdict: how many messages were handled twice because of the fault (at least once: a handler that is killed
after its work runs again), the longest time until work went on, and how many messages were lost of those that the
server's own promise leaves out, or that somebody else has taken. Times were taken beside other work on a machine with
two cores: they show the order of magnitude. An empty cell was not played there: what has to do with rsmq alone is
played on one server. Scenarios, their day, and the state of the code:
"""

OPEN = """
## Open

- `XGROUP DELCONSUMER` and the death of the worker within the seconds in which it would have noticed: what it had in
  hand is lost, and nothing in the server tells of it. With `distribution="shared"` nobody notices at all: there is no
  owner who could know. rsmq itself deletes only consumers that have nothing pending.
- Entries that somebody else removes are counted, not brought back; how many of them a group had not been given is not
  known, only whether there can be any. In a topic that is trimmed by its own policy (`on_full="trim"`) nobody counts.
- The parts of a mix that depend on time (which worker is the busiest, what is on its way) differ between two runs of
  the same seed: a seed repeats the faults and their order, not the race.
"""
