"""The tasks of connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import anyio

from rsmq.gateway.connections.counts import Counts

log = logging.getLogger("rsmq.gateway")


class ConnectionTasks:
    """Starts tasks of connections: whatever goes wrong in one ends neither the gateway nor other connections.

    Those that are left at the end of the block are cancelled. A plain task costs a fifth of one in a task group, and a
    client that connects and subscribes needs two.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._tasks = set[asyncio.Task[None]]()

    @property
    def running(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            self._counts["failed: unexpected"] += 1
            log.exception("a connection's task failed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for each in self._tasks:
            each.cancel()
        if self._tasks:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(self._tasks)

    def __repr__(self) -> str:
        return f"<ConnectionTasks {len(self._tasks)}>"
