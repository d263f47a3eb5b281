"""The partition of a key. Clients in every language must compute the same one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import mmh3

from rsmq.errors import ConfigError


def partition_for(key: str | bytes, partitions: int) -> int:
    """`murmur3_x86_32(key, seed 0) mod partitions`, unsigned. Golden vectors: `docs/wire-format.md`."""
    if not key.isascii() and isinstance(key, str):  # mmh3 crashes the process for text that is not Unicode
        try:
            key = key.encode()
        except UnicodeEncodeError:
            raise not_unicode(key) from None
    return int(mmh3.hash(key, 0, False)) % partitions


def not_unicode(key: str | bytes | None) -> ConfigError:
    """The error for a key that has no bytes."""
    return ConfigError(f"key={key!r} is not valid Unicode: it has a lone surrogate")


MOST_PARTITIONS: Final = 1024


def route_of(fields: Sequence[bytes | str], otherwise: bytes | str) -> bytes | str:
    """What decides the partition of an entry: its key; without one its message id, or `otherwise` if it has none."""
    named = {name.encode() if isinstance(name, str) else name: value for name, value in pairs_in(fields)}
    return named.get(b"key", named.get(b"id", otherwise))


def pairs_in(fields: Sequence[bytes | str]) -> Iterable[tuple[bytes | str, bytes | str]]:
    """Names and values of a flat list."""
    return zip(fields[::2], fields[1::2], strict=False)
