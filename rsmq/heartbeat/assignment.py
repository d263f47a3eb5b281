"""Which member owns which partition: a pure function of the live members, so every member gets the same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import mmh3

from rsmq.model.layout import single


def assign(partitions: int, members: Mapping[str, float] | Iterable[str], salt: str = "") -> dict[int, str]:
    """Rendezvous hashing with a load bound: partition -> member.

    Every partition has exactly one owner. The load of each member differs from its share (equal, or by weight) by less
    than one. The order of `members` does not matter, and a join or leave moves few partitions. Without members the
    result is empty. `salt` (the group) varies which member gets one partition more.
    """
    weights = dict(members) if isinstance(members, Mapping) else dict.fromkeys(members, 1.0)
    return dict(_assign(partitions, tuple(sorted(weights.items())), salt)) if weights else {}


@lru_cache(maxsize=2048)  # called several times a second, changes only with a join or leave: 1024 x 50 take 90 ms
def _assign(partitions: int, members: tuple[tuple[str, float], ...], salt: str) -> dict[int, str]:
    weights = dict(members)
    room = quotas(partitions, weights, salt)
    pairs = sorted(
        ((mmh3.hash64(f"{salt}/{member}/{partition}", signed=False)[0], partition, member)
         for member in weights for partition in single(partitions).numbers),
        reverse=True,
    )  # fmt: skip
    owners: dict[int, str] = {}
    for _, partition, member in pairs:
        if partition not in owners and room[member] > 0:
            owners[partition] = member
            room[member] -= 1
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
