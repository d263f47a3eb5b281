"""The scheduler: publishes the ticks of a broker's schedules inside its workers; one worker leads each schedule."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread

from rsmq.errors import BrokerError
from rsmq.handler.schedule import Schedule, due_ticks, payload_of, rule_json
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.message import encode_payload, entry_fields
from rsmq.model.settings import Settings
from rsmq.model.words import duration
from rsmq.producer.publication import Preparation
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import LEAD_SCHEDULE, OK, PUBLISH_TICK
from rsmq.redis.topics import Topic, Topics

log = logging.getLogger("rsmq.schedule")

RETRY_AFTER: Final = 1.0
"""Seconds before a schedule that failed is tried again."""


class Scheduler:
    """Serves all schedules of one process.

    One process leads each schedule, by a lease. Invariant: each tick is published at most once, because the script that
    appends it also records it in the same slot; the lease only spares the other processes the work. All times are the
    server's.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, topics: Topics, member: str, schedules: Sequence[Schedule]
    ) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics
        self._member = member
        self._schedules = schedules
        self._ttl_ms = to_ms(settings.lease_ttl)
        self._stopping = anyio.Event()
        self._led: set[str] = set()
        self._ahead: set[str] = set()
        """Schedules whose last tick is ahead of the server's clock."""
        self.prepare: Preparation | None = None  # as of the producer of this process

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`. It then releases the schedules, so that another worker goes on at once."""
        task_status.started()
        async with anyio.create_task_group() as tasks:
            for schedule in self._schedules:
                tasks.start_soon(self._serve, schedule)
            if self._schedules:
                await self._stopping.wait()
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            for schedule in self._schedules:
                if schedule.name in self._led:
                    await self._release(schedule)

    def stop(self) -> None:
        """Publish nothing more."""
        self._stopping.set()

    async def _serve(self, schedule: Schedule) -> None:
        """One schedule. Its errors end here: each is logged, and the schedule is tried again."""
        while True:
            try:
                seconds = await self._publish_due(schedule)
            except BrokerError as error:
                log.warning("schedule %s waits: %s", schedule.name, error)
                seconds = RETRY_AFTER
            except Exception:  # from the user's function: the other schedules and the handlers continue
                log.exception("schedule %s failed and will be retried", schedule.name)
                seconds = RETRY_AFTER
            await anyio.sleep(seconds)

    async def _publish_due(self, schedule: Schedule) -> float:
        """Publish the due ticks if this process leads; returns the seconds until the next check."""
        topic, partition = await self._partition_of(schedule)
        args = (schedule.name, self._member, self._ttl_ms, rule_json(schedule.trigger))
        word, first, *rest = await LEAD_SCHEDULE(self._client, (self._keys.every(topic.name, partition),), args)
        if word != OK:
            self._led.discard(schedule.name)
            return float(min(first, self._ttl_ms)) / 1000
        if schedule.name not in self._led:
            log.info("%s publishes schedule %s", self._member, schedule.name)
            self._led.add(schedule.name)
        now, asked = rest
        self._note_clock(schedule, first - now)
        if asked and not await self._publish(schedule, topic, partition, asked, is_tick=False):
            return RETRY_AFTER
        found = due_ticks(schedule.trigger, schedule.missed, first, now, 2 * self._ttl_ms)
        if found.skipped:
            log.warning("schedule %s: ticks were missed, no worker ran; missed=%r", schedule.name, schedule.missed)
        for tick in found.ticks:
            if not await self._publish(schedule, topic, partition, tick):
                return RETRY_AFTER
        return float(min(found.next_ms - now, self._ttl_ms / 3)) / 1000  # each check also renews the lease

    def _note_clock(self, schedule: Schedule, ahead_ms: int) -> None:
        """Log it once if the clock was set back: the schedule seems to be dead until the clock has caught up."""
        if ahead_ms <= 2 * self._ttl_ms:
            self._ahead.discard(schedule.name)
        elif schedule.name not in self._ahead:
            self._ahead.add(schedule.name)
            log.warning(
                "schedule %s: the server's clock was set back, so its next tick comes after %s; `rsmq schedule "
                "run` publishes it beside its ticks", schedule.name, duration(timedelta(milliseconds=ahead_ms)),
            )  # fmt: skip

    async def _publish(
        self, schedule: Schedule, topic: Topic, partition: int, tick: int, *, is_tick: bool = True
    ) -> bool:
        """False if the topic is full. A payload of None publishes nothing; the tick counts as done.

        Not `is_tick`: an operator has asked for a run at this time. It has an id of its own.
        """
        payload = await payload_of(schedule, tick)
        fields: list[bytes | str] = []
        if payload is not None:
            data, kind = encode_payload(payload)
            message_id, headers = f"{schedule.message_id(tick)}{'' if is_tick else '-run'}", schedule.headers
            if self.prepare is not None:
                headers = self.prepare(topic.name, payload, headers, schedule.key, message_id=message_id)
            fields = entry_fields(data, message_id, schedule.key, kind, headers, schedule.expiry(tick))
        keys = (self._keys.stream(topic.name, partition), self._keys.every(topic.name, partition))
        args = (schedule.name, tick if is_tick else f"+{tick}", topic.max_length, topic.on_full, *fields)
        word = await PUBLISH_TICK(self._client, keys, args)
        if word == b"FULL":
            log.warning("schedule %s waits: topic %s is full", schedule.name, topic.name)
        return bool(word != b"FULL")

    async def _release(self, schedule: Schedule) -> None:
        with suppress(BrokerError):
            topic, partition = await self._partition_of(schedule)
            keys = (self._keys.every(topic.name, partition),)
            await LEAD_SCHEDULE(self._client, keys, (schedule.name, self._member, 0))
        self._led.discard(schedule.name)

    async def _partition_of(self, schedule: Schedule) -> tuple[Topic, int]:
        topic = await self._topics._lookup(schedule.topic)
        return topic, topic.open_block(schedule.band).partition_for(
            schedule.name if schedule.key is None else schedule.key
        )

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._schedules)} schedules, leads {sorted(self._led)}>"
