"""The ticker: publishes what the schedules of a broker say, inside its workers; one of them leads each schedule."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.abc
import anyio.to_thread

from rsmq.clock import to_ms
from rsmq.connect import Client
from rsmq.errors import BrokerError
from rsmq.keys import Keys
from rsmq.message import encode_payload, entry_fields
from rsmq.partition import partition_for
from rsmq.schedule import Every, due, rule_of
from rsmq.script import LEAD_SCHEDULE, OK, PUBLISH_TICK
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics

log = logging.getLogger("rsmq.schedule")

AGAIN: Final = 1.0
"""Seconds until something that failed is tried again."""


class Ticker:
    """Serves all schedules of one process.

    A schedule is led by a lease. Invariant: each tick is published at most once, because the script that appends it
    notes it in the same slot; leading only spares the others the work. All times are the server's.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, topics: Topics, member: str, schedules: Sequence[Every]
    ) -> None:
        self._client, self._keys, self._topics, self._member = client, keys, topics, member
        self._schedules = schedules
        self._ttl_ms = to_ms(settings.lease_ttl)
        self._stopping = anyio.Event()
        self.led: set[str] = set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`; the schedules are given up then, so that another worker goes on at once."""
        task_status.started()
        async with anyio.create_task_group() as tasks:
            for every in self._schedules:
                tasks.start_soon(self._serve, every)
            if self._schedules:
                await self._stopping.wait()
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            for every in self._schedules:
                if every.name in self.led:
                    await self._give_up(every)

    def stop(self) -> None:
        """Publish nothing more."""
        self._stopping.set()

    async def _serve(self, every: Every) -> None:
        """One schedule. The boundary where its errors end: they are told, and it is tried again."""
        while True:
            try:
                seconds = await self._look(every)
            except BrokerError as error:
                log.warning("schedule %s waits: %s", every.name, error)
                seconds = AGAIN
            except Exception:  # of the user's function: the others and the handlers go on
                log.exception("schedule %s failed, it is tried again", every.name)
                seconds = AGAIN
            await anyio.sleep(seconds)

    async def _look(self, every: Every) -> float:
        """Publish what is due, if this process leads; returns the seconds until the next look."""
        topic = await self._topics.lookup(every.topic)
        partition = partition_for(every.name if every.key is None else every.key, topic.partitions)
        place, rule = self._keys.every(topic.name, partition), rule_of(every.times)
        word, first, *rest = await LEAD_SCHEDULE(self._client, (place,), (every.name, self._member, self._ttl_ms, rule))
        if word != OK:
            self.led.discard(every.name)
            return float(min(first, self._ttl_ms)) / 1000
        if every.name not in self.led:
            log.info("%s publishes schedule %s", self._member, every.name)
            self.led.add(every.name)
        now = rest[0]
        found = due(every.times, every.missed, first, now, 2 * self._ttl_ms)
        if found.skipped:
            log.warning("schedule %s: ticks were missed, no worker ran; missed=%r", every.name, every.missed)
        for tick in found.ticks:
            if not await self._publish(every, topic, partition, tick):
                return AGAIN
        # a look renews the lease, too
        return float(min(found.next_ms - now, self._ttl_ms / 3)) / 1000

    async def _publish(self, every: Every, topic: Topic, partition: int, tick: int) -> bool:
        """False: there is no room. None as payload publishes nothing."""
        payload = await payload_of(every, tick)
        fields: list[bytes | str] = []
        if payload is not None:
            data, kind = encode_payload(payload)
            fields = entry_fields(data, every.message_id(tick), every.key, kind, every.headers)
        keys = (self._keys.stream(topic.name, partition), self._keys.every(topic.name, partition))
        args = (every.name, tick, topic.max_length, topic.on_full, *fields)
        word = await PUBLISH_TICK(self._client, keys, args)
        if word == b"FULL":
            log.warning("schedule %s waits: topic %s is full", every.name, topic.name)
        return bool(word != b"FULL")

    async def _give_up(self, every: Every) -> None:
        with suppress(BrokerError):
            topic = await self._topics.lookup(every.topic)
            partition = partition_for(every.name if every.key is None else every.key, topic.partitions)
            place = self._keys.every(topic.name, partition)
            await LEAD_SCHEDULE(self._client, (place,), (every.name, self._member, 0))
        self.led.discard(every.name)

    def __repr__(self) -> str:
        return f"<Ticker {len(self._schedules)} schedules, leads {sorted(self.led)}>"


async def payload_of(every: Every, tick: int) -> Any:
    """What a schedule's function makes of a tick; a plain function runs in a thread, it may block."""
    if inspect.iscoroutinefunction(every.function):
        return await every.call(tick)
    result = await anyio.to_thread.run_sync(every.call, tick)
    return await result if inspect.isawaitable(result) else result
