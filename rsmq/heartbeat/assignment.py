"""Which member owns which partition: a pure function of the live members, so every member gets the same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import mmh3

from rsmq.model.layout import single

Unreadable = Mapping[str, frozenset[int]]
"""Of each member: the partitions that it cannot read. Those that can be read by all need not be in it."""
NONE_UNREADABLE: Final[Unreadable] = {}


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
    """
    weights = dict(members) if isinstance(members, Mapping) else dict.fromkeys(members, 1.0)
    barred = tuple(sorted((member, cannot) for member, cannot in unreadable.items() if cannot and member in weights))
    return dict(_assign(partitions, tuple(sorted(weights.items())), salt, barred)) if weights else {}


@lru_cache(maxsize=2048)  # called several times a second, changes only with a join or leave: 1024 x 50 take 90 ms
def _assign(
    partitions: int,
    members: tuple[tuple[str, float], ...],
    salt: str,
    barred: tuple[tuple[str, frozenset[int]], ...],
) -> dict[int, str]:
    weights = dict(members)
    room = quotas(partitions, weights, salt)
    pairs = sorted(
        ((mmh3.hash64(f"{salt}/{member}/{partition}", signed=False)[0], partition, member)
         for member in weights for partition in single(partitions).numbers),
        reverse=True,
    )  # fmt: skip
    owners = _owners_of_barred(pairs, dict(barred), room) if barred else {}
    for _, partition, member in pairs:
        if partition not in owners and room[member] > 0:
            owners[partition] = member
            room[member] -= 1
    return owners


def _owners_of_barred(pairs: list[tuple[int, int, str]], barred: Unreadable, room: dict[str, int]) -> dict[int, str]:
    """The owners of the partitions that some members, but not all, cannot read. They are chosen first, and use up
    `room`."""
    some, able = frozenset[int]().union(*barred.values()), dict[int, list[str]]()
    for _, partition, member in pairs:
        if partition in some and partition not in barred.get(member, ()):
            able.setdefault(partition, []).append(member)
    owners = dict[int, str]()
    for partition in sorted(able, key=lambda each: (len(able[each]), each)):
        owner = max(able[partition], key=lambda member: room[member] > 0)  # the first by hash that has room
        if room[owner] <= 0:
            owner = max(able[partition], key=lambda member: room[member])
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
