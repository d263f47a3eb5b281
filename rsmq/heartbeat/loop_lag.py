"""Loop lag: how late the event loop of this process is, measured from a thread.

The heartbeat writes it to the server. The loop monitor of the telemetry, where it is on, measures more often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rsmq.model.clock import awake


class LoopLag:
    """A thread schedules a callback in the loop and reads later how long the callback took to run.

    While the loop is blocked, the lag is the time since the callback was scheduled, so it grows.
    `note` is called in the loop with the lag in seconds of each callback.
    """

    def __init__(self, note: Callable[[float], None] | None = None) -> None:
        self._note = note
        self._asked_at: float | None = None
        self._lag: float | None = None

    def ask(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """Schedule a callback, unless one is still pending."""
        if self._asked_at is None:
            self._asked_at = now
            self._lag = None
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        """Runs in the loop."""
        if self._asked_at is not None:
            self._lag = awake() - self._asked_at
            self._asked_at = None
            if self._note is not None:
                self._note(self._lag)

    def waited(self, now: float) -> float:
        """Seconds since the pending callback was scheduled; 0 without one."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, now - asked_at)

    def lag(self, now: float) -> float | None:
        """Seconds; None before the first callback was scheduled."""
        asked_at = self._asked_at
        return self._lag if asked_at is None else now - asked_at

    def report(self, now: float) -> dict[str, float]:
        """The text that is stored in the server."""
        lag = self.lag(now)
        return {} if lag is None else {"loop_lag_ms": round(lag * 1000, 3)}

    def __repr__(self) -> str:
        return f"<LoopLag {self.lag(awake())}>"
