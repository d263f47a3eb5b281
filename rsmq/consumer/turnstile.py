"""The turnstile of a handler whose group has a limit of its own: so many calls at once over all of its members."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from rsmq.consumer.gate import Gate
from rsmq.heartbeat.assignment import quotas
from rsmq.message import Message


@lru_cache(maxsize=64)  # asked for each message, changed by a join or leave
def shares(limit: int, members: Sequence[str], salt: str) -> dict[str, int]:
    """How many calls at once each member may make: their sum is the limit, and every member computes the same.

    Equal up to one. With more members than the limit some have none: they must own no partition either.
    """
    return quotas(limit, dict.fromkeys(members, 1.0), f"{salt}/calls")


class Turnstile(deque[Message]):
    """The line of messages that are ready to start, as long as fewer calls run than this member's share.

    Whoever takes from it is a task of the pool, and holds a place of the share until it finds the line closed or empty
    and calls `leave`. It may take the next one without leaving: nobody has to be woken for that. When the share grows,
    somebody must wake the pool.
    """

    def __init__(self, share: Callable[[], int], *rest: Any) -> None:
        super().__init__(*rest)
        self._share = share
        self._holders: set[asyncio.Task[Any] | None] = set()

    @property
    def waiting(self) -> int:
        """How many are in the line, whether they may start or not."""
        return deque.__len__(self)

    def __len__(self) -> int:
        return max(0, min(super().__len__(), self._share() - len(self._holders)))

    def __bool__(self) -> bool:
        if super().__len__() == 0:
            return False
        is_inside = asyncio.current_task() in self._holders
        return len(self._holders) - is_inside < self._share()

    def popleft(self) -> Message:
        """The next one, which starts now."""
        self._holders.add(asyncio.current_task())
        return super().popleft()

    def leave(self) -> None:
        """The calling task starts nothing more for now."""
        self._holders.discard(asyncio.current_task())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.waiting} waiting, {len(self._holders)} of {self._share()} inside>"


class GatedTurnstile(Turnstile, Gate):
    """Both limits: what the rate lets start, through the turnstile."""
