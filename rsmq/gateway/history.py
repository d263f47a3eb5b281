"""What the connections of a gateway have delivered lately: to know it again if the server has lost a part of it."""

from __future__ import annotations

from collections import deque
from typing import Final

from rsmq.persistence.letter import STAMP

KEPT: Final = 65_536
"""Letters of all connections together that are remembered."""
Print = tuple[int, int]
"""A seq and the fingerprint of its letter."""
Prints = dict[int, Print]


def fingerprint(envelope: bytes) -> int:
    """The same for the same message under another seq: only when it expires may differ then."""
    return hash(envelope[:7] + envelope[STAMP:])


class History:
    """The newest letters of all connections. However many connections there are."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._newest = deque[tuple[Prints, Print]]()

    def note(self, delivered: Prints, seq: int, envelope: bytes) -> None:
        """A connection has delivered this letter."""
        delivered[seq] = entry = (seq, fingerprint(envelope))
        newest = self._newest
        newest.append((delivered, entry))
        if len(newest) > self._kept:
            old, entry = newest.popleft()
            if old.get(entry[0]) is entry:  # else it was noted again, or another letter has the seq
                del old[entry[0]]

    def __repr__(self) -> str:
        return f"<History {len(self._newest)} letters>"


class Delivered:
    """The letters that one connection has delivered lately.

    A master that is lost with writes that no replica had takes the newest letters of an inbox with it. The next one
    gives their seqs to other letters. Some of the lost ones come again, because their router had not finished them.
    `rewind` says up to which seq the server has kept them. Then `find` knows a letter again that the client has.
    """

    __slots__ = ("_history", "_lost", "_prints", "moved")

    def __init__(self, history: History) -> None:
        self._history = history
        self._prints: Prints = {}
        self._lost: dict[int, list[int]] = {}
        self.moved: dict[int, int] = {}
        """Packet ids of letters that were lost and have come again, by their new seqs."""

    def note(self, seq: int, envelope: bytes) -> None:
        """The client was sent this letter."""
        self._history.note(self._prints, seq, envelope)

    def rewind(self, kept: int, out: dict[int, int]) -> None:
        """The server has lost every letter above `kept`. In `out` it becomes its negative packet id."""
        ids = {seq: packet_id for packet_id, seq in out.items() if seq > kept}
        for seq in [each for each in self._prints if each > kept]:
            self._lost.setdefault(self._prints.pop(seq)[1], []).append(ids.get(seq, 0))
        for packet_id in ids.values():
            out[packet_id] = -packet_id

    def find(self, seq: int, envelope: bytes) -> int | None:
        """The packet id under which the client was sent this letter before; 0 if it is not out any more. Else None."""
        if not self._lost:
            return None
        ids = self._lost.get(fingerprint(envelope))
        if not ids:
            return None
        self.note(seq, envelope)
        return ids.pop(0)

    def __repr__(self) -> str:
        return f"<Delivered {len(self._prints)} lost={len(self._lost)}>"
