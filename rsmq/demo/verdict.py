"""The verdict: what was sent, held against what the ledgers say was handled. Pure, so that it can be shown to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rsmq.demo.ledger import Entry


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """What became of the messages in one group."""

    group: str
    expected: int
    handled: int
    lost: tuple[int, ...]
    unexpected: tuple[int, ...]
    out_of_order: int
    redelivered: int
    unexplained: int
    missing_dead_letters: tuple[str, ...]
    surplus_dead_letters: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Nothing lost, nothing reordered, nothing repeated without a reason, the dead letters exactly the poison."""
        return not (
            self.lost
            or self.unexpected
            or self.out_of_order
            or self.unexplained
            or self.missing_dead_letters
            or self.surplus_dead_letters
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole: `recovery_seconds` is the time from the kill until the dead worker's partitions had new owners."""

    groups: tuple[GroupVerdict, ...]
    was_killed: bool
    recovery_seconds: float | None
    channels: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether the demo has shown what it claims."""
        return all(group.is_good for group in self.groups) and (
            not self.was_killed or self.recovery_seconds is not None
        )


def judge(
    group: str,
    expected: Iterable[int],
    entries: Iterable[Entry],
    poison: Iterable[str],
    dead_letters: Iterable[str],
) -> GroupVerdict:
    """Compare one group's entries with the numbers that were sent, and its dead letters with the planted poison.

    A repeat is explained when it says so itself: a redelivery has an attempt above 1. Order is that of the first time
    each departure of an aircraft was handled: a redelivery may repeat, never reorder.
    """
    wanted = set(expected)
    seen: Counter[int] = Counter()
    last: dict[str, int] = {}
    out_of_order = redelivered = unexplained = 0
    for entry in sorted((entry for entry in entries if entry.group == group), key=lambda entry: entry.at_ns):
        if seen[entry.number]:
            redelivered += entry.attempt > 1
            unexplained += entry.attempt == 1
        else:
            out_of_order += entry.turn < last.get(entry.aircraft, -1)
            last[entry.aircraft] = max(entry.turn, last.get(entry.aircraft, -1))
        seen[entry.number] += 1
    poisoned, dead = Counter(poison), Counter(dead_letters)
    return GroupVerdict(
        group=group,
        expected=len(wanted),
        handled=len(wanted & seen.keys()),
        lost=tuple(sorted(wanted - seen.keys())),
        unexpected=tuple(sorted(seen.keys() - wanted)),
        out_of_order=out_of_order,
        redelivered=redelivered,
        unexplained=unexplained,
        missing_dead_letters=tuple((poisoned - dead).elements()),
        surplus_dead_letters=tuple((dead - poisoned).elements()),
    )
