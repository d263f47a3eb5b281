"""The letters that a gateway has delivered lately: to know it again if the server has lost a part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

from rsmq.persistence.letter import STAMP

KEPT: Final = 65_536
"""Letters of all connections together that are remembered."""


def fingerprint(envelope: bytes) -> int:
    """A number that a message keeps under another seq: only when it expires may differ then."""
    return hash(envelope[:7] + envelope[STAMP:])


class DeliveredLetters:
    """Letters that one connection has delivered together: their seqs, which grow, and fingerprints.

    One object for all of them: under load the garbage collector has to visit each.
    """

    __slots__ = ("prints", "seqs")

    def __init__(self, seqs: list[int], prints: list[int]) -> None:
        self.seqs, self.prints = seqs, prints


Pages = dict[int, DeliveredLetters]
"""By first seq."""


class LetterHistory:
    """The newest letters of all connections. However many connections there are."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._count = 0
        self._newest = deque[tuple[Pages, int, DeliveredLetters, int]]()

    def note(self, delivered: Pages, seqs: list[int], envelopes: Sequence[bytes]) -> None:
        """A connection has delivered these letters."""
        first, count = seqs[0], len(seqs)
        new = delivered[first] = DeliveredLetters(seqs, [hash(each[:7] + each[STAMP:]) for each in envelopes])
        newest = self._newest
        newest.append((delivered, first, new, count))
        self._count += count
        while self._count > self._kept:
            old, first, page, count = newest.popleft()
            self._count -= count
            if old.get(first) is page:  # else its letters were lost, or another one begins with the seq
                del old[first]

    def __repr__(self) -> str:
        return f"<LetterHistory {self._count} letters>"


class Delivered:
    """The letters that one connection has delivered lately.

    A master that is lost with writes that no replica had takes the newest letters of an inbox with it. The next one
    gives their seqs to other letters. Some of the lost ones come again, because their router had not finished them.
    `rewind` says up to which seq the server has kept them. Then `find` knows a letter again that the client has.
    """

    __slots__ = ("_history", "_pages", "lost", "moved")

    def __init__(self, history: LetterHistory) -> None:
        self._history = history
        self._pages: Pages = {}
        self.lost: dict[int, list[int]] = {}
        """Packet ids of letters that the server has lost, by fingerprint; 0 for one that was not out any more."""
        self.moved: dict[int, int] = {}
        """Packet ids of letters that were lost and have come again, by their new seqs."""

    def note(self, seqs: list[int], envelopes: Sequence[bytes]) -> None:
        """The client was sent these letters, of which there is at least one."""
        self._history.note(self._pages, seqs, envelopes)

    def rewind(self, kept: int, out: dict[int, int]) -> None:
        """The server has lost every letter above `kept`. In `out` it becomes its negative packet id."""
        ids = {seq: packet_id for packet_id, seq in out.items() if seq > kept}
        for first, page in list(self._pages.items()):
            at = bisect_right(page.seqs, kept)
            for seq, each in zip(page.seqs[at:], page.prints[at:], strict=True):
                self.lost.setdefault(each, []).append(ids.get(seq, 0))
            del page.seqs[at:], page.prints[at:]
            if not at:
                del self._pages[first]
        for packet_id in ids.values():
            out[packet_id] = -packet_id

    def find(self, seq: int, envelope: bytes) -> int | None:
        """The packet id under which the client was sent this letter before; 0 if it is not out any more. Else None."""
        ids = self.lost.get(fingerprint(envelope)) if self.lost else None
        if not ids:
            return None
        self.note([seq], [envelope])
        return ids.pop(0)

    def __repr__(self) -> str:
        return f"<Delivered {sum(len(each.seqs) for each in self._pages.values())} lost={len(self.lost)}>"
