"""The verdict on a run: compares what was published with what was handled and what is a dead letter. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from rsmq.model.words import count
from rsmq.testing.ledger import Event

MOST_SHOWN = 20


class Where(NamedTuple):
    """A message in a group."""

    topic: str
    group: str
    message_id: str


class StoredEntry(NamedTuple):
    """An entry of a topic, in the order of its partition."""

    topic: str
    partition: int
    key: str | None
    message_id: str


@dataclass(frozen=True, slots=True)
class Never:
    """Lost: published, never handled, and no dead letter."""

    where: Where


@dataclass(frozen=True, slots=True)
class MoreThanOnce:
    """Handled successfully several times. `why` names the fault that excuses it; empty: it is not excused."""

    where: Where
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """Started before the handler of an earlier message of its key had finished."""

    where: Where
    earlier: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """The server still holds something for a group when everything should be settled."""

    what: str


Order = Literal["none", "single", "batch"]
"""How messages of a key are handled: in any order, one after the other, or as lists, one call after the other."""

Finding = Never | MoreThanOnce | OutOfOrder | Stuck


@dataclass(slots=True)
class RunHistory:
    """Everything that the verdict depends on. `groups`: (topic, group) -> the order that it keeps.

    `stored`: the entries of all topics, in stream order; `confirmed`: (topic, id) of each publish that succeeded;
    `excused`: pid -> the fault that was injected into that process; `holds`: what the server still holds.
    """

    groups: Mapping[tuple[str, str], Order]
    stored: Sequence[StoredEntry] = ()
    confirmed: Iterable[tuple[str, str]] = ()
    dead: frozenset[Where] = frozenset()
    events: Sequence[Event] = ()
    excused: Mapping[int, str] = field(default_factory=dict)
    holds: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The findings of a run. `faults` are the broken promises: all findings except repeats that are excused."""

    findings: tuple[Finding, ...]
    handled: int
    dead: int

    @property
    def faults(self) -> list[Finding]:
        """The findings that are not excused."""
        return [each for each in self.findings if not (isinstance(each, MoreThanOnce) and each.why)]

    @property
    def repeats(self) -> list[MoreThanOnce]:
        """Messages handled more than once, excused or not: handlers with side effects must be idempotent."""
        return [each for each in self.findings if isinstance(each, MoreThanOnce)]

    def assert_nothing_lost(self) -> None:
        """Raises AssertionError unless all was handled, in order per key, and repeated only because of a fault."""
        if self.faults:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        counts = Counter(
            type(each).__name__ + (f" ({each.why})" if isinstance(each, MoreThanOnce) and each.why else "")
            for each in self.findings
        )
        found = ", ".join(f"{many} {name}" for name, many in sorted(counts.items())) or "nothing to report"
        lines = "".join(f"\n  {each}" for each in self.faults[:MOST_SHOWN])
        return f"{self.handled} handled, {count(self.dead, 'dead letter')}; {found}{lines}"


def judge(history: RunHistory) -> Verdict:
    """The verdict over one run."""
    commits: dict[Where, list[int]] = defaultdict(list)
    for event in history.events:
        if event.what == "commit":
            commits[Where(event.topic, event.group, event.message_id)].append(event.pid)
    findings: list[Finding] = [
        Never(where) for where in expected(history) if where not in commits and where not in history.dead
    ]
    for where, pids in commits.items():
        if len(pids) > 1:
            why = next((history.excused[pid] for pid in pids if pid in history.excused), "")
            findings.append(MoreThanOnce(where, tuple(pids), why))
    findings += disorder(history)
    findings += [Stuck(hold) for hold in history.holds]
    return Verdict(tuple(findings), len(commits), len(history.dead))


def expected(history: RunHistory) -> list[Where]:
    """The messages that every group must have handled: all entries of its topic, and all that were confirmed."""
    ids = dict.fromkeys([(each.topic, each.message_id) for each in history.stored] + list(history.confirmed))
    return [Where(topic, group, one) for topic, group in history.groups for stored_in, one in ids if stored_in == topic]


def disorder(history: RunHistory) -> list[Finding]:
    """Messages of a key that were not handled one after the other. Repeats and dead letters do not count."""
    starts, commits = dict[Where, tuple[int, int]](), dict[Where, tuple[int, int]]()
    for at, event in enumerate(history.events):
        into = starts if event.what == "start" else commits if event.what == "commit" else {}
        into.setdefault(Where(event.topic, event.group, event.message_id), (at, event.pid))
    by_key: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for topic, partition, key, message_id in history.stored:
        if key is not None:
            by_key[topic, partition, key].append(message_id)
    found: list[Finding] = []
    for (topic, group), order in history.groups.items():
        for (stored_in, _, _), ids in by_key.items():
            row = [Where(topic, group, each) for each in ids] if order != "none" and stored_in == topic else []
            for earlier, later in pairwise([where for where in row if where in commits]):
                began, began_by = starts.get(later, commits[later])
                is_together = order == "batch" and starts[earlier][1] == began_by
                if began < (starts if is_together else commits)[earlier][0]:
                    found.append(OutOfOrder(later, earlier.message_id))
    return found
