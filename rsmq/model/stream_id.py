"""The id of a stream entry, `ms-sequence`."""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

LARGEST_PART: Final = 2**64 - 1
"""Of milliseconds, and of the sequence."""


def parse_stream_id(entry_id: bytes) -> tuple[int, int]:
    """Milliseconds and sequence: ids do not sort as text. `0` alone is `0-0`."""
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence or 0)


def following_id(entry_id: bytes) -> bytes:
    """The least id above this one. Of the largest id: itself."""
    ms, sequence = parse_stream_id(entry_id)
    if sequence < LARGEST_PART:
        return b"%d-%d" % (ms, sequence + 1)
    return b"%d-0" % (ms + 1) if ms < LARGEST_PART else entry_id


def sortable(entry_id: bytes) -> str:
    """The id as text that sorts as ids do."""
    ms, _, sequence = entry_id.decode().partition("-")
    return f"{ms:0>20}{sequence:0>20}"


STREAM_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


def is_stream_id(raw: bytes) -> bool:
    """Whether these bytes are the id of an entry: two numbers of 64 bits."""
    ms, dash, sequence = raw.partition(b"-")
    halves = (ms, sequence)
    return bool(dash) and all(each.isdigit() and len(each) <= 20 and int(each) < 2**64 for each in halves)


def is_position(text: str) -> bool:
    """Whether a text is a position in a stream: an id, or only its milliseconds. What this accepts, the server does."""
    return STREAM_ID.fullmatch(text) is not None and all(int(each) < 2**64 for each in text.split("-"))


LOCATED_ID: Final = re.compile(r"(?:(\d{1,7})/)?(\d{1,20}-\d{1,20})", re.ASCII)
"""A stream id, perhaps after its partition: `3/1718000000000-0`, as `rsmq dlq list` prints it."""


def sent_ms(message_id: str) -> int | None:
    """The time in an id: of a UUIDv7, or of a stream id; None for any other."""
    if match := LOCATED_ID.fullmatch(message_id):
        return int(match[2].partition("-")[0])
    try:
        given = UUID(message_id)
    except ValueError:
        return None
    return given.int >> 80 if given.version == 7 else None
