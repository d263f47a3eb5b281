"""Which member owns which partition: a pure function of the live members, so every member gets the same result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

import mmh3

Unreadable = Mapping[str, frozenset[int]]
"""Of each member: the partitions that it cannot read. Those that can be read by all need not be in it."""
NONE_UNREADABLE: Final[Unreadable] = {}


MOST_SCORE: Final = 255
PAIRS_EACH: Final = 4
"""About how many members are compared for each partition at a time. The result does not depend on it."""


def assign(
    partitions: int,
    members: Mapping[str, float] | Iterable[str],
    salt: str = "",
    unreadable: Unreadable = NONE_UNREADABLE,
) -> dict[int, str]:
    """Rendezvous hashing with a load bound: partition -> member.

    Every partition has exactly one owner. The load of each member differs from its share (equal, or by weight) by less
    than one. The order of `members` does not matter, and a join or leave moves few partitions. Without members the
    result is empty. `salt` (the group) varies which member gets one partition more.

    A partition that a member cannot read goes to one that can, also beyond its share; if no member can read it, it is
    assigned as if all could.

    Members of all versions must compute the same: a partition that each of two members leaves to the other has no
    owner. So the result is frozen, with examples in the tests. 1 024 partitions and 1 000 members take about 10 ms.
    """
    weights = dict(members) if isinstance(members, Mapping) else dict.fromkeys(members, 1.0)
    if not weights:
        return {}
    scores, room = Scores(partitions, weights, salt), quotas(partitions, weights, salt)
    barred = {member: cannot for member, cannot in unreadable.items() if cannot and member in weights}
    owners = _owners_of_barred(scores, partitions, barred, room) if barred else {}
    low, open_members = MOST_SCORE + 1, list(weights)
    while len(owners) < partitions:
        open_members = [member for member in open_members if room[member] > 0]
        high, low = low - 1, max(0, low - max(1, PAIRS_EACH * MOST_SCORE // len(open_members)))
        pairs = sorted(scores.between(low, high, open_members, owners), reverse=True)
        for _, _, partition, member in pairs:
            if partition not in owners and room[member] > 0:
                owners[partition] = member
                room[member] -= 1
    return owners


def eligible(live: Iterable[str], outdated: Container[str]) -> tuple[str, ...]:
    """The members that may own partitions: not those that would read only some of them."""
    return tuple(member for member in live if member not in outdated)


class Scores:
    """How well each member fits each partition: one byte from SHAKE-128 of `salt/member`, the one at the number of the
    partition, and for equal bytes the murmur3 hash of `salt/member/partition`.

    The bytes of a member are made and searched by C. The second hash is computed for the few pairs that are compared.
    """

    def __init__(self, partitions: int, members: Iterable[str], salt: str) -> None:
        self._salt = salt
        self._bytes = {member: hashlib.shake_128(f"{salt}/{member}".encode()).digest(partitions) for member in members}

    def between(
        self, low: int, high: int, members: Iterable[str], without: Container[int]
    ) -> Iterator[tuple[int, int, int, str]]:
        """The pairs whose byte is from `low` to `high`: (byte, second hash, partition, member)."""
        find = _search(low, high).finditer
        for member in members:
            numbers = self._bytes[member]
            for found in find(numbers):
                partition = found.start()
                if partition not in without:
                    yield numbers[partition], self._second(partition, member), partition, member

    def best(self, partition: int, members: Collection[str]) -> str:
        """The member that fits a partition best. There must be one."""
        most = max(self._bytes[member][partition] for member in members)
        equal = [member for member in members if self._bytes[member][partition] == most]
        return max(equal, key=lambda member: (self._second(partition, member), member))

    def _second(self, partition: int, member: str) -> int:
        return mmh3.hash64(f"{self._salt}/{member}/{partition}", signed=False)[0]


@lru_cache(maxsize=1024)
def _search(low: int, high: int) -> re.Pattern[bytes]:
    """Finds the bytes from `low` to `high`."""
    return re.compile(rf"[\x{low:02x}-\x{high:02x}]".encode())


def _owners_of_barred(scores: Scores, partitions: int, barred: Unreadable, room: dict[str, int]) -> dict[int, str]:
    """The owners of the partitions that some members, but not all, cannot read. They are chosen first, and use up
    `room`."""
    some = sorted(each for each in frozenset[int]().union(*barred.values()) if each < partitions)
    able = {each: [member for member in room if each not in barred.get(member, ())] for each in some}
    owners = dict[int, str]()
    for partition in sorted((each for each in some if able[each]), key=lambda each: (len(able[each]), each)):
        most = max(room[member] for member in able[partition])
        wanted = [member for member in able[partition] if room[member] >= min(most, 1)]
        owner = scores.best(partition, wanted)
        owners[partition] = owner
        room[owner] -= 1
    return owners


def quotas(partitions: int, weights: Mapping[str, float], salt: str = "") -> dict[str, int]:
    """How many partitions each member gets: largest remainders, ties by a hash that no member controls."""
    total = sum(weights.values())
    shares = {member: partitions * weight / total for member, weight in weights.items()}
    counts = {member: int(share) for member, share in shares.items()}
    left = partitions - sum(counts.values())
    ranked = sorted(
        weights,
        key=lambda member: (round(counts[member] - shares[member], 9), mmh3.hash64(f"{salt}/{member}")[0], member),
    )
    for member in ranked[:left]:
        counts[member] += 1
    return counts
