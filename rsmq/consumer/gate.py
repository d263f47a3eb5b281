"""The gate of a handler with a rate limit: what is ready, as far as it may start now."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from rsmq.clock import monotonic
from rsmq.message import Message
from rsmq.rate import Rate, Window

SHORTEST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 1.0
"""Seconds: when members leave, the share of the others grows before the window opens."""


class Gate(deque[Message]):
    """The line of messages that are ready to start, as long as the rate allows: its length is what may start now.

    Whoever takes from it finds it empty when the limit is reached, and is called by `on_open` when there is room again.
    What waits here holds its key, is in hand, and is withdrawn like everything else that has not started.
    """

    def __init__(self, rate: Rate, members: Callable[[], int], on_open: Callable[[], Any]) -> None:
        super().__init__()
        self._rate, self._members, self._on_open = rate, members, on_open
        self._window = Window()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many are in the line, whether they may start or not."""
        return super().__len__()

    def __len__(self) -> int:
        waiting = super().__len__()
        if waiting == 0:
            return 0
        now, share = monotonic(), self._rate.share(self._members())
        room = self._window.room(now, *share)
        if room == 0 and self._timer is None:
            pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._window.wait(now, *share)))
            self._timer = asyncio.get_running_loop().call_later(pause, self._open)
        return min(room, waiting)

    def __bool__(self) -> bool:
        return len(self) > 0

    def _open(self) -> None:
        self._timer = None
        self._on_open()

    def popleft(self) -> Message:
        """The next one, which starts now."""
        self._window.note(monotonic())
        return super().popleft()

    def __repr__(self) -> str:
        return f"<Gate {self.waiting} waiting, {self._window!r}>"
