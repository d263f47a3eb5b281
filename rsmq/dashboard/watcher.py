"""Looks at the queues for all pages together, and only while somebody looks at a page."""

from __future__ import annotations

import logging
from collections import deque
from datetime import UTC, datetime
from typing import Final, NamedTuple

import anyio
import anyio.abc

from rsmq.clock import monotonic
from rsmq.errors import BrokerError
from rsmq.observer import Observer
from rsmq.snapshot import Snapshot
from rsmq.trend import Board, compare

log = logging.getLogger("rsmq.dashboard")

EVERY: Final = 1.0
"""Seconds between two looks."""
PATIENCE: Final = 10.0
"""Seconds without a viewer after which it stops to look."""
KEPT: Final = 180


class Moment(NamedTuple):
    """A board and when it was."""

    at: datetime
    board: Board


class Watcher:
    """The newest `KEPT` boards. However many pages are open, the server is asked once a second."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._before: Snapshot | None = None
        self._seen_at = 0.0
        self._wanted = anyio.Event()
        self.moments: deque[Moment] = deque(maxlen=KEPT)
        self.trouble = ""

    @property
    def board(self) -> Board:
        """The newest."""
        return self.moments[-1].board if self.moments else Board(None, (), ())

    def touch(self) -> None:
        """Somebody is looking."""
        self._seen_at = monotonic()
        self._wanted.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Look until cancelled. An outage is shown on the pages: this is the boundary where errors end."""
        task_status.started()
        while True:
            if monotonic() - self._seen_at > PATIENCE:
                self._wanted, self._before = anyio.Event(), None
                await self._wanted.wait()
            try:
                await self.look()
            except BrokerError as error:
                if not self.trouble:
                    log.warning("the queues cannot be seen: %s", error)
                self.trouble = str(error)
            except Exception as error:
                log.exception("the watcher met a defect")
                self.trouble = f"{type(error).__name__}: {error}"
            await anyio.sleep(EVERY)

    async def look(self) -> None:
        """Once."""
        after = await self._observer.look()
        self.moments.append(Moment(datetime.now(UTC), compare(self._before, after)))
        self._before, self.trouble = after, ""

    def __repr__(self) -> str:
        return f"<Watcher moments={len(self.moments)}>"
