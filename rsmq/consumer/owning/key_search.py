"""Looks for the keys of what sealed partitions have left, so that those that follow go on with all others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import anyio

from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.left_keys import LeftKeys
from rsmq.consumer.waiting.queue import Queue
from rsmq.model.clock import monotonic
from rsmq.model.message import RawEntry
from rsmq.redis.streams import SEALED, as_dict, groups_of

FIRST_PAGE: Final = 16
"""Entries, whose size is not known yet."""
PAGE: Final = 1000


class KeySearch:
    """Reads sealed partitions ahead of their group, and keeps only keys.

    That is needed where the owner does not read on, because it has as many ids as it keeps, and where ids wait for a
    turn or a rate. It goes on for one round at a time: so the rebalancer does what else it has to do. Bodies leave the
    server for it, so it is not done for a group that reads.
    """

    def __init__(self, context: ConsumerContext, queue: Queue, fetchers: Fetchers) -> None:
        self._client = context.client
        self._settings = context.settings
        self._group = context.handler.group
        self._lanes = context.lanes
        self._queue = queue
        self._fetchers = fetchers
        self._found: dict[int, LeftKeys] = {}
        self._largest = 0

    async def find(self, before: Sequence[Lane], *, is_read: bool) -> Collection[LeftKeys]:
        """What is known of these partitions. `is_read`: the server has nothing more to read there."""
        until = monotonic() + self._settings.presence_interval.total_seconds()
        may_begin = is_read or not all(self._queue.has_room(each, self._lanes.values()) for each in before)
        for lane in before:
            if is_read and not lane.flows.named:
                continue
            found = self._found.get(lane.partition)
            if found is None or found.lane is not lane or not found.counts:
                found = await self._begin(lane) if may_begin else None
            while found is not None and not found.is_over and monotonic() < until:
                found.add(await self._page(lane, found.cursor or b"-"))
        return self._found.values()

    async def _begin(self, lane: Lane) -> LeftKeys | None:
        """Everything that was given to the group is here, or in memory, before the ids are noted."""
        self._found.pop(lane.partition, None)
        number = lane.recovery.number
        rows = await groups_of(self._client, lane.stream)
        given = [row["last-delivered-id"] for row in rows if row["name"] == self._group.encode()]
        if not given or not await self._is_sealed(lane):
            return None
        with anyio.move_on_after(self._settings.presence_interval.total_seconds()) as patience:
            await self._fetchers.exclude(lane.partition)
        if patience.cancelled_caught or number != lane.recovery.number:
            return None
        found = self._found[lane.partition] = LeftKeys(lane, given[0], self._settings.read_ahead)
        return found

    async def _is_sealed(self, lane: Lane) -> bool:
        """Whether nothing is added to it any more: before that, a message may come behind those that are looked at."""
        reply = await self._client.execute_command("XINFO", "STREAM", lane.stream)
        return bool(as_dict(reply)["last-generated-id"] == SEALED)

    async def _page(self, lane: Lane, cursor: bytes) -> Sequence[RawEntry]:
        """The next entries, so many that they fit a budget if all are as large as the largest so far."""
        budget = self._client.page_limit.of(int(self._settings.prefetch_bytes) // 4)
        count = max(1, min(PAGE, budget // self._largest)) if self._largest else FIRST_PAGE
        with self._client.page_limit.asking():
            entries: list[RawEntry] = await self._client.execute_command(
                "XRANGE", lane.stream, cursor, "+", "COUNT", count
            )
        self._largest = max([self._largest, *[64 + sum(map(len, fields)) for _, fields in entries]])
        return entries

    def forget(self) -> None:
        """No partition waits for others."""
        self._found.clear()

    def __repr__(self) -> str:
        return f"<KeySearch {list(self._found.values())}>"
