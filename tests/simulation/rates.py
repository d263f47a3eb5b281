"""Rates by key and by name: none starts more than its limit in any window, in whichever members."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.simulation.run import Run

MARGIN: Final = 0.001
"""Seconds: a handover takes the times along in milliseconds."""


class Rates:
    """The last starts of each key, in which partition, and the owners of each partition.

    An owner that a fault has struck may have lost the times: of it, and of those before it. Then a key begins anew.
    After a resize that counts for the owners of both partitions.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._starts = defaultdict[str, deque[tuple[float, int, int]]](deque)
        self._owners = defaultdict[int, list[tuple[int, str]]](list)
        self._of_names = defaultdict[str, deque[float]](deque)

    def owns(self, partition: int, member: int, epoch: str) -> None:
        """A member believes in a lease."""
        owners = self._owners[partition]
        if not owners or owners[-1] != (member, epoch):
            owners.append((member, epoch))

    def forget(self) -> None:
        """The server has lost its last writes: what it had granted."""
        self._of_names.clear()

    def starts_of_name(self, name: str) -> None:
        """A handler starts with a message of a name. Only the server can forget that: no fault of a member counts."""
        limit, per = self._run.plan.group_rate
        now, starts = self._run.world.now, self._of_names[name]
        starts.append(now)
        if len(starts) > limit > 0:
            first = starts.popleft()
            if now - first < per - 1e-9:
                self._run.violate(
                    f"{limit + 1} messages of the name {name} start within {now - first:.3f} s of {per:g}"
                )

    def starts(self, key: str, partition: int, member: int, epoch: str) -> None:
        """A handler starts with a message of a key."""
        limit, per = self._run.plan.rate
        if not limit:
            return
        self.owns(partition, member, epoch)
        now, starts, owners = self._run.world.now, self._starts[key], self._owners[partition]
        since = len(owners)
        if starts and starts[-1][1:] != (partition, since):
            _, last, before = starts[-1]
            between = {
                owner for owner, _ in [*self._owners[last][before - 1 :], *(owners if last != partition else ())]
            }
            if between & self._run.fates.excused.keys():
                starts.clear()
        starts.append((now, partition, since))
        if len(starts) > limit:
            first = starts.popleft()[0]
            if now - first < per - MARGIN:
                self._run.violate(f"{limit + 1} messages of {key} start within {now - first:.3f} s of {per:g} s")
