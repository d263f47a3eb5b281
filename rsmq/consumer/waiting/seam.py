"""What a partition waits for while it goes on behind those that it follows: the keys that are taken there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from rsmq.consumer.waiting.flows import Flows
from rsmq.consumer.waiting.recovery import Recovery
from rsmq.heartbeat.lease import Lease
from rsmq.model.stream_id import parse_stream_id

LOOKED_AT: Final = 2000
"""Keys that are looked at in one go: with many of them the event loop has other work, too."""


class Before(Protocol):
    """The lane of a partition that others follow, as far as these ask for it."""

    @property
    def partition(self) -> int: ...
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


class Left(NamedTuple):
    """What the partitions before have left that their owner does not know by its keys.

    `searched`: where these were looked for. `keys`: of all of it. `unread`: those of what is not read yet. `given`: of
    each partition with something unread, the last id that the group had been given when the search began.
    """

    searched: frozenset[int] = frozenset()
    keys: frozenset[bytes] = frozenset()
    unread: frozenset[bytes] = frozenset()
    given: Mapping[int, tuple[int, int]] = MappingProxyType({})


NOTHING: Final = Left()


def is_known(lane: Before) -> bool:
    """Whether this member knows all that was delivered of a partition, and the key of each such message, except of what
    waits as an id for a turn or a rate."""
    is_ours = lane.lease.is_held() and lane.recovery.is_over
    return is_ours and not (lane.is_quiet or lane.is_ahead or lane.is_blocked or lane.flows.raw_entries)


def has_unknown_keys(lane: Before) -> bool:
    """Whether messages are in memory that hold no key, though they may have one: raw entries that run."""
    flows = lane.flows
    heads = len(flows.waiting) - len(flows.dry) - len(flows.resting)
    return len(lane.undecided()) > heads + sum(map(len, list(flows.waiting.values())))


class Seam:
    """The keys of a sealed partition and of those before it that are taken there.

    Nothing is added to these, so a key is free for the partitions that follow when the last of its messages is settled.
    Mostly all of it has been read. If that has to wait, because there are more ids than are kept, the seam is
    *partial*: the keys of what is not read are known, and none of them is free before all is read.
    The seam is open while no connection was lost since: after that, the server may know less than this member.
    """

    __slots__ = ("_before", "_first", "_given", "_keys", "_numbers", "_turns", "_unread")

    def __init__(self, before: Sequence[Before], left: Left = NOTHING) -> None:
        self._before = tuple(before)
        self._numbers: tuple[int, ...] = ()
        self._first = self._settling()
        self._unread = left.unread
        self._given = left.given
        taken = chain.from_iterable(each.flows.waiting for each in before)
        self._keys: dict[bytes, frozenset[bytes] | None] = dict.fromkeys(chain(taken, left.keys))
        self._turns = deque(self._keys)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Those that are taken before it."""
        return tuple(self._keys)

    @property
    def is_partial(self) -> bool:
        """Whether something before it is not read yet."""
        return bool(self._given)

    @property
    def settling(self) -> frozenset[bytes]:
        """Messages before it whose settlement some of these keys wait for."""
        return self._first.union(*filter(None, self._keys.values()))

    def open(self, own: Recovery, left: Left = NOTHING) -> None:
        """The server was asked, under all leases and on the connections of now, that nothing is left to read there but
        what is `left`. Not while a message that had been handled before the keys were noted is not settled: its key is
        not among them."""
        self._unread = left.unread
        self._given = left.given
        self._first = self._first and self._first & self._settling()
        if not self._first:
            self._numbers = self._now(own)

    def complete(self) -> None:
        """All that was not read is known here by its keys now."""
        self._unread = frozenset()
        self._given = NOTHING.given

    def is_open(self, own: Recovery) -> bool:
        """Whether the partition that follows may be read. `own`: how far it was taken over."""
        return self._numbers == self._now(own) and not any(each.is_quiet for each in self._before)

    def covers(self, left: Left = NOTHING) -> bool:
        """Whether no other key is taken before it, nor will be."""
        keys = self._keys.keys()
        return keys >= left.keys and all(keys >= each.flows.waiting.keys() for each in self._before)

    def expects(self, lane: Before, entry_ids: Iterable[bytes]) -> bool:
        """Whether it has waited for these messages of a partition before it: they were not read yet."""
        given = self._given.get(lane.partition)
        return given is not None and all(parse_stream_id(each) > given for each in entry_ids)

    def free(self) -> list[bytes]:
        """Keys that were taken before it and are not any more. The server has confirmed the settlement of all of their
        messages: what is handled and not settled could come again, to another member, while the next one runs."""
        found, now = [], self._settling()
        for _ in range(min(LOOKED_AT, len(self._turns))):
            key = self._turns.popleft()
            if not self._is_taken(key):
                settling = self._keys[key]
                left = self._keys[key] = now if settling is None else settling & now
                if not left:
                    found.append(key)
                    del self._keys[key]
                    continue
            self._turns.append(key)
        return found

    def _is_taken(self, key: bytes) -> bool:
        """Whether a message of a key is before it, or may be: as an id, or not read yet."""
        if key in self._unread:
            return True
        return any(
            key in each.flows.waiting or (each.flows.named and each.flows.named.flow_of(key) is not None)
            for each in self._before
        )

    def _settling(self) -> frozenset[bytes]:
        """What the server is asked about, or is to be: with what is handled, whose settlement has no answer yet. A
        message that starts again, or is parked, leaves it without being settled, but keeps its key."""
        return frozenset().union(*(each.in_flight - each.undecided() for each in self._before))

    def _now(self, own: Recovery) -> tuple[int, ...]:
        return (own.number, *[each.recovery.number for each in self._before])

    def __repr__(self) -> str:
        return f"<Seam keys={len(self._keys)} unread={len(self._unread)}>"
