"""The partition of a key. Clients in every language must compute the same one."""

from __future__ import annotations

import mmh3


def partition_for(key: str | bytes, partitions: int) -> int:
    """`murmur3_x86_32(key, seed 0) mod partitions`, unsigned. Golden vectors: `docs/wire-format.md`."""
    return int(mmh3.hash(key, 0, False)) % partitions
