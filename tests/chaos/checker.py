"""The independent judge of the chaos suite: compares what was published, handled and dead-lettered. No I/O.

It shares the format of the ledger with `rsmq.testing.verdict`, and no code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.ledger import Event

Name = tuple[str, int]
"""A message: its key and its number within that key, from 0."""


@dataclass(frozen=True, slots=True)
class Never:
    """Lost: published successfully, never handled, and no dead letter. `why`: why no promise covers it."""

    message: Name
    why: str = ""


@dataclass(frozen=True, slots=True)
class MoreThanOnce:
    """Handled successfully several times. `why` names the fault that excuses it; empty: it is not excused."""

    message: Name
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class DuplicateStart:
    """Started again although an earlier start had not failed, but handled successfully once at most."""

    message: Name
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class DoubleCommit:
    """The server accepted its settlement several times: a worker settled a message that it no longer owned."""

    message: Name
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class TooMany:
    """More messages were started again than the fault allows."""

    repeats: int
    bound: int


@dataclass(frozen=True, slots=True)
class Leak:
    """Something was left when all processes had stopped: a connection, a descriptor, a member, a key without TTL."""

    what: str


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """`message` was started before `earlier`, of the same key, had been handled successfully for the first time."""

    message: Name
    earlier: Name


@dataclass(frozen=True, slots=True)
class Unexpected:
    """Handled although it was not published."""

    message: Name


@dataclass(frozen=True, slots=True)
class Innocent:
    """A dead letter that is not poison."""

    message: Name
    reason: str


@dataclass(frozen=True, slots=True)
class Spared:
    """Poison that became no dead letter, or several."""

    message: Name
    times: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """The server still holds something for the group when everything should be settled."""

    what: str


@dataclass(frozen=True, slots=True)
class Unsound:
    """The books of the bank do not agree with the messages."""

    what: str


Excusable = Never | MoreThanOnce | DuplicateStart | DoubleCommit
Repeat = MoreThanOnce | DuplicateStart | DoubleCommit
Finding = Never | Repeat | TooMany | OutOfOrder | Unexpected | Innocent | Spared | Stuck | Leak | Unsound


@dataclass(slots=True)
class History:
    """Everything that the verdict depends on.

    `stored`: publish has returned; `unknown`: it may be stored. `poison`: must become dead letters. `excused`:
    pid -> the fault that was injected into it; every duplicate must have been handled by such a process at least once.
    `rewound`: why the server may have forgotten settlements. `most_repeats`: how many messages the fault may repeat.
    `given_up`: messages that another client removed, and how; no promise covers them.
    """

    stored: set[Name] = field(default_factory=set)
    unknown: set[Name] = field(default_factory=set)
    poison: set[Name] = field(default_factory=set)
    dead: list[tuple[Name, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    excused: dict[int, str] = field(default_factory=dict)
    rewound: str = ""
    given_up: dict[Name, str] = field(default_factory=dict)
    most_repeats: int | None = None
    holds: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    is_ordered: bool = True


@dataclass(slots=True)
class Verdict:
    """The findings. `faults` must be empty; excused duplicates and losses are only counted."""

    findings: list[Finding]
    handled: int

    @property
    def faults(self) -> list[Finding]:
        """Broken promises."""
        return [each for each in self.findings if not (isinstance(each, Excusable) and each.why)]

    @property
    def repeats(self) -> list[MoreThanOnce]:
        """Duplicates, excused or not."""
        return [each for each in self.findings if isinstance(each, MoreThanOnce)]

    @property
    def starts(self) -> int:
        """How many messages were started again without need, handled twice or not."""
        return sum(isinstance(each, MoreThanOnce | DuplicateStart) for each in self.findings)

    def __str__(self) -> str:
        counts: dict[str, int] = defaultdict(int)
        for each in self.findings:
            why = f" ({each.why})" if isinstance(each, Excusable) and each.why else ""
            counts[type(each).__name__ + why] += 1
        found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return f"{self.handled} handled; {found or 'nothing to report'}" + "".join(f"\n  {e}" for e in self.faults[:20])


def check(history: History) -> Verdict:
    """The verdict over one run."""
    commits = [event for event in history.events if event.what == "commit"]
    handled = {(event.key, event.n) for event in commits}
    findings: list[Finding] = []
    lost = sorted(history.stored - handled - {name for name, _ in history.dead})
    findings += [Never(name, history.given_up.get(name, "")) for name in lost]
    findings += [Unexpected(name) for name in sorted(handled - history.stored - history.unknown)]
    twice = repeats(commits, history.excused)
    findings += twice
    known = {each.message for each in twice}
    again = [each for each in restarts(history.events, history.excused) if each.message not in known]
    findings += again
    if history.most_repeats is not None and len(known) + len(again) > history.most_repeats:
        findings.append(TooMany(len(known) + len(again), history.most_repeats))
    findings += double_commits(history.events, history.rewound)
    findings += disorder(history.events, history.given_up) if history.is_ordered else []
    findings += [Innocent(name, reason) for name, reason in history.dead if name not in history.poison]
    findings += spared(history.poison, [name for name, _ in history.dead])
    findings += [Stuck(hold) for hold in history.holds]
    findings += [Leak(leak) for leak in history.leaks]
    return Verdict(findings, len(handled))


def repeats(commits: Iterable[Event], excused: dict[int, str]) -> list[MoreThanOnce]:
    """Messages handled successfully more than once."""
    by_name: dict[Name, list[int]] = defaultdict(list)
    for event in commits:
        by_name[event.key, event.n].append(event.pid)
    return [
        MoreThanOnce(name, tuple(pids), next((excused[pid] for pid in pids if pid in excused), ""))
        for name, pids in by_name.items()
        if len(pids) > 1
    ]


def restarts(events: Iterable[Event], excused: dict[int, str]) -> list[DuplicateStart]:
    """Messages started again although an earlier start was open or had succeeded. Failed attempts do not count."""
    begun: dict[Name, list[int]] = defaultdict(list)
    again: dict[Name, list[int]] = {}
    for event in events:
        name = (event.key, event.n)
        if event.what == "start":
            if begun[name]:
                again.setdefault(name, [begun[name][0]]).append(event.pid)
            begun[name].append(event.pid)
        elif event.what == "fail" and event.pid in begun[name]:
            begun[name].remove(event.pid)
    return [
        DuplicateStart(name, tuple(pids), next((excused[pid] for pid in pids if pid in excused), ""))
        for name, pids in again.items()
    ]


def double_commits(events: Iterable[Event], why: str) -> list[DoubleCommit]:
    """Messages whose settlement the server has confirmed as the first one more than once."""
    by_name: dict[Name, list[int]] = defaultdict(list)
    for event in events:
        if event.what == "settle":
            by_name[event.key, event.n].append(event.pid)
    return [DoubleCommit(name, tuple(pids), why) for name, pids in by_name.items() if len(pids) > 1]


def disorder(events: Iterable[Event], given_up: Collection[Name] = ()) -> list[Finding]:
    """Distinct messages of a key that were not handled one after the other, in order. Repeats are ignored.

    Dead letters do not count. A message that another client removed may come late.
    """
    first_commit: dict[Name, int] = {}
    first_start: dict[Name, int] = {}
    for at, event in enumerate(events):
        into = first_commit if event.what == "commit" else first_start if event.what == "start" else {}
        into.setdefault((event.key, event.n), at)
    by_key: dict[str, list[int]] = defaultdict(list)
    for key, n in first_commit:
        by_key[key].append(n)
    found: list[Finding] = []
    for key, numbers in by_key.items():
        numbers.sort()
        for earlier, later in pairwise(numbers):
            if (key, earlier) in given_up:
                continue
            if first_start.get((key, later), first_commit[key, later]) < first_commit[key, earlier]:
                found.append(OutOfOrder((key, later), (key, earlier)))
    return found


def spared(poison: Collection[Name], dead: list[Name]) -> list[Finding]:
    """Poison must be a dead letter exactly once."""
    return [Spared(name, dead.count(name)) for name in sorted(poison) if dead.count(name) != 1]
