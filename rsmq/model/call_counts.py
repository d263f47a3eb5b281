"""How the calls of a handler have gone since its process began: counted here, told with each heartbeat, added up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Final, TypeGuard

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: from a handler that only computes to one that waits for a slow service."""
SHORT: Final = BOUNDS[0]
MOST: Final = 1 << 60
"""What is more was not written by a member."""


class CallTimes:
    """The durations of the calls of one handler, counted by BOUNDS; the last count is for longer ones.

    One thread writes, others may read at any time.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)

    def note(self, seconds: float, number: int = 1) -> None:
        """Count calls that took so long each."""
        self.counts[0 if seconds <= SHORT else bisect_left(BOUNDS, seconds)] += number

    def note_burst(self, seconds: float, number: int, turn: float) -> None:
        """Count calls that came one after the other. Only the last one may have begun before a `turn` was over, and
        have ended after it; the others are counted as equally long."""
        if seconds > turn and number > 1:
            self.note(seconds - turn)
            seconds, number = turn, number - 1
        self.note(seconds / number, number)

    def __repr__(self) -> str:
        return f"<CallTimes {sum(self.counts)}>"


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Numbers since a process began. A batch is one call, but each of its messages is settled or fails by itself.
    `took`: calls by their duration, see BOUNDS; empty for none."""

    settled: int = 0
    failed: int = 0
    """Attempts that failed: their messages are tried again, or are dead letters."""
    retried: int = 0
    dead: int = 0
    took: tuple[int, ...] = ()

    @classmethod
    def read(cls, found: object) -> CallCounts:
        """From the vitals of a member. Another client may have written anything there."""
        if not isinstance(found, Mapping):
            return cls()
        took = found.get("took")
        counts = [each for each in took if is_count(each)] if isinstance(took, Sequence) else []
        numbers = [number_of(found.get(name)) for name in ("settled", "failed", "retried", "dead")]
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], tuple(counts[: len(BOUNDS) + 1]))

    @property
    def known(self) -> dict[str, object]:
        """What is not zero, by name, as `read` takes it."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}

    @property
    def calls(self) -> int:
        """How many calls have ended."""
        return sum(self.took)

    def quantile(self, share: float) -> float | None:
        """The duration in seconds that a share of the calls did not exceed, as exactly as BOUNDS tell; None without
        calls, infinite beyond the last bound."""
        wanted, before, lower = share * self.calls, 0, 0.0
        for count, upper in zip(self.took, (*BOUNDS, float("inf")), strict=False):
            if count and before + count >= wanted:
                return lower + (upper - lower) * (wanted - before) / count if upper < float("inf") else upper
            before, lower = before + count, upper
        return None

    def __add__(self, other: CallCounts) -> CallCounts:
        return self._with(other, 1)

    def __sub__(self, other: CallCounts) -> CallCounts:
        """What came since `other`, which is an earlier state of the same process."""
        return self._with(other, -1)

    def _with(self, other: CallCounts, sign: int) -> CallCounts:
        counts = tuple(max(0, a + sign * b) for a, b in zip_longest(self.took, other.took, fillvalue=0))
        return CallCounts(
            max(0, self.settled + sign * other.settled), max(0, self.failed + sign * other.failed),
            max(0, self.retried + sign * other.retried), max(0, self.dead + sign * other.dead), counts,
        )  # fmt: skip


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a number that a member may have counted."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def number_of(value: object) -> int:
    """The same, or 0."""
    return value if is_count(value) else 0


def told(stats: Mapping[str, int], times: CallTimes) -> dict[str, object]:
    """What a member tells about its calls; empty before the first. Called from another thread."""
    took = list(times.counts)
    while took and not took[-1]:
        took.pop()
    get = stats.get
    return CallCounts(get("settled", 0), get("failed", 0), get("retried", 0), get("buried", 0), tuple(took)).known
