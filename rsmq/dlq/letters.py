"""The dead letters of a group: look at them, give them another life, throw them away."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import anyio

from rsmq.clock import monotonic, to_ms
from rsmq.connect import Client
from rsmq.dlq.letter import DeadLetter, split_id
from rsmq.dlq.selection import Selection
from rsmq.keys import Keys
from rsmq.message import unpack_fields
from rsmq.script import OK, REPLAY_DEAD_LETTER
from rsmq.stream import Partitioned, pipelined

PAGE: Final = 20
"""Entries read at a time and partition: a dead letter may weigh a megabyte."""


class Pace:
    """Lets one pass in each span, from the first on; after a delay those that are late pass at once."""

    def __init__(self, every: timedelta) -> None:
        self._every, self._next = every.total_seconds(), monotonic()

    async def wait(self) -> None:
        """Until it is the next one's turn."""
        if self._every > 0:
            await anyio.sleep(max(0.0, self._next - monotonic()))
            self._next += self._every


class DeadLetters:
    """Dead letters of any topic and group under one prefix. All of it may run beside live workers."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def count(self, topic: Partitioned, group: str) -> int:
        """How many there are."""
        lengths = await pipelined(
            self._client, [("XLEN", self._keys.dlq(topic.name, number, group)) for number in range(topic.partitions)]
        )
        for length in lengths:
            if isinstance(length, Exception):
                raise length
        return sum(lengths)

    async def select(self, topic: Partitioned, group: str, wanted: Selection) -> AsyncIterator[DeadLetter]:
        """Those that exist now and are meant, oldest first over all partitions."""
        lasts = [await self._last(topic.name, number, group) for number in range(topic.partitions)]
        async for letter in self.iterate(topic, group, lasts):
            if wanted.matches(letter):
                yield letter

    async def iterate(
        self, topic: Partitioned, group: str, lasts: Sequence[str] | None = None
    ) -> AsyncIterator[DeadLetter]:
        """All of them, oldest first over all partitions, read page by page; of each partition up to its last id."""
        heads: list[tuple[tuple[int, int], int, DeadLetter]] = []
        ends = ["+"] * topic.partitions if lasts is None else lasts
        sources = [self._of_partition(topic.name, number, group, ends[number]) for number in range(topic.partitions)]
        for number, source in enumerate(sources):
            await self._push(heads, number, source)
        while heads:
            _, number, letter = heapq.heappop(heads)
            yield letter
            await self._push(heads, number, sources[number])

    async def get(self, topic: Partitioned, group: str, letter: str) -> DeadLetter | None:
        """One dead letter by its id, or None."""
        partition, stream_id = split_id(letter)
        key = self._keys.dlq(topic.name, partition, group)
        for found, fields in await self._client.execute_command("XRANGE", key, stream_id, stream_id):
            return DeadLetter.read(topic.name, partition, group, found, fields)
        return None

    async def replay(
        self, topic: Partitioned, group: str, ids: Iterable[str] | None = None, *, every: timedelta = timedelta(0)
    ) -> int:
        """Publish dead letters again, for this group only, at most one in `every`, and return how many.

        Without `ids` all that exist now: what fails again meanwhile stays. Each moves in one script; only an entry too
        wide for one is added and then deleted, and may come twice if this process dies in between.
        """
        if ids is None:
            return await self.replay_selected(topic, group, Selection(), every=every)
        replayed, pace = 0, Pace(every)
        for wanted in ids:
            await pace.wait()
            replayed += await self._replay_one(topic.name, group, wanted)
        return replayed

    async def replay_selected(
        self, topic: Partitioned, group: str, wanted: Selection, *, every: timedelta = timedelta(0)
    ) -> int:
        """The same for those that are meant. Cancelled or broken off it has replayed a part of them, oldest first."""
        replayed, pace = 0, Pace(every)
        async for letter in self.select(topic, group, wanted):
            await pace.wait()
            replayed += await self._replay_one(topic.name, group, letter.id)
        return replayed

    async def purge(self, topic: Partitioned, group: str, older_than: timedelta | None = None) -> int:
        """Delete dead letters for good, all or those older than a span, and return how many."""
        threshold: tuple[Any, ...] = ("MAXLEN", "=", 0)
        if older_than is not None:
            seconds, microseconds = await self._client.execute_command("TIME")
            now = int(seconds) * 1000 + int(microseconds) // 1000
            threshold = ("MINID", "=", max(0, now - to_ms(older_than)))
        replies = await pipelined(
            self._client,
            [("XTRIM", self._keys.dlq(topic.name, number, group), *threshold) for number in range(topic.partitions)],
        )
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return sum(replies)

    async def _of_partition(self, topic: str, partition: int, group: str, last: str = "+") -> AsyncIterator[DeadLetter]:
        key, start = self._keys.dlq(topic, partition, group), b"-"
        while True:
            page = deque(await self._client.execute_command("XRANGE", key, start, last, "COUNT", PAGE))
            is_last = len(page) < PAGE
            while page:
                stream_id, fields = page.popleft()
                start = b"(" + stream_id
                yield DeadLetter.read(topic, partition, group, stream_id, fields)
            if is_last:
                return

    async def _push(
        self, heads: list[tuple[tuple[int, int], int, DeadLetter]], number: int, source: AsyncIterator[DeadLetter]
    ) -> None:
        async for letter in source:
            ms, _, sequence = split_id(letter.id)[1].partition("-")
            heapq.heappush(heads, ((int(ms), int(sequence)), number, letter))
            return

    async def _last(self, topic: str, partition: int, group: str) -> str:
        newest = await self._client.execute_command(
            "XREVRANGE", self._keys.dlq(topic, partition, group), "+", "-", "COUNT", 1
        )
        return newest[0][0].decode() if newest else "0-0"

    async def _replay_one(self, topic: str, group: str, letter: str) -> int:
        """1 if it was there."""
        partition, stream_id = split_id(letter)
        stream, dlq = self._keys.stream(topic, partition), self._keys.dlq(topic, partition, group)
        reply = await REPLAY_DEAD_LETTER(self._client, (stream, dlq), (stream_id, group))
        if reply[0] == b"PACKED":
            flat = unpack_fields(reply[1])
            pairs = [(name, value) for name, value in zip(flat[::2], flat[1::2], strict=False) if name != b"group"]
            fields = [part for pair in pairs for part in pair]
            await self._client.execute_command("XADD", stream, "*", *fields, "group", group)
            await self._client.execute_command("XDEL", dlq, stream_id)
            return 1
        return int(reply[0] == OK)

    def __repr__(self) -> str:
        return f"<DeadLetters under {self._keys.prefix}>"
