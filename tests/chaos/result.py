"""The results of scenarios, kept in docs/chaos.json, and the page that is generated from them."""

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

from tests.chaos.catalogue import ELSEWHERE, Scenario

WITH_BANK = ", with the bank"
DOCS = Path(__file__).parents[2] / "docs"
KEPT, PAGE = DOCS / "chaos.json", DOCS / "chaos.md"


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


def page(scenarios: Sequence[Scenario], results: Sequence[Result]) -> str:
    """The page, as Markdown."""
    servers = list(dict.fromkeys(each.server for each in sorted(results, key=lambda each: each.server, reverse=True)))
    by_cell = defaultdict[tuple[str, str], list[Result]](list)
    for each in results:
        by_cell[each.title, each.server].append(each)
    lines = [
        TOP,
        *(runs_on(server, results) for server in servers),
        "",
        "| # | scenario | fault | also checked |" + "".join(f" {each} |" for each in servers),
    ]
    lines.append("|---|---|---|---|" + "---|" * len(servers))
    for one in scenarios:
        for title, _ in one.titles():
            cells = [seeds(by_cell[title, each]) for each in servers]
            lines.append(f"| {one.number} | {title} | {one.injection} | {one.bound} | {' | '.join(cells)} |")
    lines += added_up(results)
    lines += banked(results)
    lines += ["", "## Covered by other tests", "", "| # | fault | tests |", "|---|---|---|"]
    lines += [f"| {one.number} | {one.name} | {', '.join(f'`{test}`' for test in one.tests)} |" for one in ELSEWHERE]
    broken = [each for each in results if each.verdict in ("broken", "failed")]
    lines += ["", "## Not clean", ""] + [f"- {each.title}, {each.server}: {each.details}" for each in broken]
    lines += [] if broken else ["Every run in the table is clean."]
    return "\n".join(lines) + "\n" + OPEN


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
    state = _git("log", "-1", "--format=%h", "--", "rsmq")
    return (state + "+" * bool(_git("status", "--porcelain", "--", "rsmq"))) or "unknown"


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=DOCS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()


TOP = """# Chaos tests

Each scenario runs real publishers, real worker processes and a real server, and injects a fault. Publishers and
handlers record what they do in a file outside the server. After the fault the workers drain the backlog, all processes
are stopped, and a checker reads the file. `make chaos` runs all scenarios and writes this page;
`python -m tests.chaos --help` shows how to run one.

A run is **clean** when all of this is true: no confirmed message was lost; no message was handled that was not
published; messages of a key were handled in order; no settlement was accepted twice; no handler was started twice
unless a fault explains it; the dead letters are exactly the poison messages; nothing is stuck; no process left a
member, a file descriptor or a key without TTL. `tests/chaos/test_checker.py` shows that the checker detects each kind
of violation.

After the verdict a cell shows how many messages were handled twice because of the fault (delivery is at least once: if
a handler is killed after its work, the message is handled again), the longest time until the workers handled messages
again, and how many messages were lost that no promise covers: the server may lose them, or another client removed
them. Times were measured on a shared machine with two to four cores, which other work kept busy. They show the order of
magnitude. An empty cell means that the scenario was not run on that server: faults that do not involve the server are
run on one. A column can hold runs on several states of the code, because a scenario is run again after a change that
concerns it. How many scenarios ran on which day and commit:
"""

MIX = """
## The mix, added up

The mix is played in pieces that count together: `make chaos ONLY=mix PIECES=6 MINUTES=10` plays six more, each with a
seed that it has not had. The aim is 24 hours. They are on several states of the code, most of them on one. A piece
that was not clean is played again after the change that mends its cause. That has happened once.

| server | pieces | hours | longest recovery | messages handled | handled twice | pieces not clean |
|---|---|---|---|---|---|---|"""

BANK = """
## With the bank

`python -m tests.chaos --bank` plays the scenarios with handlers that move money in a PostgreSQL, in a transaction of
[Effects](database.md), and send a receipt by an outbox. At the end the books are compared with the messages: each
message that was confirmed is booked once and has one receipt, and no booking is there by half. A scenario whose fault
loses messages, or handles them again on purpose (a reset of the group), says so to the judge. Left out are shared
distribution and outputs, where `Effects` is refused, handlers in processes of their own, gateways, workers of an
earlier release, and the mix.

The long form, `python -m tests.sql.bank --transfers 600000 --batch --die 0.001 --every 10`, has faults of its own:
workers die between commit and settlement, between publish and delete of the relay, and at random moments; they sleep
for longer than their lease; all connections to PostgreSQL are cut; PostgreSQL is killed. On 2026-11-22 it moved 600 000
transfers and 600 000 receipts in 53 minutes at a load average of 30. 160 workers died. Nothing was missing, nothing was
doubled, and the sum of all accounts was as before. The control, with neither effects nor outbox, shows
doubles: `python -m tests.sql.bank --transfers 1000 --plain --die 0.01 --every 0` booked 90 transfers and 32 receipts
twice when 15 workers died. `tests/sql/test_bank.py::test_without_effects_a_transfer_counts_twice`
fails if it shows no doubles.

With `--on sentinel` masters are killed, too, and with `--on cluster` masters are killed and slots move. Transfers are
published with `wait_replicas=1`, and the outbox waits for a replica. On 2026-11-23, at load averages of 30 to 45:
2 500 transfers with Sentinel, 4 failovers, 7 workers died; 3 000 transfers on a cluster, 5 failovers, 3 slots moved, 8
workers died. Nothing was missing, nothing was doubled. `make chaos` plays both
(`python -m tests.sql.bank --on sentinel`, and `--on cluster`). Less busy: 30 000 each, one failover
each, 1 and 5 workers died, 2 slots moved, nothing missing or doubled.

| server | scenarios | runs | messages booked | started again | runs not clean |
|---|---|---|---|---|---|"""

OPEN = """
## Known gaps

- `XGROUP DELCONSUMER`, and the worker dies, stops or hands the partition over within the seconds that it needs to
  detect it: its messages in flight are lost, and the server has no trace of them. With `distribution="shared"` this is
  never detected, because partitions have no owner. rsmq itself deletes only consumers that have nothing pending ([step
  by step](simulation.md#what-no-seed-may-show)).
- The record of a lease is deleted by hand while a read of its owner is late on its way, and the owner dies. The
  record named the connection to cut off. The late read takes messages for the dead worker, and the audit finds them
  within 30 s, after later ones of their key ([step by step](simulation.md#what-no-seed-may-show)).
- The record of a lease is deleted by hand, and the server's clock is set back: a message that waits for its retry waits
  for as much longer ([step by step](simulation.md#what-no-seed-may-show)).
- With `distribution="shared"` abandoned messages are found by how long they are idle by the server's clock. If that
  clock is set back, the messages in flight of a member that dies then wait for as much longer
  ([step by step](simulation.md#what-no-seed-may-show)).
- Entries that another client removes are counted, not restored. How many of them a group had not yet received is
  unknown ([step by step](simulation.md#what-no-seed-may-show)). In a topic that is trimmed by its own policy
  (`on_full="trim"`) they are not counted.
- A delayed message (`delay`, `at`) is due at a time of the server's clock, as the user has asked. If that clock is set
  back, it comes later by as much ([step by step](simulation.md#what-no-seed-may-show)). A retry does not: its wait
  begins anew at most.
- If a failover or a power loss costs writes, and the server's clock is behind its newest entry, new messages get the
  ids of lost ones. A worker compares what it has in flight with the server when its reading connection is new, and
  settles nothing under such an id (`tests/consumer/test_lost_history.py`). It does not find out if that connection
  stays open: if the master becomes a replica of a server with another history and then a master again, and the worker
  reads nothing in between ([step by step](simulation.md#what-no-seed-may-show)).
- With `appendfsync always`, leases are lost when an fsync takes longer than a sixth of `lease_ttl`. A command may wait
  for two syncs. A lease must last for two renewals and the third of `lease_ttl` between them, so four syncs must fit
  into the other two thirds. A renewal that waits longer for its reply would not change that. It would only find a dead
  connection later. Nothing is lost and order is kept, but handlers are cancelled and run again
  ([step by step](simulation.md#what-no-seed-may-show)).
- With `appendfsync everysec`, a crash of the server's process may cost confirmed messages of the last two seconds, as a
  power failure may: while a sync is running, the server confirms writes before it has written them to its file (A33,
  [step by step](simulation.md#what-no-seed-may-show)).
  Four of 53 pieces of the mix that were played beside other work lost one to four messages so, each confirmed within a
  quarter of a second before the server was killed. Since then the servers of the suite run without `appendfsync`, where
  no sync is meant to be slow. Another piece was stopped unfinished, because its processes got too little CPU for their
  leases of 1.5 s. These five pieces are not in the table.
- The parts of the mix that depend on timing (which worker is the busiest, which messages are in flight) differ between
  two runs with the same seed: a seed repeats the faults and their order, not the race. The [simulator](simulation.md)
  repeats the race.
"""
