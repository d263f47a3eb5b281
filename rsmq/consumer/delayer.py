"""The delayer: moves delayed messages into their streams when they are due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.abc
from redis.exceptions import NoScriptError

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.fleet import Fleet
from rsmq.keys import Keys
from rsmq.script import RELEASE_DELAYED
from rsmq.settings import Settings
from rsmq.wire import pack

log = logging.getLogger("rsmq.delay")

MOST_AT_ONCE: Final = 200
LONGEST_PAUSE: Final = 1.0
PAGE: Final = 32
"""Partitions asked for with one command."""

Place = tuple[str, int]


class Delayer:
    """Looks into the partitions it is told to, every `delay_resolution`, with one write for all of a node; where there
    is one server, only into those of which some neighbour has delayed messages.

    Several delayers may look into the same partition: the script moves each message once. It looks even when nothing
    was scheduled a moment ago, because a message delayed by 200 ms may arrive at any time.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, partitions: Callable[[], Sequence[Place]]
    ) -> None:
        self._client, self._keys, self._partitions = client, keys, partitions
        self._resolution = settings.delay_resolution.total_seconds()
        self._fleet = Fleet(client)
        self._failures = 0
        self._broken: set[Place] = set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        try:
            while True:
                look_at = monotonic() + self._resolution
                is_more_due = await self._look()
                await asyncio.sleep(0 if is_more_due else max(self._pause(), look_at - monotonic()))
        finally:
            await self.close()

    async def close(self) -> None:
        """Give up the connections; the next look opens them again."""
        await self._fleet.close()

    async def _look(self) -> bool:
        """Move what is due; True if more is. The one boundary of this role: an outage is waited out here."""
        try:
            moved = await self.release(await self._filled(list(self._partitions())))
        except BrokerError as error:
            self._failures += 1
            (log.warning if self._failures == 1 else log.debug)("delayed messages wait: %s", error)
            await self.close()
            return False
        self._failures = 0
        return any(count >= MOST_AT_ONCE for count in moved)

    async def _filled(self, places: Sequence[Place]) -> Sequence[Place]:
        """Those partitions that may have delayed messages: most have none, and many can be asked for with one command.

        On a cluster they are in slots of their own, so that each must be asked for itself.
        """
        if self._client.is_cluster or len(places) < 2:
            return places
        pages = [places[at : at + PAGE] for at in range(0, len(places), PAGE)]
        names = [[self._keys.delayed(*place) for place in page] for page in pages]
        counts = await self._fleet.exchange([(page[0], pack(("EXISTS", *page))) for page in names])
        return [place for page, count in zip(pages, counts, strict=True) if count for place in page]

    async def release(self, places: Sequence[Place]) -> list[int]:
        """Move what is due in these partitions and return how many each had."""
        if not places:
            return []
        calls = [((self._keys.stream(*place), self._keys.delayed(*place)), (MOST_AT_ONCE,)) for place in places]
        replies = await self._fleet.exchange([(call[0][0], pack(RELEASE_DELAYED.command(*call))) for call in calls])
        moved = []
        for place, call, reply in zip(places, calls, replies, strict=True):
            if isinstance(reply, NoScriptError):
                (reply,) = await self._fleet.exchange([(call[0][0], pack(RELEASE_DELAYED.full_command(*call)))])
            moved.append(0 if isinstance(reply, Exception) else reply[0])
            self._note(place, reply)
        if all(isinstance(reply, BrokerUnavailable) for reply in replies):
            raise replies[0]
        return moved

    def _note(self, place: Place, reply: object) -> None:
        """One partition that fails must neither stop the others nor fill the log."""
        if isinstance(reply, BrokerUnavailable):
            log.debug("delayed messages of %s.%d wait: %s", *place, reply)
        elif isinstance(reply, Exception):
            (log.debug if place in self._broken else log.error)("delayed messages of %s.%d wait: %s", *place, reply)
            self._broken.add(place)
        else:
            self._broken.discard(place)

    def _pause(self) -> float:
        return min(LONGEST_PAUSE, self._resolution * 2**self._failures) if self._failures else 0.0

    def __repr__(self) -> str:
        return f"<Delayer partitions={len(self._partitions())} failures={self._failures}>"
