"""How fast a task writes: as fast as it goes, or so many messages a second."""

from __future__ import annotations

import time
from typing import Final

MOST_AT_ONCE: Final = 500
STEPS_A_SECOND: Final = 4
"""At a rate, what is sent at once is small: messages come evenly, not in bursts."""
MAKE_UP_SECONDS: Final = 1.0
"""Time in which nothing came is made up for, up to this much."""


class Pace:
    """`wait` before something is sent, `spend` what was stored. `rate` in messages a second; None: no limit.

    What had been stored before costs nothing: a job that is run again is soon where it was.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = time.monotonic()
        self.most = MOST_AT_ONCE if rate is None else max(1, min(MOST_AT_ONCE, round(rate / STEPS_A_SECOND)))

    def wait(self) -> None:
        """Until the next may be sent."""
        if self._rate is not None:
            time.sleep(max(0.0, self._due - time.monotonic()))

    def spend(self, count: int) -> None:
        """So many have been stored."""
        if self._rate is not None:
            self._due = max(self._due, time.monotonic() - MAKE_UP_SECONDS) + count / self._rate
