"""Retention: trims entries that every group has settled, and deletes the consumers of dead members."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

import anyio.abc

from rsmq.consumer.consumer import Consumer
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import FORGET_NAMES, FORGET_REMOVED, REMOVE_CONSUMER, Script
from rsmq.redis.streams import MOST_PARKED, consumers_of, trim
from rsmq.redis.topics import Topic, Topics, complete_groups
from rsmq.worker.rounds import each_round

T = TypeVar("T")

log = logging.getLogger("rsmq.retention")

PAGE_NOTES: Final = 1000
"""Notes or unique names of a partition that one call looks at."""
MOST_NAMED: Final = 10
"""Of the records in a page that cannot be read, so many are named in the log."""


class Retention:
    """Serves the partitions that this process reads, every `retention_interval`.

    The script decides: it removes nothing that any group still needs, and no consumer with pending messages. So a wrong
    view of the live members costs nothing.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, topics: Topics, consumers: Sequence[Consumer]
    ) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics
        self._consumers = consumers
        self._interval = settings.retention_interval.total_seconds()
        self._lease_ttl_ms = to_ms(settings.lease_ttl)
        self._broken: set[str] = set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        await each_round(self.tidy, lambda: self._interval, log, "retention waits")

    async def tidy(self) -> int:
        """One round: trim every partition and delete dead consumers; returns how many entries were removed."""
        removed = 0
        found = {name: await self._topics.find(name) for name in {each.topic.name for each in self._consumers}}
        for consumer in self._consumers:
            topic = found.get(consumer.topic.name)
            if topic is not None and topic.layout.has_more and 0 in consumer.lanes:
                await self._attempt(f"{topic.name} groups", complete_groups(self._client, self._keys, topic))
        for name, partition in sorted({(c.topic.name, number) for c in self._consumers for number in [*c.lanes]}):
            known = found.get(name)  # read again in each round: a setting such as `archive` may have changed
            if known is not None:
                removed += await self._attempt(f"{name}.{partition}", self.trim(known, partition)) or 0
                await self._attempt(f"{name}.{partition} names", self.forget_names(name, partition))
        for consumer in self._consumers:
            known, own = found.get(consumer.topic.name), consumer.topic
            if own.layout.has_more if known is None else known != own:
                await self._attempt(f"{consumer.topic.name} bands", consumer.follow(known))
            served, group = consumer.topic.name, consumer.handler.group
            for partition in [*consumer.lanes]:
                name, gone = f"{served}.{partition}/{group}", self.remove_dead
                await self._attempt(name, gone(served, partition, group, consumer.membership.live))
                await self._attempt(f"{name} notes", self.forget(served, partition, group))
        return removed

    async def _attempt(self, name: str, work: Awaitable[T]) -> T | None:
        """A failure for one partition is logged once, and the others go on. None: it failed.

        A single server that is away ends the round. Of a cluster the other nodes may be there.
        """
        try:
            result = await work
        except (BrokerError, ConfigError) as error:
            if isinstance(error, BrokerUnavailable) and not self._client.is_cluster:
                raise
            log.log(logging.DEBUG if name in self._broken else logging.ERROR, "%s cannot be tidied: %s", name, error)
            self._broken.add(name)
            return None
        self._broken.discard(name)
        return result

    async def trim(self, topic: Topic, partition: int) -> int:
        """Remove the entries of one partition that its topic does not keep; returns how many."""
        total, is_more = 0, True
        while is_more:
            removed, is_more = await self._trim_once(topic, partition)
            total += removed
        return total

    async def _trim_once(self, topic: Topic, partition: int) -> tuple[int, bool]:
        """One call: how many entries it has removed, and whether another one may remove more."""
        word, removed, group, is_more = await trim(
            self._client, self._keys, topic.name, partition,
            keep_age_ms=to_ms(topic.retention_age), keep_length=topic.retention_length, archive=topic.archive,
        )  # fmt: skip
        if word == b"TOO_MANY_PARKED":
            log.warning(
                "%s.%d is not trimmed: more than %d messages of group %s wait for a retry, and they were tried more "
                "than 1000 times, or it is not known how often; see `rsmq group show %s %s`",
                topic.name, partition, MOST_PARKED, group, topic.name, group,
            )  # fmt: skip
        elif word == b"NO_POSITION":
            log.error(
                "%s.%d is not trimmed: the position of archive %r in %s cannot be read; its next batch writes "
                "it again; if there is no such archive any more, remove the field",
                topic.name, partition, group, self._keys.archived(topic.name, partition),
            )  # fmt: skip
        return removed, is_more

    async def remove_dead(self, topic: str, partition: int, group: str, live: Iterable[str]) -> list[str]:
        """Delete the group's consumers that belong to no live member, are idle for a lease and have nothing pending."""
        stream, living, removed = self._keys.stream(topic, partition), {name.encode() for name in live}, []
        for row in await consumers_of(self._client, stream, group):
            if row["name"] in living or row["idle"] <= self._lease_ttl_ms or row["pending"] > 0:
                continue
            if await REMOVE_CONSUMER(self._client, (stream,), (group, row["name"])) == b"OK":
                removed.append(row["name"].decode(errors="backslashreplace"))
        return removed

    async def forget(self, topic: str, partition: int, group: str) -> int:
        """Forget the notes of a group on messages that are removed; returns how many."""
        keys, at, total = self._keys, (topic, partition, group), 0
        for notes in (keys.errors, keys.cancels):
            names = (keys.stream(topic, partition), keys.cancelled(*at), notes(*at))
            total += await self._sweep(FORGET_REMOVED, names)
        return total

    async def forget_names(self, topic: str, partition: int) -> int:
        """Forget unique names whose message is gone; returns how many."""
        keys, at = self._keys, (topic, partition)
        return await self._sweep(FORGET_NAMES, (keys.stream(*at), keys.unique(*at), keys.delayed(*at)))

    async def _sweep(self, script: Script, names: Sequence[str]) -> int:
        """Look at a whole hash, in pages: however fast it grows, what is kept is only what is needed."""
        cursor, total = b"0", 0
        while True:
            cursor, forgotten, *unreadable = await script(self._client, names, (cursor, PAGE_NOTES))
            for name in [name for each in unreadable for name in each][:MOST_NAMED]:
                shown = name_in_log(name.decode(errors="backslashreplace"))
                log.warning("%s: removed the record of %s, which rsmq cannot read", names[1], shown)
            total += int(forgotten)
            if cursor == b"0":
                return total

    def __repr__(self) -> str:
        return f"<Retention every {self._interval:g} s>"
