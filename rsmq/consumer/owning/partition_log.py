"""One line in the log for each rebalance of a handler, however many partitions have moved."""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import pairwise

from rsmq.model.words import count

log = logging.getLogger("rsmq.consumer")


class PartitionLog:
    """Logs which partitions a member reads, as soon as they have settled: a rebalance opens and drops many lanes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged = frozenset[int]()
        self._last = frozenset[int]()

    def note(self, held: Collection[int], assigned: Collection[int], partitions: int) -> None:
        """The state after one turn of the rebalancer, of so many partitions. What still changes is logged later."""
        now = frozenset(held)
        is_settled = now == frozenset(assigned) or now == self._last
        self._last = now
        if is_settled and now != self._logged:
            log.info("%s", describe(self._name, partitions, self._logged, now))
            self._logged = now

    def __repr__(self) -> str:
        return f"<PartitionLog {self._name} {ranges(self._logged)}>"


def describe(name: str, partitions: int, before: Collection[int], after: Collection[int]) -> str:
    """`orders/billing: reads 5 of 8 partitions: 0-3 7 (took 7, gave up 4)`."""
    taken, given = set(after) - set(before), set(before) - set(after)
    changes = [f"{word} {ranges(each)}" for word, each in (("took", taken), ("gave up", given)) if each]
    which = f": {ranges(after)}" if after else ""
    return f"{name}: reads {len(after)} of {count(partitions, 'partition')}{which} ({', '.join(changes)})"


def ranges(numbers: Collection[int]) -> str:
    """`0-3 7` for 0, 1, 2, 3, 7."""
    ordered = sorted(numbers)
    starts = [ordered[0], *(later for earlier, later in pairwise(ordered) if later != earlier + 1)] if ordered else []
    ends = [*(earlier for earlier, later in pairwise(ordered) if later != earlier + 1), *ordered[-1:]]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
