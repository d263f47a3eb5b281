"""What a session tells the server about letters: gathered while the last call is under way, then sent together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from rsmq.errors import SessionTaken

MOST: Final = 500
"""Seqs in one script call: about 1 ms of the server's time."""


class Settlement:
    """Seqs on their way to one script. At most one call is under way; what comes meanwhile goes with the next one."""

    def __init__(
        self, ask: Callable[[list[int]], asyncio.Future[Any]], device: str, on_end: Callable[[BaseException], None]
    ) -> None:
        self._ask, self._device, self._on_end = ask, device, on_end
        self._pending: list[int] = []
        self._flying: asyncio.Future[Any] | None = None
        self._is_scheduled = False

    def add(self, seq: int) -> None:
        """Take one. It sets out when the event loop comes round, together with what is added until then."""
        self._pending.append(seq)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._due)

    def _due(self) -> None:
        self._is_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send what is pending now, unless a call is under way."""
        if self._pending and self._flying is None:
            taken, self._pending = self._pending[:MOST], self._pending[MOST:]
            self._flying = self._ask(taken)
            self._flying.add_done_callback(self._arrived)

    def _arrived(self, answer: asyncio.Future[Any]) -> None:
        self._flying = None
        error = None if answer.cancelled() else answer.exception()
        if error is None and not answer.cancelled() and answer.result()[0] != b"OK":
            error = SessionTaken(self._device)
        if error is not None:
            self._pending.clear()
            self._on_end(error)
        self.flush()

    async def settled(self) -> None:
        """Wait until nothing is pending or under way."""
        self.flush()
        while self._flying is not None:
            await asyncio.wait([self._flying])

    def __repr__(self) -> str:
        return f"<Settlement pending={len(self._pending)}{' flying' if self._flying else ''}>"
