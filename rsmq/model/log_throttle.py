"""Repeated warnings: logged when a problem begins and every ten seconds while it lasts, not at each retry."""

from __future__ import annotations

import logging
from typing import Final

from rsmq.model.clock import monotonic

SILENCE: Final = 10.0
"""Seconds before the same kind of warning is logged again."""


class ThrottledLog:
    """The warnings of one role. In between, the same kind goes to the debug log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged_at: dict[str, float] = {}

    def warn(self, kind: str, error: object) -> None:
        """Log `<kind>: <error>`."""
        now = monotonic()
        if now - self._logged_at.get(kind, float("-inf")) >= SILENCE:
            self._logged_at[kind] = now
            self._log.warning("%s: %s", kind, error)
        else:
            self._log.debug("%s: %s", kind, error)
