"""The id of a stream entry, `ms-sequence`."""

from __future__ import annotations


def parse_stream_id(entry_id: bytes) -> tuple[int, int]:
    """Milliseconds and sequence: ids do not sort as text. `0` alone is `0-0`."""
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence or 0)


def sortable(entry_id: bytes) -> str:
    """The id as text that sorts as ids do."""
    ms, _, sequence = entry_id.decode().partition("-")
    return f"{ms:0>20}{sequence:0>20}"
