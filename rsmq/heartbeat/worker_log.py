"""What the log says of a rebalance: one line for each handler, or of a worker with several one line for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from rsmq.heartbeat.partition_log import PartitionChange
from rsmq.model.words import count

log = logging.getLogger("rsmq.consumer")
members_log = logging.getLogger("rsmq.membership")

QUIET_FOR: Final = 1.5
LONGEST: Final = 5.0
"""Seconds without a change until the line is written, and seconds after the first change: partitions move one after
another, and the successor of a process that was killed soon takes its share."""


class WorkerLog:
    """The changes of all consumers of one process. A worker with one handler logs each at once."""

    def __init__(self, handlers: int = 1) -> None:
        self._is_single = handlers < 2
        self._changes: dict[str, PartitionChange] = {}
        self._before: dict[str, frozenset[int]] = {}
        self._members: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {}
        self._stats: Sequence[Counter[str]] = ()
        self._repeated = 0
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0

    def watch(self, stats: Sequence[Counter[str]]) -> None:
        """The counts of the consumers: how many messages a rebalance has repeated."""
        self._stats = stats

    def partitions(self, change: PartitionChange) -> None:
        """A handler reads other partitions."""
        if self._is_single:
            log.info("%s", change)
            return
        log.debug("%s", change)
        self._before.setdefault(change.name, frozenset(change.before))
        self._changes[change.name] = change
        self._soon()

    def members(self, name: str, before: Collection[str], live: tuple[str, ...]) -> None:
        """A group has other members."""
        if self._is_single:
            members_log.info("%s is served by %s", name, ", ".join(live))
            return
        members_log.debug("%s is served by %s", name, ", ".join(live))
        first, _ = self._members.get(name, (frozenset(before), live))
        self._members[name] = first, live
        self._soon()

    def _soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._until = loop.time() + LONGEST
        else:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + QUIET_FOR, self._until), self.flush)

    def flush(self) -> None:
        """Write what is gathered now: also at the end of the worker."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        repeated = sum(stats["redelivered"] for stats in self._stats)
        parts = [*members_moved(self._members), *partitions_moved(self._changes, self._before)]
        if repeated > self._repeated:
            parts.append(f"{count(repeated - self._repeated, 'message is', 'messages are')} repeated")
        if parts:
            log.info("%s", "; ".join(parts))
        self._repeated = repeated
        self._changes = {}
        self._before = {}
        self._members = {}

    def __repr__(self) -> str:
        return f"<WorkerLog {len(self._changes)} changes>"


def partitions_moved(changes: Mapping[str, PartitionChange], before: Mapping[str, frozenset[int]]) -> list[str]:
    """`took 12 partitions of 10 handlers, gave up 3 partitions of 1 handler`."""
    taken = [set(change.after) - before[name] for name, change in changes.items()]
    given = [before[name] - set(change.after) for name, change in changes.items()]
    parts = [f"{word} {moved(sets)}" for word, sets in (("took", taken), ("gave up", given)) if any(sets)]
    return [", ".join(parts)] if parts else []


def moved(sets: Sequence[Collection[int]]) -> str:
    """How many partitions, of how many handlers."""
    numbers = [len(each) for each in sets if each]
    return f"{count(sum(numbers), 'partition')} of {count(len(numbers), 'handler')}"


def members_moved(members: Mapping[str, tuple[frozenset[str], tuple[str, ...]]]) -> list[str]:
    """`c has gone, d has joined: 10 handlers have 3 members`."""
    live = {member for _, now in members.values() for member in now}
    known = {member for before, _ in members.values() for member in before}
    changes = [
        f"{', '.join(sorted(names))} {'has' if len(names) == 1 else 'have'} {word}"
        for names, word in ((known - live, "gone"), (live - known, "joined"))
        if names
    ]
    which = f"{count(len(members), 'handler has', 'handlers have')} {count(len(live), 'member')}"
    return [f"{', '.join(changes)}: {which}"] if changes else []
