"""The id of an entry: its place in its stream."""

from __future__ import annotations


def place(entry_id: bytes) -> tuple[int, int]:
    """Milliseconds and sequence: ids as text do not sort. `0` alone is `0-0`."""
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence or 0)
