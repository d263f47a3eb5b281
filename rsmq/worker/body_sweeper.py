"""The sweep of the store of bodies: by one worker, now and then."""

from __future__ import annotations

import logging
import random
from datetime import timedelta
from typing import Final

import anyio.abc

from rsmq.control.bodies import Bodies
from rsmq.model.body import Offloading
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.words import count
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics
from rsmq.worker.rounds import each_round

log = logging.getLogger("rsmq.bodies")

BETWEEN: Final = timedelta(minutes=30)
"""Between two sweeps, each of which reads what is stored of the topics with old bodies."""
LOOK: Final = 60.0
"""Seconds between two looks whether it is time."""


class BodySweeper:
    """Deletes bodies that no entry names. The worker that sets a key that ends after `between` sweeps; if it dies, the
    next one sweeps after that. A sweep beside another one does no harm."""

    def __init__(self, client: Client, keys: Keys, topics: Topics, offload: Offloading) -> None:
        self._client = client
        self._keys = keys
        self._bodies = Bodies(client, keys, topics, offload)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        await each_round(self._look, lambda: LOOK * random.uniform(0.5, 1.5), log, "the sweep of bodies waits")

    async def _look(self) -> None:
        if await self._client.execute_command("SET", self._keys.sweep, "", "NX", "PX", to_ms(BETWEEN)):
            await self.sweep()

    async def sweep(self) -> int:
        """One sweep; returns how many bodies were deleted."""
        removed = sum(each.removed for each in await self._bodies.sweep())
        if removed:
            log.info("deleted %s that no entry names", count(removed, "body", "bodies"))
        return removed

    def __repr__(self) -> str:
        return f"<BodySweeper {self._bodies!r}>"
