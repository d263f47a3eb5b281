"""Complaints: what does not work is said when it begins, and now and then while it lasts; not each time it is tried."""

from __future__ import annotations

import logging
from typing import Final

from rsmq.clock import monotonic

SILENCE: Final = 10.0
"""Seconds before the same is said again."""


class Complaints:
    """Warnings of one role. Each kind is a warning once in ten seconds, in between it goes to the debug log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, float] = {}

    def say(self, kind: str, error: object) -> None:
        """`<kind>: <error>`."""
        now = monotonic()
        if now - self._said.get(kind, float("-inf")) >= SILENCE:
            self._said[kind] = now
            self._log.warning("%s: %s", kind, error)
        else:
            self._log.debug("%s: %s", kind, error)
