"""The bodies of large messages that lie in a store: which are needed, and the sweep of those that are not.

No entry is counted: a body is needed while an entry names it, wherever that is by now. So each way that an entry may
go, such as a delay, a retry, a dead letter or its replay, keeps its body, and leaves none behind.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from rsmq.errors import LostBody
from rsmq.model.body import CLOCK, NAME, UNFINISHED, Offloading
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.record import exact_text
from rsmq.redis.client.connector import Client
from rsmq.redis.identity import deployment_id
from rsmq.redis.scripts import FIND_BODIES, FIND_DELAYED_BODIES
from rsmq.redis.streams import group_names, server_now_ms
from rsmq.redis.topics import Topics, stored_numbers

log = logging.getLogger("rsmq.bodies")

GRACE: Final = timedelta(hours=1)
"""How long no entry may have named a body before it is deleted: a failover that loses a moment brings entries back."""
PAGE: Final = 100
"""Entries of a stream that one call reads."""
MOST_PASSES: Final = 10
"""How often a topic is read at most: two passes are enough, but while its entries move to other partitions."""
MOST_LOST: Final = 100
"""Names without a body that are looked for one by one, and listed."""
KEPT_MS: Final = 30 * 86_400_000
"""For how long it is remembered that nothing names a body, after the last sweep."""


@dataclass(slots=True)
class TopicBodies:
    """The bodies of one topic: how many there are with how many bytes, and how many of them entries name.

    `unnamed`: of the others, those that are old enough to be deleted once nothing has named them for an hour;
    `removed`: deleted by this sweep; `lost`: names in entries, without a body, at most 100. `is_moving`: entries moved
    to other partitions in each pass, so it is not known which bodies are named, and the sweep deleted none.
    """

    topic: str
    bodies: int = 0
    size: int = 0
    named: int = 0
    unnamed: int = 0
    removed: int = 0
    lost: list[str] = field(default_factory=list)
    is_moving: bool = False


@dataclass(slots=True)
class Listing:
    """What the store has of a topic: all names, and those that were put long enough ago."""

    names: set[str] = field(default_factory=set)
    old: set[str] = field(default_factory=set)
    size: int = 0


@dataclass(frozen=True, slots=True)
class NamedBodies:
    """The names in entries of a topic. `is_all`: no body that was asked for has an entry beside these."""

    names: set[str]
    is_all: bool


class Bodies:
    """The bodies of one server and prefix. Every method is safe beside publishers, workers and other sweeps."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        topics: Topics,
        offload: Offloading,
        *,
        keep: timedelta | None = None,
        grace: timedelta = GRACE,
    ) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics
        self._offload = offload
        self._keep = offload.keep if keep is None else keep
        self._grace = grace

    async def status(self) -> list[TopicBodies]:
        """The bodies of all topics. Reads all that is stored of topics that have some, and changes nothing."""
        listed, _ = await self._list(await self._deployment())
        return [await self._look(topic, found) for topic, found in listed]

    async def sweep(self) -> list[TopicBodies]:
        """Delete the bodies that no entry has named for an hour, and that were put at least `keep` ago.

        Each needs two sweeps: the first notes that nothing names it. What killed processes have left of puts that are
        older than `keep` is deleted, too. Raises StoreUnavailable and BrokerError; then what was deleted was not
        needed.
        """
        deployment, done = await self._deployment(), list[TopicBodies]()
        listed, unfinished = await self._list(deployment)
        for name in unfinished:
            await self._offload.delete(name)
        for topic, found in listed:
            state = TopicBodies(topic, len(found.names), found.size)
            if found.old:
                named = await self.named(deployment, topic, found.old)
                if named.is_all:
                    state.removed = await self._remove(topic, found, named.names)
                else:
                    state.is_moving = True
                    log.warning(
                        "no body of topic %s is deleted: its entries move to other partitions. The next sweep looks "
                        "again", topic,
                    )  # fmt: skip
                state.named = len(found.names & named.names)
                state.unnamed = len(found.old - named.names) - state.removed
            done.append(state)
        return done

    async def named(self, deployment: str, topic: str, bodies: Set[str]) -> NamedBodies:
        """The names that entries of a topic have. Of `bodies` at least all that are named from the beginning to the
        end, if it `is_all`.

        Outputs on their way come first, then what is delayed, then each partition with its dead letters, to its end at
        one moment. An entry moves forward in this order, or within one partition. What moves to another partition, once
        for each change of the partitions, is copied before it is deleted, so another pass finds it. So a pass that
        finds none of `bodies` anew, with the partitions of the pass before it, is the last one. What is published
        meanwhile has a body that is not among them, and costs no pass.
        """
        folder, names = f"{deployment}/{topic}/", set[str]()
        lasts, before = dict[str, str](), set[int]()
        for number_of_pass in range(MOST_PASSES):
            numbers, is_quiet = await self._numbers(topic), True
            groups = {
                group for number in numbers for group in await group_names(self._client, self._keys, topic, number)
            }
            async for found in self._pass(topic, folder, numbers, groups, lasts):
                is_quiet = is_quiet and all(name in names or name not in bodies for name in found)
                names.update(found)
            if number_of_pass and is_quiet and numbers == before:
                return NamedBodies(names, is_all=True)
            before = numbers
        return NamedBodies(names, is_all=False)

    async def _pass(
        self, topic: str, folder: str, numbers: set[int], groups: set[str], lasts: dict[str, str]
    ) -> AsyncIterator[list[str]]:
        """All that is stored of a topic; of streams what comes after the ids in `lasts`."""
        keys = self._keys
        if self._client.is_cluster:
            for out in await self._outs():
                async for found in self._streams([out], folder, lasts):
                    yield found
        for number in sorted(numbers):
            cursor = "0"
            while True:
                reply = await FIND_DELAYED_BODIES(self._client, (keys.delayed(topic, number),), (folder, cursor, PAGE))
                yield texts(reply[1])
                cursor = reply[0].decode()
                if cursor == "0":
                    break
        for number in sorted(numbers):
            letters = [keys.dlq(topic, number, group) for group in sorted(groups)]
            async for found in self._streams([keys.stream(topic, number), *letters], folder, lasts):
                yield found

    async def _streams(self, names: Sequence[str], folder: str, lasts: dict[str, str]) -> AsyncIterator[list[str]]:
        """Streams of one slot, page by page, until one call has read the ends of all of them."""
        is_more = 1
        while is_more:
            ids = [lasts.get(name, "0-0") for name in names]
            is_more, reached, found = await FIND_BODIES(self._client, names, (folder, PAGE, *ids))
            lasts |= zip(names, texts(reached), strict=True)
            yield texts(found)

    async def _numbers(self, topic: str) -> set[int]:
        """The partitions of a topic, and others with something in them."""
        known = await self._topics.find(topic)
        return await stored_numbers(self._client, self._keys, topic, () if known is None else known.numbers)

    async def _outs(self) -> list[str]:
        """The out-streams of all topics: outputs for any topic wait in them, on a cluster."""
        found = list[str]()
        for name in await self._topics.names():
            topic = await self._topics.find(name)
            for number in () if topic is None else topic.numbers:
                groups = await group_names(self._client, self._keys, name, number)
                found += [self._keys.out(name, number, group) for group in groups]
        return found

    async def _remove(self, topic: str, found: Listing, named: set[str]) -> int:
        """Note what nothing names, and delete what was noted long enough ago. The note goes last: a sweep that ends in
        between leaves nothing."""
        key, unnamed = self._keys.bodies(topic), sorted(found.old - named)
        now = await server_now_ms(self._client)
        noted = await self._client.execute_command("ZRANGE", key, 0, -1, "WITHSCORES")
        since, gone = dict[str, float](), list[bytes]()
        for raw, at in zip(noted[::2], noted[1::2], strict=True):
            name = exact_text(raw)
            if name is None or name in named or name not in found.names:
                gone.append(raw)
            else:
                since[name] = float(at)
        await self._forget(key, gone)
        new = [name for name in unnamed if name not in since]
        for first in range(0, len(new), 1000):
            pairs = [part for name in new[first : first + 1000] for part in (now, name)]
            await self._client.execute_command("ZADD", key, "NX", *pairs)
        if new:
            await self._client.execute_command("PEXPIRE", key, KEPT_MS)
        due = [name for name in unnamed if name in since and now - since[name] >= to_ms(self._grace)]
        for name in due:
            await self._offload.delete(name)
            await self._forget(key, [name])
        return len(due)

    async def _forget(self, key: str, names: Sequence[str | bytes]) -> None:
        for first in range(0, len(names), 1000):
            await self._client.execute_command("ZREM", key, *names[first : first + 1000])

    async def _look(self, topic: str, found: Listing) -> TopicBodies:
        looked = await self.named(await self._deployment(), topic, found.names)
        named = looked.names
        state = TopicBodies(topic, len(found.names), found.size, len(found.names & named), len(found.old - named))
        state.is_moving = not looked.is_all
        for name in sorted(named - found.names)[:MOST_LOST]:
            if NAME.fullmatch(name):
                try:
                    await self._offload.fetch(name)  # it may have been put since the store was listed
                except LostBody:
                    state.lost.append(name)
        return state

    async def _list(self, deployment: str) -> tuple[list[tuple[str, Listing]], list[str]]:
        """What the store has of each topic, and the names of unfinished puts that are older than `keep`. Ages are by
        the clock of the store."""

        def read(rows_of_store: Iterator[tuple[str, float, int]]) -> tuple[dict[str, Listing], list[str]]:
            found, rows = defaultdict[str, Listing](Listing), list[tuple[str, float]]()
            parts = list[tuple[str, float]]()
            now = 0.0
            for name, put_at, size in rows_of_store:
                match = NAME.fullmatch(name)
                if name == f"{deployment}/{CLOCK}":
                    now = put_at
                elif match is not None:
                    of = found[match[2]]
                    of.names.add(name)
                    of.size += size
                    rows.append((name, put_at))
                elif UNFINISHED.fullmatch(name):
                    parts.append((name, put_at))
            until = now - self._keep.total_seconds()
            for name, put_at in rows:
                if put_at <= until:
                    found[name.split("/")[1]].old.add(name)
            return found, [name for name, put_at in parts if put_at <= until]

        await self._offload.put(f"{deployment}/{CLOCK}", b"")
        listed, unfinished = await self._offload.survey(deployment, read)
        return sorted(listed.items()), unfinished

    async def _deployment(self) -> str:
        return await deployment_id(self._client, self._keys)

    def __repr__(self) -> str:
        return f"<Bodies under {self._keys.prefix} in {self._offload!r}>"


def texts(values: Sequence[bytes]) -> list[str]:
    """A reply as texts."""
    return [value.decode(errors="replace") for value in values]
