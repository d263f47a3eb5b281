"""The result of a demo: the verdict of `rsmq.testing` for each group, and whether its dead letters are the poison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rsmq.testing.ledger import Event
from rsmq.testing.verdict import MoreThanOnce, Never, OutOfOrder, RunHistory, StoredEntry, Where, judge

TOPIC, NOTIFIER, AUDITOR = "departures", "notifier", "auditor"
LEDGER_VARIABLE: Final = "DEMO_LEDGER"
"""Environment variable with the path of the ledger, for the worker processes."""
NO_CHANNEL: Final = "-"


@dataclass(frozen=True, slots=True)
class Handled(Event):
    """One handled departure, with the channel that its passengers were notified through."""

    channel: str = NO_CHANNEL


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The result of one group. `redelivered` messages have an attempt above 1, `unexplained` repeats do not."""

    group: str
    expected: int
    handled: int
    lost: tuple[str, ...]
    unexpected: tuple[str, ...]
    out_of_order: int
    redelivered: int
    unexplained: int
    missing_dead_letters: tuple[str, ...]
    surplus_dead_letters: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Nothing lost, reordered or repeated without a reason, and the dead letters are exactly the poison."""
        violations = self.lost or self.unexpected or self.out_of_order or self.unexplained
        return not (violations or self.missing_dead_letters or self.surplus_dead_letters)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All groups. `recovery_seconds`: from the kill until the killed worker's partitions had new owners."""

    groups: tuple[GroupResult, ...]
    was_killed: bool
    recovery_seconds: float | None
    channels: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether all promises held."""
        return all(group.is_good for group in self.groups) and (
            not self.was_killed or self.recovery_seconds is not None
        )


def result_of(
    group: str,
    stored: Sequence[StoredEntry],
    events: Iterable[Event],
    poison: Iterable[str],
    dead_letters: Iterable[str],
) -> GroupResult:
    """Compare what a group handled with what was published, and its dead letters with the planted poison."""
    commits = [event for event in events if event.group == group]
    poisoned, dead = Counter(poison), Counter(dead_letters)
    expected = {each.message_id for each in stored} - poisoned.keys()
    seen = {event.message_id for event in commits}
    history = RunHistory(
        {(TOPIC, group): "single"}, stored, dead=frozenset(Where(TOPIC, group, each) for each in dead), events=commits
    )
    findings = judge(history).findings
    first_attempts = Counter(event.message_id for event in commits if event.attempt == 1)
    repeats = [each.where.message_id for each in findings if isinstance(each, MoreThanOnce)]
    unexplained = sum(first_attempts[each] > 1 for each in repeats)
    return GroupResult(
        group=group,
        expected=len(expected),
        handled=len(expected & seen),
        lost=tuple(each.where.message_id for each in findings if isinstance(each, Never)),
        unexpected=tuple(sorted(seen - expected)),
        out_of_order=sum(isinstance(each, OutOfOrder) for each in findings),
        redelivered=len(repeats) - unexplained,
        unexplained=unexplained,
        missing_dead_letters=tuple((poisoned - dead).elements()),
        surplus_dead_letters=tuple((dead - poisoned).elements()),
    )
