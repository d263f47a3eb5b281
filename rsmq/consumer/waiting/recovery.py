"""How far a lane has taken over what was delivered before, and what it must still ask the server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from rsmq.model.clock import monotonic
from rsmq.model.stream_id import parse_stream_id

START: Final = b"0-0"
LONGEST_LOOK: Final = 10.0
"""Seconds between two looks at parked messages: so late is it seen that the server's clock was set back."""


class Recovery:
    """The recovery of one lane.

    While `cursor` is not None, pending messages are taken over and nothing new is read. `newest_held` is the newest
    entry that this member has received; None until everything that may have been delivered before is taken over.
    `undelivered` are ids in flight that the server does not know as delivered: it has lost writes, and may use them
    again. `untimed` are parked messages that were taken over behind an earlier one of their key: no timer starts them,
    so the server is asked whether they are due.

    `claims` counts claims and calls for due retries on their way. `retry_at` (monotonic) is when to look for due
    retries, without key order. Shared distribution: a search for abandoned messages goes on at `idle_cursor`, not
    before `search_at` (monotonic); the server's clock is `clock_offset` seconds ahead of the monotonic one.
    """

    __slots__ = (
        "_is_unsure_of_retries", "_restarts", "claims", "clock_offset", "cursor", "idle_cursor", "newest_held",
        "retry_at", "search_at", "undelivered", "untimed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.cursor: bytes | None = START
        self._restarts = 0
        self.newest_held: bytes | None = None
        self.undelivered: set[bytes] = set()
        self.untimed: set[bytes] = set()
        self.claims = 0
        self.retry_at = 0.0
        self._is_unsure_of_retries = False  # a call for due retries has no reply: it may still come to the server
        self.idle_cursor = START
        self.search_at = 0.0
        self.clock_offset: float | None = None

    # -- taking over ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether everything pending is taken over."""
        return self.cursor is None

    @property
    def number(self) -> int:
        """Of this recovery: a reply to an older one must not move the cursor."""
        return self._restarts

    def restart(self, *, is_ours: bool = False) -> None:
        """Take over everything pending from the start, even if a page of a recovery is on its way.

        `is_ours`: all of it was delivered to this member. Otherwise other members may have started some of it, so none
        of it counts as unseen.
        """
        self.cursor = START
        self._restarts += 1
        if not is_ours:
            self.newest_held = None

    def advance(self, cursor: bytes | None, number: int) -> None:
        """A page of the recovery with this number is taken over; `cursor` is None after the last one."""
        if number == self._restarts:
            self.cursor = cursor
        if self.cursor is None and self.newest_held is None:
            self.newest_held = START

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """A call is on its way that makes messages pending for this member."""
        self.claims += 1
        try:
            yield
        finally:
            self.claims -= 1

    # -- what this member has received ----------------------------------------------------------------------------

    def receive(self, newest: bytes) -> None:
        """A read has brought entries up to this one. Before everything is taken over, others' messages may have been
        ours in a reply that was lost."""
        if self.newest_held is not None:
            self.newest_held = newest

    def find_unseen(self, entry_id: bytes) -> None:
        """An entry of a lost reply is received after all."""
        self.newest_held = entry_id

    def is_unseen(self, entry_id: bytes) -> bool:
        """Whether an entry was delivered to this member in a reply that got lost.

        Reads come in order, so such an entry is newer than all that arrived.
        """
        return self.newest_held is not None and parse_stream_id(entry_id) > parse_stream_id(self.newest_held)

    def lose_writes(self, undelivered: Collection[bytes]) -> None:
        """The server does not know these as delivered."""
        self.undelivered.update(undelivered)

    def wait_untimed(self, entry_id: bytes) -> None:
        """A message whose retry is not due waits for an earlier one of its key, and starts behind it."""
        self.untimed.add(entry_id)

    def end_untimed(self, entry_ids: Iterable[bytes]) -> None:
        """The server has said whether these are due."""
        self.untimed.difference_update(entry_ids)

    # -- due retries ----------------------------------------------------------------------------------------------

    def look_for_retries(self, seconds: float) -> None:
        """Look for retries after so many seconds, or earlier."""
        self.retry_at = min(self.retry_at, monotonic() + min(seconds, LONGEST_LOOK))

    def ask_for_retries(self) -> None:
        """A call asks for them now. A message that is parked meanwhile may set an earlier time."""
        self.retry_at = float("inf")

    def retries_unanswered(self) -> None:
        """Some may be delivered to this member: out of order, and after an attempt."""
        self._is_unsure_of_retries = True
        self.retry_at = 0.0
        self.restart()

    def retries_answered(self) -> None:
        """An unanswered call may have come after the recovery that it began. Now it cannot come any more."""
        if self._is_unsure_of_retries:
            self._is_unsure_of_retries = False
            self.restart()

    # -- shared distribution --------------------------------------------------------------------------------------

    def searched(self, cursor: bytes | None) -> None:
        """A page was searched for abandoned messages; None: it was the last one."""
        self.idle_cursor = cursor or START

    def set_clock(self, offset: float) -> bool:
        """The server's clock is so many seconds ahead of the monotonic one. True: it was not known before."""
        is_first = self.clock_offset is None
        self.clock_offset = offset
        return is_first

    def rest(self, seconds: float) -> None:
        """Search no more for so many seconds."""
        self.search_at = monotonic() + seconds

    def __repr__(self) -> str:
        return f"<Recovery at={self.cursor!r} undelivered={len(self.undelivered)}>"
