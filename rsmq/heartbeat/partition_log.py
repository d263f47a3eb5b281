"""The change of the partitions that a handler reads, once it has settled: a rebalance moves many of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

from rsmq.model.words import count


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """What a handler reads now and read before, of so many partitions.

    As text: `orders/billing: reads 5 of 8 partitions: 0-3 7 (took 7, gave up 4)`.
    """

    name: str
    partitions: int
    before: Collection[int]
    after: Collection[int]

    def __str__(self) -> str:
        taken, given = set(self.after) - set(self.before), set(self.before) - set(self.after)
        changes = [f"{word} {ranges(each)}" for word, each in (("took", taken), ("gave up", given)) if each]
        which = f": {ranges(self.after)}" if self.after else ""
        total = count(self.partitions, "partition")
        return f"{self.name}: reads {len(self.after)} of {total}{which} ({', '.join(changes)})"


class PartitionLog:
    """Tells which partitions a member reads, as soon as they have settled: a rebalance opens and drops many lanes."""

    def __init__(self, name: str, tell: Callable[[PartitionChange], None]) -> None:
        self._name = name
        self._tell = tell
        self._told = frozenset[int]()
        self._last = frozenset[int]()

    def note(self, held: Collection[int], assigned: Collection[int], partitions: int) -> None:
        """The state after one turn of the rebalancer, of so many partitions. What still changes comes later."""
        now = frozenset(held)
        is_settled = now == frozenset(assigned) or now == self._last
        self._last = now
        if is_settled and now != self._told:
            self._tell(PartitionChange(self._name, partitions, self._told, now))
            self._told = now

    def __repr__(self) -> str:
        return f"<PartitionLog {self._name} {ranges(self._told)}>"


def ranges(numbers: Collection[int]) -> str:
    """`0-3 7` for 0, 1, 2, 3, 7."""
    ordered = sorted(numbers)
    starts = [ordered[0], *(later for earlier, later in pairwise(ordered) if later != earlier + 1)] if ordered else []
    ends = [*(earlier for earlier, later in pairwise(ordered) if later != earlier + 1), *ordered[-1:]]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
