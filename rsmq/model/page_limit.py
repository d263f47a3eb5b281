"""How much to ask for at once, where an answer may be larger than what stands between us and the server allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rsmq.errors import BrokerUnavailable
from rsmq.model.clock import monotonic
from rsmq.model.log_throttle import ThrottledLog

log = logging.getLogger("rsmq.connect")

SHORT: Final = 1.0
"""Seconds between two growths, as long as nothing shows that a larger page breaks."""
FIRST_HOLD: Final = 30.0
LONGEST_HOLD: Final = 600.0
"""Seconds before a size is tried again that broke right after smaller pages had come; twice as long each time."""
LEAST: Final = 2.0**-24
IN_A_ROW: Final = 2
"""Breaks from which on a limit is suspected: one is a restart, or a network that was gone for a moment."""


class PageLimit:
    """What part of its usual size a page may have.

    A server closes the connection of a client whose answers pass `client-output-buffer-limit`, and a proxy may do so,
    too. The same page asked for again would break again, for ever. So the next one is half as large, down to a single
    entry. Pages grow again: soon after breaks that a restart may have caused, slowly where the larger page breaks.
    """

    __slots__ = ("_breaks", "_clock", "_grow_at", "_has_grown", "_hold", "_throttled", "part")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._throttled = ThrottledLog(log)
        self._breaks = 0
        self._hold = FIRST_HOLD
        self._grow_at = 0.0
        self._has_grown = False
        self.part = 1.0

    def of(self, most: int) -> int:
        """How much of `most` to ask for, at least 1."""
        return max(1, int(most * self.part))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a question whose answer is a page, of the size that `of` says."""
        part = self.part
        try:
            yield
        except BrokerUnavailable as error:
            if error.is_broken:
                self.broke(part, error)
            raise
        self.came()

    def broke(self, part: float, error: object) -> None:
        """An answer of this part did not come. Answers that were asked for together count once."""
        if part != self.part:
            return
        self.part = max(LEAST, part / 2)
        self._breaks += 1
        pause = SHORT
        if self._has_grown:  # smaller pages have come just now
            self._has_grown = False
            self._breaks = max(self._breaks, IN_A_ROW)
            pause = self._hold
            self._hold = min(LONGEST_HOLD, 2 * self._hold)
        self._grow_at = self._clock() + pause
        if self._breaks >= IN_A_ROW:
            self._throttled.warn(
                "answers of the server break off, so pages become smaller. If it is up, it closes connections whose "
                "answers pass its client-output-buffer-limit (`CONFIG GET client-output-buffer-limit`, class normal), "
                "or a proxy does so by a limit of its own: raise it",
                error,
            )

    def came(self) -> None:
        """An answer came."""
        self._breaks = 0
        if (self.part < 1 or self._has_grown) and self._clock() >= self._grow_at:
            self._grow()

    def _grow(self) -> None:
        self._has_grown = self.part < 1
        if not self._has_grown:
            self._hold = FIRST_HOLD
        self.part = min(1.0, 2 * self.part)
        self._grow_at = self._clock() + SHORT

    def __repr__(self) -> str:
        return f"<PageLimit {self.part:g}>"
