"""Repeated warnings: logged when a problem begins and every ten seconds while it lasts, not at each retry."""

from __future__ import annotations

import logging
from typing import Final

from rsmq.model.clock import monotonic

SILENCE: Final = 10.0
"""Seconds before the same kind of warning is logged again."""


MOST_KINDS: Final = 10_000
"""Kinds that are remembered; then all are forgotten, and each is logged again."""


class ThrottledLog:
    """The warnings of one role. In between, the same kind goes to the debug log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged_at: dict[str, float] = {}

    def warn(self, kind: str, error: object) -> None:
        """Log `<kind>: <error>`."""
        self._log.log(logging.WARNING if self._is_due(kind) else logging.DEBUG, "%s: %s", kind, error)

    def info(self, kind: str, text: object) -> None:
        """The same for what is no trouble once, such as a client that connects elsewhere."""
        self._log.log(logging.INFO if self._is_due(kind) else logging.DEBUG, "%s: %s", kind, text)

    def _is_due(self, kind: str) -> bool:
        now = monotonic()
        if now - self._logged_at.get(kind, float("-inf")) < SILENCE:
            return False
        if len(self._logged_at) >= MOST_KINDS:
            self._logged_at.clear()
        self._logged_at[kind] = now
        return True
