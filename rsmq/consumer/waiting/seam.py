"""What a partition waits for while it goes on behind those that it follows: the keys that are taken there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rsmq.consumer.waiting.flows import Flows
from rsmq.consumer.waiting.recovery import Recovery
from rsmq.heartbeat.lease import Lease


class Before(Protocol):
    """The lane of a partition that others follow, as far as these ask for it."""

    @property
    def lease(self) -> Lease: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def flows(self) -> Flows: ...
    @property
    def in_flight(self) -> set[bytes]: ...
    @property
    def is_quiet(self) -> bool: ...
    @property
    def is_ahead(self) -> bool: ...
    @property
    def is_blocked(self) -> bool: ...
    def undecided(self) -> set[bytes]: ...


def is_known(lane: Before) -> bool:
    """Whether this member knows all that was delivered of a partition, and the key of each such message."""
    flows = lane.flows
    is_ours = lane.lease.is_held() and lane.recovery.is_over
    return is_ours and not (lane.is_quiet or lane.is_ahead or lane.is_blocked or flows.raw_entries or flows.named)


def has_unknown_keys(lane: Before) -> bool:
    """Whether messages are in memory that hold no key, though they may have one: raw entries that run."""
    flows = lane.flows
    heads = len(flows.waiting) - len(flows.dry) - len(flows.resting)
    return len(lane.undecided()) > heads + sum(map(len, list(flows.waiting.values())))


class Seam:
    """The keys of a sealed partition and of those before it that were taken when all of it had been read.

    Nothing is added to these, so a key is free for the partitions that follow when the last of its messages is settled.
    The seam is open while no connection was lost since: after that, the server may know less than this member.
    """

    __slots__ = ("_before", "_first", "_keys", "_numbers")

    def __init__(self, before: Sequence[Before]) -> None:
        self._before = tuple(before)
        self._numbers: tuple[int, ...] = ()
        self._first = self._settling()
        self._keys: dict[bytes, frozenset[bytes] | None] = {key: None for each in before for key in each.flows.waiting}

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Those that are taken before it."""
        return tuple(self._keys)

    @property
    def settling(self) -> frozenset[bytes]:
        """Messages before it whose settlement some of these keys wait for."""
        return self._first.union(*filter(None, self._keys.values()))

    def open(self, own: Recovery) -> None:
        """The server was asked, under all leases and on the connections of now, that nothing is left to read there. Not
        while a message that had been handled before the keys were noted is not settled: its key is not among them."""
        self._first = self._first and self._first & self._settling()
        if not self._first:
            self._numbers = self._now(own)

    def is_open(self, own: Recovery) -> bool:
        """Whether the partition that follows may be read. `own`: how far it was taken over."""
        return self._numbers == self._now(own) and not any(each.is_quiet for each in self._before)

    def covers(self) -> bool:
        """Whether no other key is taken before it."""
        return all(self._keys.keys() >= each.flows.waiting.keys() for each in self._before)

    def free(self) -> list[bytes]:
        """Keys that were taken before it and are not any more. The server has confirmed the settlement of all of their
        messages: what is handled and not settled could come again, to another member, while the next one runs."""
        found, now = [], self._settling()
        for key, settling in self._keys.items():
            if any(key in each.flows.waiting for each in self._before):
                continue
            left = self._keys[key] = now if settling is None else settling & now
            if not left:
                found.append(key)
        for key in found:
            del self._keys[key]
        return found

    def _settling(self) -> frozenset[bytes]:
        """What the server is asked about, or is to be: with what is handled, whose settlement has no answer yet. A
        message that starts again, or is parked, leaves it without being settled, but keeps its key."""
        return frozenset().union(*(each.in_flight - each.undecided() for each in self._before))

    def _now(self, own: Recovery) -> tuple[int, ...]:
        return (own.number, *[each.recovery.number for each in self._before])

    def __repr__(self) -> str:
        return f"<Seam keys={len(self._keys)}>"
