"""Retention: removes what every group has settled, and the traces of members that are gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.abc

from rsmq.clock import to_ms
from rsmq.connect import Client
from rsmq.consumer.consumer import Consumer
from rsmq.entry import place
from rsmq.errors import BrokerError
from rsmq.keys import Keys
from rsmq.script import REMOVE_CONSUMER
from rsmq.settings import Settings
from rsmq.stream import consumers_of, groups_of, trim
from rsmq.topic import Topic, Topics

log = logging.getLogger("rsmq.retention")

MOST_PARKED: Final = 5000
A_FULL_TRIM: Final = 1000
"""A server trims 100 nodes of a stream a call, 10 000 entries by default: after so many there may be more to trim."""
NO_GROUP: Final = "there is no group yet: what comes first is kept for it"


class Retention:
    """Looks after the partitions that this process reads, every `retention_interval`.

    Whoever asks, the script decides: nothing is removed that any group still needs, and no consumer that has something
    pending. So a wrong view of who lives costs nothing.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        topics: Topics,
        consumers: Callable[[], Sequence[Consumer]],
    ) -> None:
        self._client, self._keys, self._topics, self._consumers = client, keys, topics, consumers
        self._interval = settings.retention_interval.total_seconds()
        self._patience_ms = to_ms(settings.lease_ttl)
        self._was_out = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. An outage is waited out: this is the boundary where errors end."""
        task_status.started()
        while True:
            await anyio.sleep(self._interval)
            try:
                await self.tidy()
                self._was_out = False
            except BrokerError as error:
                (log.debug if self._was_out else log.warning)("retention waits: %s", error)
                self._was_out = True

    async def tidy(self) -> int:
        """Trim every partition once, remove dead consumers, and return how many entries were removed."""
        removed = 0
        found = {name: await self._topics.find(name) for name in {each.topic.name for each in self._consumers()}}
        for name, partition in sorted({(c.topic.name, number) for c in self._consumers() for number in [*c.lanes]}):
            topic = found.get(name)  # asked for in each round: an archive that is required now counts now
            removed += 0 if topic is None else await self.trim(topic, partition)
        for consumer in self._consumers():
            for partition in [*consumer.lanes]:
                live = consumer.membership.live
                await self.remove_dead(consumer.topic.name, partition, consumer.handler.group, live)
        return removed

    async def trim(self, topic: Topic, partition: int) -> int:
        """Remove from one partition what its topic does not keep; returns how many entries."""
        total = removed = await self._trim_once(topic, partition)
        while removed >= A_FULL_TRIM:
            total += (removed := await self._trim_once(topic, partition))
        return total

    async def _trim_once(self, topic: Topic, partition: int) -> int:
        word, removed, group = await trim(
            self._client,
            self._keys,
            topic.name,
            partition,
            keep_age_ms=to_ms(topic.retention_age),
            keep_length=topic.retention_length,
            archive=topic.archive,
        )
        if word == b"TOO_MANY_PARKED":
            log.warning(
                "%s.%d is not trimmed: more than %d messages of group %s wait for a retry; see `rsmq group show %s %s`",
                topic.name, partition, MOST_PARKED, group, topic.name, group,
            )  # fmt: skip
        return removed

    async def remove_dead(self, topic: str, partition: int, group: str, live: Iterable[str]) -> list[str]:
        """Delete the group's consumers that no live member owns, that are idle for a lease and have nothing pending."""
        stream, living, removed = self._keys.stream(topic, partition), {name.encode() for name in live}, []
        for row in await consumers_of(self._client, stream, group):
            if row["name"] in living or row["idle"] <= self._patience_ms or row["pending"] > 0:
                continue
            if await REMOVE_CONSUMER(self._client, (stream,), (group, row["name"])) == b"OK":
                removed.append(row["name"].decode(errors="backslashreplace"))
        return removed

    def __repr__(self) -> str:
        return f"<Retention every {self._interval:g} s>"


@dataclass(frozen=True, slots=True)
class Hold:
    """What one group still needs of a partition. Ids are None where there is nothing of that kind."""

    group: str
    pending: int
    oldest_pending: str | None
    parked: int
    oldest_parked: str | None
    oldest_undelivered: str | None

    @property
    def is_holding(self) -> bool:
        """Whether anything is kept for this group."""
        return bool(self.oldest_pending or self.oldest_parked or self.oldest_undelivered)

    @property
    def why(self) -> str:
        """In words."""
        parts = []
        if self.oldest_pending:
            parts.append(f"{self.pending} pending, the oldest is {self.oldest_pending}")
        if self.oldest_parked:
            parts.append(f"{self.parked} waiting for a retry, the oldest is {self.oldest_parked}")
        if self.oldest_undelivered:
            parts.append(f"not delivered from {self.oldest_undelivered} on")
        return "; ".join(parts) if parts else "has settled everything"

    def __str__(self) -> str:
        return f"{self.group}: {self.why}"


async def why_not_trimmed(client: Client, keys: Keys, topic: str, partition: int) -> list[Hold]:
    """What each group of a partition still needs, as far as trimming is concerned."""
    stream = keys.stream(topic, partition)
    return [
        await _hold(client, keys.retry(topic, partition, row["name"].decode()), stream, row)
        for row in await groups_of(client, stream)
    ]


async def _hold(client: Client, retry: str, stream: str, group: dict[str, Any]) -> Hold:
    pending, oldest, *_ = await client.execute_command("XPENDING", stream, group["name"])
    parked = await client.execute_command("ZRANGE", retry, 0, MOST_PARKED - 1)
    ahead = await client.execute_command("XRANGE", stream, b"(" + group["last-delivered-id"], "+", "COUNT", 1)
    return Hold(
        group=group["name"].decode(),
        pending=pending,
        oldest_pending=oldest.decode() if oldest else None,
        parked=await client.execute_command("ZCARD", retry),
        oldest_parked=min((member.partition(b"|")[0] for member in parked), key=place).decode() if parked else None,
        oldest_undelivered=ahead[0][0].decode() if ahead else None,
    )


@dataclass(frozen=True, slots=True)
class Reason:
    """Why entries of a partition are still there: who keeps them, from which one on, and what for.

    `is_limit`: nobody needs them, the topic's own limits keep them for a replay.
    """

    holder: str
    oldest: str
    why: str
    is_limit: bool = False


async def reasons(client: Client, keys: Keys, topic: Topic, partition: int) -> list[Reason]:
    """Whoever keeps anything of a partition; the first is who holds retention back now."""
    first = await client.execute_command("XRANGE", keys.stream(topic.name, partition), "-", "+", "COUNT", 1)
    if not first:
        return []
    holds = await why_not_trimmed(client, keys, topic.name, partition)
    found = [
        Reason(f"group {hold.group}", min(ids, key=lambda each: place(each.encode())), hold.why)
        for hold in holds
        if (ids := [each for each in (hold.oldest_pending, hold.oldest_parked, hold.oldest_undelivered) if each])
    ]
    found += await _archive_reasons(client, keys, topic, partition, first[0][0]) if topic.archive == "required" else []
    found.sort(key=lambda reason: place(reason.oldest.encode()))
    if not found or place(first[0][0]) < place(found[0].oldest.encode()):
        return [Reason("retention", first[0][0].decode(), _limit(topic) if holds else NO_GROUP, is_limit=True), *found]
    return found


async def _archive_reasons(client: Client, keys: Keys, topic: Topic, partition: int, first: bytes) -> list[Reason]:
    flat = await client.execute_command("HGETALL", keys.archived(topic.name, partition))
    if not flat:
        return [Reason("archive", first.decode(), "required, and none has committed anything of this partition")]
    found = []
    for name, committed in zip(flat[::2], flat[1::2], strict=True):
        ahead = await client.execute_command(
            "XRANGE", keys.stream(topic.name, partition), b"(" + committed, "+", "COUNT", 1
        )
        if ahead:
            oldest = ahead[0][0].decode()
            found.append(Reason(f"archive {name.decode()}", oldest, f"has committed up to {committed.decode()}"))
    return found


def _limit(topic: Topic) -> str:
    if topic.retention_length == 0:
        return "settled by all: goes with the next round of a worker that serves it"
    return (
        f"settled by all: kept for a replay until {topic.retention_age} old, or until {topic.retention_length} newer "
        f"ones are settled"
    )
