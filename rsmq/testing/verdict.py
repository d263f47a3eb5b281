"""The verdict over a chaos run: from what was published, handled and dead-lettered to a list of findings. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from rsmq.testing.ledger import Event

MOST_SHOWN = 20


class Where(NamedTuple):
    """A message in a group."""

    topic: str
    group: str
    message_id: str


class Stored(NamedTuple):
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
    """Handled to the end several times. `why` says which fault excuses it; empty: nothing does."""

    where: Where
    pids: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """Was started before an earlier one of its key had been handled to its end."""

    where: Where
    earlier: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """The server still keeps something for a group when all should be settled."""

    what: str


Order = Literal["none", "single", "batch"]
"""Of the messages of a key: any; one after the other; or as a list to one call, one call after the other."""

Finding = Never | MoreThanOnce | OutOfOrder | Stuck


@dataclass(slots=True)
class Story:
    """All there is to know about one run. `groups`: (topic, group) -> what its order is.

    `confirmed` are the ids that a publisher was told are stored, by topic; `excused`: pid -> the fault done to it.
    """

    groups: Mapping[tuple[str, str], Order]
    stored: Sequence[Stored] = ()
    confirmed: Iterable[tuple[str, str]] = ()
    dead: frozenset[Where] = frozenset()
    events: Sequence[Event] = ()
    excused: Mapping[int, str] = field(default_factory=dict)
    holds: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found. `faults` are broken promises; a repeat that a fault excuses is none."""

    findings: tuple[Finding, ...]
    handled: int
    dead: int

    @property
    def faults(self) -> list[Finding]:
        """Everything that nothing excuses."""
        return [each for each in self.findings if not (isinstance(each, MoreThanOnce) and each.why)]

    @property
    def repeats(self) -> list[MoreThanOnce]:
        """What was handled more than once, excused or not: a handler with side effects must bear that."""
        return [each for each in self.findings if isinstance(each, MoreThanOnce)]

    def assert_nothing_lost(self) -> None:
        """Raises AssertionError unless everything was handled, in order per key, and repeated only by a fault."""
        if self.faults:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        counts = Counter(
            type(each).__name__ + (f" ({each.why})" if isinstance(each, MoreThanOnce) and each.why else "")
            for each in self.findings
        )
        found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing to report"
        lines = "".join(f"\n  {each}" for each in self.faults[:MOST_SHOWN])
        return f"{self.handled} handled, {self.dead} dead letters; {found}{lines}"


def judge(story: Story) -> Verdict:
    """The verdict over one run."""
    commits: dict[Where, list[int]] = defaultdict(list)
    for event in story.events:
        if event.what == "commit":
            commits[Where(event.topic, event.group, event.message_id)].append(event.pid)
    findings: list[Finding] = [Never(where) for where in expected(story) if where not in commits | _set(story.dead)]
    for where, pids in commits.items():
        if len(pids) > 1:
            why = next((story.excused[pid] for pid in pids if pid in story.excused), "")
            findings.append(MoreThanOnce(where, tuple(pids), why))
    findings += disorder(story)
    findings += [Stuck(hold) for hold in story.holds]
    return Verdict(tuple(findings), len(commits), len(story.dead))


def expected(story: Story) -> list[Where]:
    """What every group must have seen: all that is in its topic, and all that a publisher was told is there."""
    ids = dict.fromkeys([(each.topic, each.message_id) for each in story.stored] + list(story.confirmed))
    return [Where(topic, group, one) for topic, group in story.groups for place, one in ids if place == topic]


def disorder(story: Story) -> list[Finding]:
    """Messages of a key that were not handled one after the other. Repeats are ignored, dead letters leave the row."""
    starts, commits = dict[Where, tuple[int, int]](), dict[Where, tuple[int, int]]()
    for at, event in enumerate(story.events):
        into = starts if event.what == "start" else commits if event.what == "commit" else {}
        into.setdefault(Where(event.topic, event.group, event.message_id), (at, event.pid))
    rows: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for topic, partition, key, message_id in story.stored:
        if key is not None:
            rows[topic, partition, key].append(message_id)
    found: list[Finding] = []
    for (topic, group), order in story.groups.items():
        for (place, _, _), ids in rows.items():
            row = [Where(topic, group, each) for each in ids] if order != "none" and place == topic else []
            for earlier, later in pairwise([where for where in row if where in commits]):
                began, began_by = starts.get(later, commits[later])
                is_together = order == "batch" and starts[earlier][1] == began_by
                if began < (starts if is_together else commits)[earlier][0]:
                    found.append(OutOfOrder(later, earlier.message_id))
    return found


def _set(dead: Iterable[Where]) -> dict[Where, list[int]]:
    return {where: [] for where in dead}
