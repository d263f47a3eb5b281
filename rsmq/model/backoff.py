"""How long to wait before the next attempt: the one back-off of every role that retries by itself."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DOUBLINGS = 60
"""Enough for any limit. A float overflows after 1 023."""


@dataclass(slots=True)
class Backoff:
    """A pause in seconds that doubles with each failure in a row, from `first` up to `longest`."""

    first: float
    longest: float
    failures: int = 0

    def next(self) -> float:
        """Count a failure and return the pause before the next attempt."""
        pause = self.first * 2.0 ** min(self.failures, MOST_DOUBLINGS)
        self.failures += 1
        return min(self.longest, pause)

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first again."""
        self.failures = 0
