"""The checker: from what was published, handled and dead-lettered to a list of findings. Pure."""

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
    """Lost: published with success, never handled, and no dead letter. `why`: what takes it from any promise."""

    message: Name
    why: str = ""


@dataclass(frozen=True, slots=True)
class MoreThanOnce:
    """Handled to the end several times. `why` says which fault excuses it; empty: nothing does."""

    message: Name
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class DuplicateStart:
    """Started again although an earlier start had not failed, but handled to the end once at most."""

    message: Name
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class DoubleCommit:
    """The server has accepted its settlement several times: somebody settled what was not his any more."""

    message: Name
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class TooMany:
    """More messages were started again than the fault may cost."""

    repeats: int
    bound: int


@dataclass(frozen=True, slots=True)
class Leak:
    """Something was left behind when everybody had stopped: a connection, a descriptor, a member, a key for ever."""

    what: str


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """`message` was started before `earlier`, of the same key, had been handled to its end for the first time."""

    message: Name
    earlier: Name


@dataclass(frozen=True, slots=True)
class Unexpected:
    """Handled although nobody had published it."""

    message: Name


@dataclass(frozen=True, slots=True)
class Innocent:
    """A dead letter that should be none."""

    message: Name
    reason: str


@dataclass(frozen=True, slots=True)
class Spared:
    """Poison that is no dead letter, or several."""

    message: Name
    times: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """The server still keeps something for the group when all should be settled."""

    what: str


Excusable = Never | MoreThanOnce | DuplicateStart | DoubleCommit
Repeat = MoreThanOnce | DuplicateStart | DoubleCommit
Finding = Never | Repeat | TooMany | OutOfOrder | Unexpected | Innocent | Spared | Stuck | Leak


@dataclass(slots=True)
class Story:
    """All that a checker needs to know about one run.

    `stored`: publish has returned; `unknown`: it may be stored. `poison`: what must become a dead letter. `excused`:
    pid -> the fault that was done to it; every duplicate must have been handled by such a process at least once.
    `rewound`: why the server may have forgotten settlements. `most_repeats`: how many messages the fault may repeat.
    `given_up`: messages that somebody has taken behind everybody's back, and how: nobody can promise anything.
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
    """What was found. `faults` must be empty; excused duplicates and losses are only counted."""

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
        """Messages that were started again without need, handled twice or not."""
        return sum(isinstance(each, MoreThanOnce | DuplicateStart) for each in self.findings)

    def __str__(self) -> str:
        counts: dict[str, int] = defaultdict(int)
        for each in self.findings:
            why = f" ({each.why})" if isinstance(each, Excusable) and each.why else ""
            counts[type(each).__name__ + why] += 1
        found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return f"{self.handled} handled; {found or 'nothing to report'}" + "".join(f"\n  {e}" for e in self.faults[:20])


def check(story: Story) -> Verdict:
    """The verdict over one run."""
    commits = [event for event in story.events if event.what == "commit"]
    handled = {(event.key, event.n) for event in commits}
    findings: list[Finding] = []
    lost = sorted(story.stored - handled - {name for name, _ in story.dead})
    findings += [Never(name, story.given_up.get(name, "")) for name in lost]
    findings += [Unexpected(name) for name in sorted(handled - story.stored - story.unknown)]
    twice = repeats(commits, story.excused)
    findings += twice
    known = {each.message for each in twice}
    again = [each for each in restarts(story.events, story.excused) if each.message not in known]
    findings += again
    if story.most_repeats is not None and len(known) + len(again) > story.most_repeats:
        findings.append(TooMany(len(known) + len(again), story.most_repeats))
    findings += double_commits(story.events, story.rewound)
    findings += disorder(story.events, story.given_up) if story.is_ordered else []
    findings += [Innocent(name, reason) for name, reason in story.dead if name not in story.poison]
    findings += spared(story.poison, [name for name, _ in story.dead])
    findings += [Stuck(hold) for hold in story.holds]
    findings += [Leak(leak) for leak in story.leaks]
    return Verdict(findings, len(handled))


def repeats(commits: Iterable[Event], excused: dict[int, str]) -> list[MoreThanOnce]:
    """Messages handled to the end more than once."""
    by_name: dict[Name, list[int]] = defaultdict(list)
    for event in commits:
        by_name[event.key, event.n].append(event.pid)
    return [
        MoreThanOnce(name, tuple(pids), next((excused[pid] for pid in pids if pid in excused), ""))
        for name, pids in by_name.items()
        if len(pids) > 1
    ]


def restarts(events: Iterable[Event], excused: dict[int, str]) -> list[DuplicateStart]:
    """Messages started again while an earlier start was open, or after its end. A failed attempt is no such start."""
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

    Only what was handled at last counts as earlier: a dead letter leaves the row. What somebody took may come late.
    """
    first_commit: dict[Name, int] = {}
    first_start: dict[Name, int] = {}
    for place, event in enumerate(events):
        into = first_commit if event.what == "commit" else first_start if event.what == "start" else {}
        into.setdefault((event.key, event.n), place)
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
