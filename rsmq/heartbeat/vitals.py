"""Vitals: how late the event loop of this process is, measured from outside it."""

from __future__ import annotations

import asyncio
import json

from rsmq.clock import monotonic


class Vitals:
    """The thread of the heartbeat asks the loop for an answer at each beat, and looks at the next how long it took.

    A loop that is blocked does not answer: then the lag is the time it has been asked for so far, and it grows.
    """

    def __init__(self) -> None:
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
