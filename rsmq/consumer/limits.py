"""Limits on how many messages of a handler may start: by rate, and by calls at once over the whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from rsmq.handler.rate_limit import Rate, Window
from rsmq.heartbeat.assignment import quotas
from rsmq.model.clock import monotonic

SHORTEST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 1.0
"""Seconds: when members leave, the share of the others grows before the window opens."""


@lru_cache(maxsize=64)  # asked for each message, changed by a join or leave
def call_quotas(limit: int, members: Sequence[str], salt: str) -> dict[str, int]:
    """How many calls at once each member may make: their sum is the limit, and every member computes the same.

    Equal up to one. With more members than the limit some have none: they must own no partition either.
    """
    return quotas(limit, dict.fromkeys(members, 1.0), f"{salt}/calls")


class RateLimit:
    """This member's share of a handler's rate. Once it is used up, a timer calls `on_open` when there is room."""

    def __init__(self, rate: Rate, members: Callable[[], int], on_open: Callable[[], Any]) -> None:
        self._rate, self._members, self._on_open = rate, members, on_open
        self._window = Window()
        self._timer: asyncio.TimerHandle | None = None

    def room(self) -> int:
        """How many messages may start now."""
        now, share = monotonic(), self._rate.share(self._members())
        room = self._window.room(now, *share)
        if room == 0 and self._timer is None:
            pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._window.wait(now, *share)))
            self._timer = asyncio.get_running_loop().call_later(pause, self._open)
        return room

    def _open(self) -> None:
        self._timer = None
        self._on_open()

    def start(self) -> None:
        """A message starts now."""
        self._window.note(monotonic())

    def __repr__(self) -> str:
        return f"<RateLimit {self._window!r}>"


class ConcurrencyLimit:
    """This member's quota of the calls that the group may run at once.

    A task of the pool counts from its first message until it calls `leave`. In between it may start further messages,
    so the pool need not wake another task. When the quota grows, the pool must be woken.
    """

    def __init__(self, quota: Callable[[], int]) -> None:
        self._quota = quota
        self._tasks: set[asyncio.Task[Any] | None] = set()

    def room(self) -> int:
        """How many further tasks may start a message now."""
        return max(0, self._quota() - len(self._tasks))

    def admits(self) -> bool:
        """Whether the calling task may start a message now. One that counts already may not after the quota shrank."""
        return len(self._tasks) - (asyncio.current_task() in self._tasks) < self._quota()

    def enter(self) -> None:
        """The calling task starts a message."""
        self._tasks.add(asyncio.current_task())

    def leave(self) -> None:
        """The calling task starts nothing more for now."""
        self._tasks.discard(asyncio.current_task())

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {len(self._tasks)} of {self._quota()} calls>"
