"""The counters of a gateway, by name."""

from __future__ import annotations

import logging
from collections import Counter

from rsmq.model.log_throttle import ThrottledLog

log = logging.getLogger("rsmq.gateway")


class Counts(Counter[str]):
    """Every drop and every refusal is in it. What clients do again and again is logged now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._log = ThrottledLog(log)

    def dropped(self, reason: str, number: int = 1) -> None:
        """Messages that a client does not get."""
        self[f"dropped: {reason}"] += number

    def refused(self, limit: str, text: str) -> None:
        """A client that is sent away; `text` says which, and why."""
        self[f"refused: {limit}"] += 1
        self.warn(f"clients are refused, {limit}", text)

    def warn(self, kind: str, error: object) -> None:
        """Log `<kind>: <error>`, the same kind once in ten seconds."""
        self._log.warn(kind, error)
