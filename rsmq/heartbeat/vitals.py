"""Vitals: how late the event loop of this process is, measured from a thread. The one measure of that: the heartbeat
tells it to the server, and the pulse of the telemetry, where it is on, asks more often and looks at the stack."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from rsmq.clock import monotonic


class Vitals:
    """A thread asks the loop for an answer now and then, and looks at the next time how long it took.

    A loop that is blocked does not answer: then the lag is the time it has been asked for so far, and it grows.
    `note` is called in the loop with the seconds that each answer took.
    """

    def __init__(self, note: Callable[[float], None] | None = None) -> None:
        self._note = note
        self._asked_at: float | None = None
        self._lag: float | None = None

    def ask(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """Ask, unless an answer is still awaited."""
        if self._asked_at is None:
            self._asked_at, self._lag = now, None
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        """Runs in the loop."""
        if self._asked_at is not None:
            self._lag, self._asked_at = monotonic() - self._asked_at, None
            if self._note is not None:
                self._note(self._lag)

    def waited(self, now: float) -> float:
        """Seconds for which an answer is awaited; 0 if none is."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, now - asked_at)

    def lag(self, now: float) -> float | None:
        """Seconds; None before the first answer was asked for."""
        asked_at = self._asked_at
        return self._lag if asked_at is None else now - asked_at

    def report(self, now: float) -> str:
        """As it stands in the server."""
        lag = self.lag(now)
        return json.dumps({} if lag is None else {"loop_lag_ms": round(lag * 1000, 3)})

    def __repr__(self) -> str:
        return f"<Vitals lag={self.lag(monotonic())}>"
