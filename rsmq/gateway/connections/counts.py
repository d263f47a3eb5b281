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
        self.held = Counter[str]()
        """Clients whose letters wait, by what these need, such as `key k7`."""

    def dropped(self, reason: str, number: int = 1) -> None:
        """Messages that a client does not get."""
        self[f"dropped: {reason}"] += number

    def hold(self, before: str, needs: str, client: str) -> None:
        """The letters of a client wait for what they need; both texts may be empty."""
        if before:
            self.held[before] -= 1
        if needs:
            self.held[needs] += 1
            self.warn(
                "letters wait",
                f"those of client {client} need the {needs}, which this gateway does not have: give it to its broker "
                f"(codecs=[...], RSMQ_KEYS) and restart it",
            )
        self.held += Counter()  # without those that are 0

    def refused(self, limit: str, text: str) -> None:
        """A client that is sent away; `text` says which, and why."""
        self[f"refused: {limit}"] += 1
        self.warn(f"clients are refused, {limit}", text)

    def warn(self, kind: str, error: object) -> None:
        """Log `<kind>: <error>`, the same kind once in ten seconds."""
        self._log.warn(kind, error)
