"""Opens the bands, and finishes the resizes, that were begun: as soon as every live member knows the partitions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import anyio
import anyio.abc

from rsmq.consumer.consumer import Consumer
from rsmq.errors import BrokerError, ConfigError
from rsmq.redis.layouts import describe_unaware
from rsmq.redis.topics import Topics, set_lost_seals

log = logging.getLogger("rsmq.topics")

INTERVAL: Final = 1.0
SEALS_EVERY: Final = 10
"""Looks between two checks of seals."""
PATIENCE: Final = 10
"""Looks after which the log says who is waited for: a heartbeat that has ended takes a moment to expire."""


class BandOpener:
    """Serves the topics whose partition 0 this process reads. It asks the server only while a band waits: the
    process that has added it may have died since; and on a cluster whether the partitions that were sealed are so: a
    failover of their node may have lost that."""

    def __init__(self, topics: Topics, consumers: Sequence[Consumer]) -> None:
        self._topics = topics
        self._consumers = consumers
        self._looks = dict[str, int]()
        self._rounds = 0

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Errors end here: the next round tries it again."""
        task_status.started()
        while True:
            await anyio.sleep(INTERVAL)
            try:
                await self.look()
                self._rounds += 1
                if self._rounds % SEALS_EVERY == 0:
                    await self.check_seals()
            except (BrokerError, ConfigError) as error:
                log.debug("bands wait to be opened: %s", error)

    async def look(self) -> None:
        """One round."""
        waiting = {each.topic.name for each in self._consumers if each.topic.layout.waits and 0 in each.lanes}
        self._looks = {name: self._looks.get(name, 0) + 1 for name in waiting}
        for name in sorted(waiting):
            if any(each.topic.layout.following for each in self._consumers if each.topic.name == name):
                await self._resize(name)
                continue
            unaware = await self._topics.open_bands(name)
            if not unaware:
                log.info("topic %s: its bands are open", name)
                await self._follow(name)
            elif self._looks[name] == PATIENCE:
                log.warning(
                    "topic %s has a band that is not open yet: %s must be started again with a version of rsmq that "
                    "knows bands; until then its messages go to the band normal", name, describe_unaware(unaware),
                )  # fmt: skip

    async def check_seals(self) -> None:
        """Seal again what is not sealed any more. A publisher that knew the old partitions may have used them."""
        for topic in {each.topic.name: each.topic for each in self._consumers if 0 in each.lanes}.values():
            await set_lost_seals(self._topics, topic)

    async def _resize(self, name: str) -> None:
        """Finish a resize, or say what it waits for."""
        waits_for = await self._topics.go_on_with_resize(name)
        if not waits_for:
            await self._follow(name)
        elif self._looks[name] == PATIENCE:
            log.warning(
                "topic %s is not resized yet: it waits for %s. `rsmq topic resize %s --abort` gives it up", name,
                waits_for, name,
            )  # fmt: skip

    async def _follow(self, name: str) -> None:
        for consumer in self._consumers:
            if consumer.topic.name == name:
                await consumer.follow()

    def __repr__(self) -> str:
        return f"<BandOpener {sorted(self._looks)}>"
