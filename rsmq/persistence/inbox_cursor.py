"""How far one connection has read its inbox, and which letters are out. Pure: no server, no task, no clock.

Sessions of devices and connections of MQTT clients read by this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from rsmq.model.record import exact_text, whole
from rsmq.persistence.letter import PACKET_IDS

LARGEST_WINDOW: Final = 32_767
"""Half of all packet ids: a new letter finds a free one even if the other half is held (QoS 2)."""
MOST_PER_PAGE: Final = 200
PAGE_BYTES: Final = 1 << 20
"""A page ends when it has so many bytes: about 2 ms of the server's time."""
START: Final = "0"
"""The position before the first letter: seqs begin at 1."""


class Blocked(NamedTuple):
    """A letter that cannot be passed on: an older one, gone from the inbox, has its packet id until it is
    acknowledged."""

    seq: int
    packet_id: int


class PushedLetter(NamedTuple):
    """A letter that has come along with a ring. `before`: the seq before its own. `name`: what `add_letters` has noted
    of it, which no other letter has."""

    before: int
    seq: bytes
    name: str
    envelope: bytes

    def __repr__(self) -> str:
        return f"<PushedLetter {self.name}>"


def read_pushed(raw: bytes, gateway: str, epoch: str) -> PushedLetter | None:
    """What came along with a ring of the doorbell; None if it is no letter for this connection.

    A connection of the same client in another database may have the same epoch, but not to the same gateway.
    """
    own = f"{gateway} {epoch}:".encode()
    if not raw.startswith(own):
        return None
    parts = raw[len(own) - 1 :].split(b":", 4)
    if len(parts) != 5:
        return None
    before, seq, call = whole(parts[1]), whole(parts[2]), exact_text(parts[3])
    if before is None or seq is None or seq <= before or call is None or not parts[4]:
        return None
    return PushedLetter(before, parts[2], f"{parts[2].decode()}:{call}", parts[4])


class InboxCursor:
    """The position in an inbox. Letters are passed on once, in order, while fewer than `window` are out.

    Invariant: `at` is behind every letter that was passed on, and before every letter that was not. What is not
    known is None, never a value that a letter, a seq or a packet id may have.
    """

    __slots__ = ("at", "blocked", "is_drained", "is_held", "is_paused", "named", "out", "rings", "sent", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.at = START
        """The position behind which the next page begins."""
        self.sent = 0
        """The seq up to which earlier connections have sent letters."""
        self.out: dict[int, int] = {}
        """Seqs by packet id: passed on, and not acknowledged. A negative seq: the server has lost the letter."""
        self.blocked: Blocked | None = None
        self.is_drained = False
        """The last page was the end of the inbox, and nothing has rung since it was asked for."""
        self.is_paused = False
        """The client does not read."""
        self.is_held = False
        """The next letter cannot be passed on: a poll looks whether it is still there."""
        self.named = ""
        """The letter that was taken from a ring, until the server knows it: each call names it."""
        self.rings = 0
        """How often the doorbell has rung."""

    def open(self, sent: int, at: bytes) -> None:
        """Begin where the server says."""
        self.sent = sent
        self.at = at.decode()

    def ring(self) -> None:
        """There may be a new letter, or another connection of the device."""
        self.rings += 1
        self.is_drained = False

    @property
    def room(self) -> int:
        """How many letters the next page may have. 0 or less: none."""
        is_stopped = self.is_paused or self.is_held or self.blocked is not None
        return 0 if is_stopped else self.window - len(self.out)

    @property
    def page_size(self) -> int:
        """`room`, within what one page may have. Of letters that are held, the first one."""
        if self.is_held and not self.is_paused and self.blocked is None and len(self.out) < self.window:
            return 1
        return min(max(self.room, 0), MOST_PER_PAGE)

    def take(
        self, reply: Sequence[Any], rings: int, is_known: Callable[[int, bytes], bool] | None = None
    ) -> tuple[list[int], list[bytes]]:
        """Take a page: `page_letters` has answered. Returns the seqs and envelopes to pass on.

        `rings`: as of when it was asked for. `is_known` says of a letter that the client was sent it before. An
        envelope that is empty belongs to a letter that was received before (QoS 2).
        """
        out = self.out
        self.is_held = False
        if is_known is None:
            seqs = [*map(int, reply[3::2])]
            packet_ids = [(seq - 1) % PACKET_IDS + 1 for seq in seqs]
            if out.keys().isdisjoint(packet_ids) and len(set(packet_ids)) == len(seqs):
                out.update(zip(packet_ids, seqs, strict=True))
                self._go_on(reply, rings)
                return seqs, [*reply[4::2]]
        seqs, taken, last = list[int](), list[bytes](), None
        for ref, envelope in zip(reply[3::2], reply[4::2], strict=True):
            seq = int(ref)
            if is_known is None or not is_known(seq, envelope):
                packet_id = (seq - 1) % PACKET_IDS + 1  # packet_id_of, which takes twice as long
                if packet_id in out:
                    self.blocked = Blocked(seq, packet_id)
                    self.is_drained = False
                    if last is not None:
                        self.at = last.decode()
                    return seqs, taken
                out[packet_id] = seq
                seqs.append(seq)
                taken.append(envelope)
            last = ref
        self._go_on(reply, rings)
        return seqs, taken

    def _go_on(self, reply: Sequence[Any], rings: int) -> None:
        """Behind a page that was taken whole."""
        self.at = reply[1].decode()
        self.is_drained = bool(int(reply[2])) and self.rings == rings

    def take_pushed(
        self, pushed: PushedLetter, is_known: Callable[[int, bytes], bool] | None = None
    ) -> tuple[list[int], list[bytes]] | None:
        """Take a letter that came along with a ring, as `take` does. None: a page reads it, because it is not the next
        one, or there is no room for it now."""
        if not self.is_drained or self.at != str(pushed.before) or self.room <= 0:
            return None
        self.named = pushed.name
        return self.take((b"OK", pushed.seq, 1, pushed.seq, pushed.envelope), self.rings, is_known)

    def knows(self, named: str) -> None:
        """The server has answered a call that named this letter."""
        if self.named == named:
            self.named = ""

    def put_back(self, seqs: Sequence[int]) -> None:
        """The last of the letters that were taken cannot be passed on yet: they come again, in order."""
        for seq in seqs:
            self.out.pop((seq - 1) % PACKET_IDS + 1, None)
        self.at = str(seqs[0] - 1)
        self.is_drained = False
        self.is_held = True

    def free(self, packet_ids: Sequence[int]) -> list[int]:
        """The client has these letters. Returns their seqs, without those that are not out or that the server lost."""
        pop = self.out.pop
        seqs = [seq for packet_id in packet_ids if (seq := pop(packet_id, 0)) > 0]
        if self.blocked is not None and self.blocked.packet_id in packet_ids:
            self.blocked = None
        return seqs

    def rewind(self, kept: int) -> None:
        """The server has lost every letter above `kept`: go on behind that one."""
        self.at = str(kept)
        self.is_drained = False
        self.named = ""

    def __repr__(self) -> str:
        return f"<InboxCursor at={self.at} out={len(self.out)}{f' {self.blocked}' if self.blocked else ''}>"
