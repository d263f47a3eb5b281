"""The dead letters of a group: list, replay, purge."""

from __future__ import annotations

import heapq
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import anyio

from rsmq.dlq.dead_letter import DeadLetter, opened, opened_with_body, read_dead_letter, split_id
from rsmq.dlq.selection import Selection
from rsmq.errors import ConfigError
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.expiry import FIELDS
from rsmq.model.keys import Keys
from rsmq.model.layout import Layout
from rsmq.model.packing import by_name, unpack_fields
from rsmq.model.partition import route_of
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import OK, REPLAY_DEAD_LETTER
from rsmq.redis.streams import Partitioned, ask_all, read_entries, server_now_ms, trim

log = logging.getLogger("rsmq.dlq")

PAGE: Final = 20
"""Entries per read of a partition: a dead letter may have a megabyte."""


class ReplayRate:
    """Lets one dead letter pass per span, the first at once; after a delay the late ones pass without a wait."""

    def __init__(self, every: Duration) -> None:
        self._every = checked_duration("every", every).total_seconds()
        self._next = monotonic()

    async def wait(self) -> None:
        """Wait until the next one may pass."""
        if self._every > 0:
            await anyio.sleep(max(0.0, self._next - monotonic()))
            self._next += self._every


P = TypeVar("P", bound=Partitioned)


def checked_topic(topic: P) -> P:
    """The topic. Raises ConfigError for anything else, such as its name."""
    if isinstance(topic, str):
        raise ConfigError(
            f"{topic!r} is the name of a topic: give the topic itself, await broker.topics.existing({topic!r})"
        )
    return topic


DROPPED: Final = FIELDS | {b"group"}
"""Fields that a replay does not copy."""


class Limited(Partitioned, Protocol):
    """A topic with its limit."""

    @property
    def max_length(self) -> int: ...
    @property
    def on_full(self) -> str: ...
    @property
    def layout(self) -> Layout: ...


class DeadLetters:
    """The dead letters of all topics and groups under one prefix. Every method is safe beside running workers.

    `encoding` reads what is compressed or encrypted, and has the store of large payloads. A list leaves these in the
    store, and their `sealed` says so, unless `bodies` asks for them: each is in memory while it is looked at, one after
    another. `get` asks, and so do conditions for fields of the payload.
    """

    def __init__(self, client: Client, keys: Keys, encoding: Encoding = NO_CODECS) -> None:
        self._client, self._keys = client, keys
        self._encoding = encoding

    async def count(self, topic: Partitioned, group: str) -> int:
        """The number of dead letters of a group."""
        return await self._sum(topic, group, "XLEN")

    async def select(
        self,
        topic: Partitioned,
        group: str,
        selection: Selection,
        *,
        bodies: bool = False,
        unread: Counter[str] | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """The selected ones that exist now, oldest first over all partitions. `bodies`: with payloads in a store.

        A payload that this process cannot read, such as one without its key, meets no condition for its fields:
        `unread` counts these by the reason, such as `encrypted (k7)`.
        """
        lasts = {number: await self._last(topic.name, number, group) for number in checked_topic(topic).numbers}
        async for letter in self._stored(topic, group, lasts):
            if not selection.suits(letter):  # said before its payload is decoded, or got from a store
                continue
            letter = opened(letter, self._encoding)
            if bodies or selection.where:
                letter = await opened_with_body(letter, self._encoding)
            if selection.matches(letter):
                yield letter
            elif letter.sealed and unread is not None:
                unread[letter.sealed] += 1

    async def iterate(self, topic: Partitioned, group: str, *, bodies: bool = False) -> AsyncIterator[DeadLetter]:
        """All of them, oldest first over all partitions, read page by page. `bodies`: with payloads in a store."""
        async for letter in self._stored(topic, group):
            letter = opened(letter, self._encoding)
            yield await opened_with_body(letter, self._encoding) if bodies else letter

    async def _stored(
        self, topic: Partitioned, group: str, lasts: Mapping[int, str] | None = None
    ) -> AsyncIterator[DeadLetter]:
        """All of them as they are stored, of each partition up to its id in `lasts`."""
        heads: list[tuple[tuple[int, int], int, DeadLetter]] = []
        ends = dict.fromkeys(checked_topic(topic).numbers, "+") if lasts is None else lasts
        sources = {number: self._read_partition(topic.name, number, group, ends[number]) for number in topic.numbers}
        for number, source in sources.items():
            await self._push(heads, number, source)
        while heads:
            _, number, letter = heapq.heappop(heads)
            yield letter
            await self._push(heads, number, sources[number])

    async def get(self, topic: Partitioned, group: str, letter: str) -> DeadLetter | None:
        """One dead letter by its id, or None."""
        partition, stream_id = split_id(letter)
        key = self._keys.dlq(checked_topic(topic).name, partition, group)
        for found, fields in await self._client.execute_command("XRANGE", key, stream_id, stream_id):
            found_letter = opened(read_dead_letter(topic.name, partition, group, found, fields), self._encoding)
            return await opened_with_body(found_letter, self._encoding)
        return None

    async def replay(
        self, topic: Limited, group: str, ids: Iterable[str] | None = None, *, every: Duration = timedelta(0)
    ) -> int:
        """Publish dead letters again, for this group only, at most one per `every`; returns how many.

        Without `ids` all that exist now; messages that fail again meanwhile stay. It ends early, with a warning in the
        log, where a partition has no room (`max_length`): the others stay dead letters. Each moves in one script; an
        entry too wide for a script is added and then deleted, and is delivered twice if this process dies in between.
        """
        if ids is None:
            return await self.replay_selected(topic, group, Selection(), every=every)
        if isinstance(ids, str):
            raise ConfigError(f"ids={ids!r} is one text: give a list of ids, such as ids=[{ids!r}]")
        replayed, throttle = 0, ReplayRate(every)
        for wanted in ids:
            await throttle.wait()
            done = await self._replay_one(topic, group, wanted)
            if done is None:
                break
            replayed += done
        return replayed

    async def replay_selected(
        self,
        topic: Limited,
        group: str,
        selection: Selection,
        *,
        every: Duration = timedelta(0),
        unread: Counter[str] | None = None,
    ) -> int:
        """Replay the selected ones, oldest first. After an error or cancellation a part of them is replayed. `unread`
        counts those that are left because their payload cannot be read, as in `select`."""
        replayed, throttle = 0, ReplayRate(every)
        async for letter in self.select(topic, group, selection, unread=unread):
            await throttle.wait()
            done = await self._replay_one(topic, group, letter.id)
            if done is None:
                break
            replayed += done
        return replayed

    async def purge(self, topic: Partitioned, group: str, older_than: Duration | None = None) -> int:
        """Delete dead letters for good, all or those older than `older_than`; returns how many."""
        threshold: tuple[Any, ...] = ("MAXLEN", "=", 0)
        if older_than is not None:
            age_ms = to_ms(checked_duration("older_than", older_than))
            threshold = ("MINID", "=", max(0, await server_now_ms(self._client) - age_ms))
        return await self._sum(topic, group, "XTRIM", *threshold)

    async def _sum(self, topic: Partitioned, group: str, command: str, *args: Any) -> int:
        """The sum of the replies of all partitions to a command."""
        keys = [self._keys.dlq(topic.name, number, group) for number in checked_topic(topic).numbers]
        return sum(await ask_all(self._client, [(command, key, *args) for key in keys]))

    async def _read_partition(self, topic: str, partition: int, group: str, last: str) -> AsyncIterator[DeadLetter]:
        key, start = self._keys.dlq(topic, partition, group), b"-"
        while True:
            page = deque(await read_entries(self._client, "XRANGE", key, start, last, PAGE))
            is_last = len(page) < PAGE
            while page:
                stream_id, fields = page.popleft()
                start = b"(" + stream_id
                yield read_dead_letter(topic, partition, group, stream_id, fields)
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
        key = self._keys.dlq(topic, partition, group)
        newest = await self._client.execute_command("XREVRANGE", key, "+", "-", "COUNT", 1)
        return newest[0][0].decode() if newest else "0-0"

    async def _replay_one(self, topic: Limited, group: str, letter: str) -> int | None:
        """1 if it was replayed, 0 if it is gone, None if there is no room for it."""
        partition, stream_id = split_id(letter)
        dlq = self._keys.dlq(checked_topic(topic).name, partition, group)
        if topic.layout.is_sealed(partition):  # on one server, so the script reaches the partition that follows
            partition = await self._following(topic, partition, dlq, stream_id)
        keys = [self._keys.stream(topic.name, partition), dlq]
        args = (stream_id, group, topic.max_length, topic.on_full)
        reply = await REPLAY_DEAD_LETTER(self._client, keys, args)
        if reply[0] == b"FULL":
            where = (topic.name, partition)
            await trim(self._client, self._keys, *where, keep_age_ms=0, keep_length=0, exact=True)
            reply = await REPLAY_DEAD_LETTER(self._client, keys, args)
        if reply[0] == b"FULL":
            log.warning(
                "%s.%d is full (max_length %d): what is left of the replay stays in the dead letters of %s. Replay it "
                "again when the consumers have caught up", topic.name, partition, topic.max_length, group,
            )  # fmt: skip
            return None
        if reply[0] == b"PACKED":
            flat = unpack_fields(reply[1])
            pairs = [(name, value) for name, value in zip(flat[::2], flat[1::2], strict=False) if name not in DROPPED]
            fields = [part for pair in pairs for part in pair]
            await self._client.execute_command("XADD", keys[0], "*", *fields, "group", group)
            await self._client.execute_command("XDEL", keys[1], stream_id)
            return 1
        return int(reply[0] == OK)

    async def _following(self, topic: Limited, partition: int, dlq: str, stream_id: str) -> int:
        """The partition that a dead letter of a sealed one goes to. One that is gone goes to none."""
        found = await self._client.execute_command("XRANGE", dlq, stream_id, stream_id)
        fields = found[0][1] if found else []
        packed = by_name(fields).get(b"dlq.packed")
        fields = fields if packed is None else unpack_fields(packed)
        return topic.layout.partition_after(partition, route_of(fields, stream_id))

    def __repr__(self) -> str:
        return f"<DeadLetters under {self._keys.prefix}>"
