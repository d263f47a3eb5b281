"""Fields and messages as one binary string each: for sorted sets, and for scripts that take one argument for many."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from rsmq.errors import Malformed


def pack_fields(fields: Iterable[bytes | str]) -> bytes:
    """Fields as one binary string (u32 big-endian length, bytes, repeated): for delayed and for oversized entries."""
    raw = (field.encode() if isinstance(field, str) else field for field in fields)
    return b"".join(struct.pack(">I", len(part)) + part for part in raw)


def unpack_fields(packed: bytes) -> list[bytes]:
    """The inverse of `pack_fields`. Raises Malformed for a truncated string."""
    fields, position = [], 0
    while position < len(packed):
        end = position + 4
        end += int.from_bytes(packed[position:end], "big")
        if end > len(packed) or len(packed) - position < 4:
            raise Malformed(f"packed fields are cut off at byte {position}")
        fields.append(packed[position + 4 : end])
        position = end
    return fields


def readable_fields(packed: bytes) -> list[bytes]:
    """`unpack_fields` of what another client may have written: none if it cannot be read."""
    try:
        return unpack_fields(packed)
    except Malformed:
        return []


def by_name(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """The values of an entry by their names. What another client has packed may end with a name alone."""
    return dict(zip(fields[::2], fields[1::2], strict=False))


def pack_array(count: int, packed: Iterable[bytes]) -> bytes:
    """An array of `count` values of MessagePack, which are packed already."""
    return b"".join((b"\xdd", count.to_bytes(4), *packed))


def pack_values(values: Iterable[int | bytes | str]) -> bytes:
    """Numbers below 65 536 and texts as values of MessagePack, one behind the other."""
    parts = []
    for value in values:
        if isinstance(value, int):
            parts.append(b"\xcd" + value.to_bytes(2))
        else:
            raw = value.encode() if isinstance(value, str) else value
            parts.append(b"\xdb%b%b" % (len(raw).to_bytes(4), raw))
    return b"".join(parts)
