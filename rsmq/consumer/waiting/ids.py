"""Stream ids that wait, packed: sixteen bytes each instead of the sixty-four of a `bytes` in a list."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from rsmq.model.stream_id import parse_stream_id

MOST_GONE = 1024
"""Halves of ids at the front that are gone, before their memory is given back."""


class Ids:
    """A queue of stream ids."""

    __slots__ = ("_first", "_halves")

    def __init__(self) -> None:
        self._halves = array("Q")
        self._first = 0

    def __len__(self) -> int:
        return (len(self._halves) - self._first) // 2

    def __iter__(self) -> Iterator[bytes]:
        halves = iter(self._halves) if not self._first else islice(self._halves, self._first, None)
        return (b"%d-%d" % pair for pair in zip(halves, halves, strict=True))

    def append(self, entry_id: bytes) -> tuple[int, int]:
        """One more, at the end. Returns its halves."""
        halves = ms, seq = parse_stream_id(entry_id)
        self._halves.append(ms)
        self._halves.append(seq)
        return halves

    def first(self, count: int) -> list[bytes]:
        """Up to so many from the front."""
        return list(islice(self, count))

    def position(self, entry_id: bytes) -> int | None:
        """How many are before an id; None if it is not here."""
        ms, seq = parse_stream_id(entry_id)
        halves, at = self._halves, self._first
        with suppress(ValueError):
            while True:
                at = halves.index(ms, at)
                if (at - self._first) % 2 == 0 and halves[at + 1] == seq:
                    return (at - self._first) // 2
                at += 1
        return None

    def put_first(self, entry_id: bytes) -> None:
        """One more, at the front."""
        halves = array("Q", parse_stream_id(entry_id))
        if self._first:
            self._first -= 2
            self._halves[self._first : self._first + 2] = halves
        else:
            self._halves = halves + self._halves

    def drop(self, count: int) -> None:
        """So many at the front are gone."""
        self._first += 2 * count
        if self._first >= len(self._halves):
            self._halves = array("Q")
            self._first = 0
        elif self._first > MOST_GONE and 2 * self._first > len(self._halves):
            del self._halves[: self._first]
            self._first = 0

    def __repr__(self) -> str:
        return f"<Ids {len(self)}>"
