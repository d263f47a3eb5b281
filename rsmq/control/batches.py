"""Batches under command: find one, list them, cancel one with all its members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from rsmq.model.batch_member import SHARDS, batch_mark, check_batch_name, shard_of
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.progress import MessageProgress, read_progress
from rsmq.model.record import text, whole
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import announce
from rsmq.redis.scripts import COUNT_MEMBERS, OK
from rsmq.redis.streams import as_dict, ask_all, group_names
from rsmq.redis.topics import Topic, Topics

BatchState = Literal["open", "closed", "cancelled", "complete", "success", "abandoned"]
PAGE: Final = 1000
RECORDS: Final = 100
"""Of each partition and group, so many of the newest messages that went to a fallback topic say which it is."""
CALLED: Final[tuple[BatchState, ...]] = ("complete", "success", "abandoned")


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """What is known of a batch now.

    `state`: `open` (its publisher has not closed it), `closed` (members are under way), `cancelled` (they are being
    cancelled), or what its callback has said: `complete`, `success` (all are done), `abandoned` (it has expired).
    `total`: members that are counted; each of them is `done`, `failed` (a dead letter), `cancelled`, `expired`, or
    `missing`: it has not ended yet, or got lost. `topics` have members.
    """

    name: str
    id: str
    group: str
    state: BatchState
    total: int
    done: int
    failed: int
    cancelled: int
    expired: int
    missing: int
    topics: tuple[str, ...]
    started: datetime
    expires: datetime
    ended: datetime | None

    @property
    def left(self) -> int:
        """Members that have ended, well or not."""
        return self.total - self.missing


class Batches:
    """Reads and cancels batches. Every call can be repeated."""

    def __init__(self, client: Client, keys: Keys, topics: Topics) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics

    async def find(self, name: str) -> BatchStatus | None:
        """A batch by its name; None if there is none."""
        home = await self._client.execute_command(
            "HGET", self._keys.batch_names(shard_of(check_batch_name(name))), name
        )
        found = await self._read([home]) if home else []
        return found[0] if found else None

    async def progress(self, found: BatchStatus) -> list[MessageProgress]:
        """What the handlers of its members have said last (`message.progress`), of those that are not settled: at most
        about 1000 of each partition, the latest first."""
        commands = [
            ("HSCAN", self._keys.progress(topic.name, number, found.group), 0, "COUNT", PAGE)
            for topic in await self._topics.find_all(found.topics)
            for number in topic.numbers
        ]
        values = [value for _, flat in await ask_all(self._client, commands) for value in flat[1::2]]
        told = [each for each in map(read_progress, values) if each is not None and each.batch == found.id]
        return sorted(told, key=lambda each: each.at, reverse=True)

    async def every(self) -> list[BatchStatus]:
        """All that are open or kept, the newest last."""
        hashes = await ask_all(self._client, [("HVALS", self._keys.batch_names(shard)) for shard in range(SHARDS)])
        return sorted(await self._read(home for homes in hashes for home in homes), key=lambda each: each.started)

    async def matching(self, wanted: str, most: int) -> tuple[list[BatchStatus], int]:
        """The batches whose name contains `wanted`, in any case, the newest last, and how many there are: of more than
        `most`, only so many are read, in no order."""
        hashes = await ask_all(self._client, [("HGETALL", self._keys.batch_names(shard)) for shard in range(SHARDS)])
        found = [
            home for reply in hashes for name, home in as_dict(reply).items() if wanted.casefold() in name.casefold()
        ]
        return sorted(await self._read(found[:most]), key=lambda each: each.started), len(found)

    async def open_in(self, topic: str, group: str) -> list[str]:
        """The names of batches that have not called yet, with members of a topic that this group handles, or that have
        gone there as a fallback."""
        found = [each for each in await self.every() if each.state not in CALLED]
        meets = dict[tuple[str, str], bool]()
        for pair in {(name, each.group) for each in found for name in each.topics}:
            reached = [] if pair == (topic, group) else await self._reached({pair})
            meets[pair] = pair == (topic, group) or any((at.name, its) == (topic, group) for at, _, its in reached)
        return [each.name for each in found if any(meets[name, each.group] for name in each.topics)]

    async def cancel(self, name: str) -> BatchStatus | None:
        """Cancel all members that have not started, also those that are delayed, and close the batch. None: there is
        none. What runs goes on; if it fails, it is not tried again. Members that have ended stay as they are."""
        found = await self.find(name)
        if found is None or found.state in CALLED:
            return found
        state = self._keys.batch_state(found.id)
        if await COUNT_MEMBERS(self._client, self._keys.batch_counts(found.id), (found.id, "cancelled", "")) != OK:
            return None
        topics = await self._topics_of(found.id)
        keep_ms = whole(await self._client.execute_command("HGET", state, "keep_ms")) or 0
        until_ms = int(found.expires.timestamp() * 1000) + keep_ms
        marked = set[str]()
        while True:  # partitions may be added meanwhile, to which delayed members go, and members go to fallback topics
            reached = await self._reached({(topic, found.group) for topic in topics})
            names = {self._keys.cancels(topic.name, number, group) for topic, number, group in reached} - marked
            if not names:
                break
            await ask_all(self._client, [("HSET", key, batch_mark(found.id), until_ms) for key in sorted(names)])
            marked |= names
        for topic_name, group in sorted({(topic.name, group) for topic, _, group in reached}):
            await announce(self._client, self._keys, topic_name, group)
        return await self.find(name)

    async def _reached(self, of_members: Set[tuple[str, str]]) -> list[tuple[Topic, int, str]]:
        """The partitions and groups where members may be: their topics, and the fallback topics to which messages of
        these have gone lately, with all groups there."""
        known, new, reached = set[tuple[str, str]](), set(of_members), list[tuple[Topic, int, str]]()
        while new:
            known |= new
            topics = {topic.name: topic for topic in await self._topics.find_all(sorted({name for name, _ in new}))}
            found = [
                (topics[name], number, group)
                for name, group in sorted(new)
                if name in topics
                for number in topics[name].numbers
            ]
            reached += found
            records = [self._keys.handed_on(topic.name, number, group) for topic, number, group in found]
            replies = await ask_all(self._client, [("XREVRANGE", each, "+", "-", "COUNT", RECORDS) for each in records])
            targets = {text(as_dict(flat).get("topic", b"")) for reply in replies for _, flat in reply or ()} - {""}
            new = {
                (target, group)
                for target in targets
                for group in await group_names(self._client, self._keys, target, 0)
            } - known
        return reached

    async def _topics_of(self, home: str) -> tuple[str, ...]:
        found = as_dict(await self._client.execute_command("HGETALL", self._keys.batch_state(home)))
        return topics_in(found)

    async def _read(self, homes: Iterable[bytes]) -> list[BatchStatus]:
        names = [text(home) for home in homes]
        replies = await ask_all(self._client, [("HGETALL", self._keys.batch_state(home)) for home in names])
        found = [status_of(home, as_dict(reply)) for home, reply in zip(names, replies, strict=True) if reply]
        return [each for each in found if each is not None]

    def __repr__(self) -> str:
        return f"<Batches under {self._keys.prefix}>"


def topics_in(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The topics with members, by the fields of a state."""
    return tuple(sorted(name.partition("|")[2] for name in found if name.startswith("topic|")))


def status_of(home: str, found: Mapping[str, Any]) -> BatchStatus | None:
    """A batch by the fields of its state. None: another client has written it."""
    if not {"name", "group", "opened_ms", "expires_ms"} <= found.keys():
        return None

    def number(field: str) -> int:
        return min(whole(found.get(field, b"0")) or 0, LATEST_MS)

    counts = {field: number(field) for field in ("total", "done", "failed", "cancelled", "expired")}
    called, ended = text(found.get("state", b"")), number("ended_ms")
    state: BatchState = "open" if "closed" not in found else "cancelled" if "cancelled_ms" in found else "closed"
    state = next((each for each in CALLED if each == called), state)
    return BatchStatus(
        name=text(found["name"]),
        id=home,
        group=text(found["group"]),
        state=state,
        **counts,
        missing=max(0, 2 * counts["total"] - sum(counts.values())),
        topics=topics_in(found),
        started=from_epoch_ms(number("opened_ms")),
        expires=from_epoch_ms(number("expires_ms")),
        ended=from_epoch_ms(ended) if ended else None,
    )
