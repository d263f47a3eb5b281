"""The scheduler: publishes the ticks of a broker's schedules inside its workers; one worker leads each schedule."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from traceback import format_exception
from typing import Any, Final

import anyio
import anyio.abc
import anyio.to_thread

from rsmq.errors import BrokerError, ConfigError, PartitionSealed
from rsmq.handler.schedule import EncodedPayload, Schedule, Trigger, due_ticks, payload_of, read_rule, rule_json
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.keys import Keys
from rsmq.model.message import encode_payload, entry_fields
from rsmq.model.publish_options import check_size
from rsmq.model.schedule_run import RunResult, ScheduleRun, short_error
from rsmq.model.settings import Settings
from rsmq.model.words import count, duration
from rsmq.producer import Producer
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import LEAD_SCHEDULE, NOTE_RUN, OK, PUBLISH_TICK
from rsmq.redis.topics import Topic, Topics, lookup_topic

log = logging.getLogger("rsmq.schedule")

RETRY_AFTER: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds before a schedule that failed is tried again: after the first failure, and after many."""
LONGEST_TRACE: Final = 8000


@dataclass(frozen=True, slots=True)
class Led:
    """A schedule that this process leads now: where it publishes, by which rule, and what came before."""

    schedule: Schedule
    topic: Topic
    partition: int
    trigger: Trigger
    last: int
    now: int
    failures: int

    def report(self, tick: int, result: RunResult, began: float, **more: Any) -> ScheduleRun:
        """The report of a run that began at this time of the monotonic clock, and ends now."""
        seconds = monotonic() - began
        return ScheduleRun(tick, self.now, result, seconds=round(seconds, 3), attempts=self.failures, **more)


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
        self._limit = int(settings.payload_limit)
        self._stopping = anyio.Event()
        self._led: set[tuple[str, str]] = set()
        self._not_before: dict[tuple[str, str], float] = {}
        """When a schedule that has failed is tried again, by the monotonic clock."""
        self._ahead: set[tuple[str, str]] = set()
        """Schedules whose last tick is ahead of the server's clock."""
        self._producer: Producer | None = None

    def publish_by(self, producer: Producer | None) -> None:
        """Complete or refuse, encode and offload what is published as the producer of this process does."""
        self._producer = producer

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
                if schedule.full_name in self._led:
                    await self._release(schedule)

    def stop(self) -> None:
        """Publish nothing more."""
        self._stopping.set()

    async def _serve(self, schedule: Schedule) -> None:
        """One schedule. Its errors end here: each is logged, and the schedule is tried again.

        A leader that has failed for a lease lets another worker lead: it may have a right that this one lacks.
        """
        failing_since: float | None = None
        while True:
            try:
                seconds = await self._publish_due(schedule)
                failing_since = None
            except (BrokerError, ConfigError) as error:
                is_ours = isinstance(error, BrokerError)
                (log.warning if is_ours else log.error)("schedule %s waits: %s", schedule.name, error)
                seconds = RETRY_AFTER if is_ours else LONGEST_PAUSE
                failing_since = monotonic() if failing_since is None else failing_since
                lease = self._ttl_ms / 1000
                if schedule.full_name in self._led and monotonic() - failing_since >= lease:
                    await self._release(schedule)
                    seconds = 2 * lease
            await anyio.sleep(seconds)

    async def _publish_due(self, schedule: Schedule) -> float:
        """As `check`, and renew the lease in time."""
        seconds = await self.check(schedule)
        return min(seconds, self._ttl_ms / 3000) if schedule.full_name in self._led else seconds

    async def check(self, schedule: Schedule) -> float:
        """Publish the due ticks if this process leads; returns the seconds until there may be another one.

        Raises BrokerError, and ConfigError for a rule of an operator that cannot be read here.
        """
        topic, partition = await self._partition_of(schedule)
        args = (schedule.name, self._member, self._ttl_ms, rule_json(schedule.trigger), int(schedule.is_added))
        word, first, *rest = await LEAD_SCHEDULE(self._client, (self._keys.every(topic.name, partition),), args)
        if word != OK:
            self._led.discard(schedule.full_name)
            return float(min(first, self._ttl_ms)) / 1000
        if schedule.full_name not in self._led:
            log.info("%s publishes schedule %s", self._member, schedule.name)
            self._led.add(schedule.full_name)
        now, asked, paused, rule, failures = rest
        led = Led(schedule, topic, partition, self._trigger(schedule, rule), first, now, failures)
        self._note_clock(schedule, first - now)
        if asked and not await self._publish(led, asked, is_tick=False):
            return RETRY_AFTER
        pause = self._not_before.get(schedule.full_name, 0.0) - monotonic()
        if paused or pause > 0:
            return LONGEST_PAUSE if paused else pause
        policy = "latest" if failures else schedule.missed  # what has failed is tried until it works
        found = due_ticks(led.trigger, policy, first, now, 2 * self._ttl_ms)
        if found.missed is not None:
            why = "its runs failed" if failures else "no worker ran"
            log.warning(
                "schedule %s: ticks were missed, %s: %s in the last %s; missed=%r", schedule.name, why,
                count(found.skipped, "is not published", "are not published"),
                duration(timedelta(milliseconds=now - first)), schedule.missed,
            )  # fmt: skip
            await self._skip(led, found.missed, found.skipped, why)
        for tick in found.ticks:
            if not await self._publish(led, tick):
                return self._not_before[schedule.full_name] - monotonic()
        return float(found.next_ms - now) / 1000

    def _trigger(self, schedule: Schedule, rule: bytes) -> Trigger:
        """The rule that an operator has set, if one has and this process can read it."""
        if not rule:
            return schedule.trigger
        trigger = read_rule(rule.decode(errors="replace")).trigger
        if trigger is None:
            raise ConfigError(
                f"the rule that was set for it cannot be read here: `rsmq schedule set {schedule.topic} "
                f"{schedule.name} --reset` goes back to that of the code"
            )
        return trigger

    def _note_clock(self, schedule: Schedule, ahead_ms: int) -> None:
        """Log it once if the clock was set back: the schedule seems to be dead until the clock has caught up."""
        if ahead_ms <= 2 * self._ttl_ms:
            self._ahead.discard(schedule.full_name)
        elif schedule.full_name not in self._ahead:
            self._ahead.add(schedule.full_name)
            log.warning(
                "schedule %s: the server's clock was set back, so its next tick comes after %s; `rsmq schedule "
                "run` publishes it beside its ticks", schedule.name, duration(timedelta(milliseconds=ahead_ms)),
            )  # fmt: skip

    async def _skip(self, led: Led, tick: int, skipped: int, why: str) -> None:
        """Note ticks that are not published. They count as done."""
        run = ScheduleRun(tick, led.now, "missed", skipped=skipped, error=why)
        await self._record(led, str(tick), run, ())

    async def _publish(self, led: Led, tick: int, *, is_tick: bool = True) -> bool:
        """False if it has failed, or the topic is full. A payload of None publishes nothing; the tick counts as done.

        Not `is_tick`: an operator has asked for a run at this time. It has an id of its own.
        """
        schedule, began = led.schedule, monotonic()
        fields: list[bytes | str] = []
        message_id, body = "", None
        try:
            payload = await payload_of(schedule, tick)
            if payload is not None:
                is_added = isinstance(payload, EncodedPayload)
                data, kind, is_plain = payload if is_added else (*encode_payload(payload), False)
                message_id, headers = f"{schedule.message_id(tick)}{'' if is_tick else '-run'}", schedule.headers
                producer, extra = self._producer, schedule.expiry(tick)
                if producer is not None:
                    if producer.prepare is not None:
                        headers = producer.prepare(
                            led.topic.name, payload, headers, schedule.key, message_id=message_id
                        )
                    about = (led.topic.name, data, message_id, schedule.key, kind, extra)
                    data, extra, body = await producer.stored_form(*about, is_plain=is_plain)
                check_size(data, schedule.key, headers, self._limit)
                fields = entry_fields(data, message_id, schedule.key, kind, headers, extra)
        except BrokerError:
            raise
        except Exception as error:  # from the user's function: the other schedules and the handlers continue
            run = led.report(tick, "failed", began, error=short_error(error), is_asked=not is_tick)
            await self._note_failure(led, run, error)
            return False
        result: RunResult = "published" if fields else "nothing"
        run = led.report(tick, result, began, message_id=message_id, is_asked=not is_tick)
        word = await self._record(led, str(tick) if is_tick else f"+{tick}", run, fields)
        if body is not None and self._producer is not None:
            await self._producer.keep_body(body)
        if word != b"FULL":
            self._not_before.pop(schedule.full_name, None)
            return True
        run = led.report(tick, "full", began, error="the topic is full", is_asked=not is_tick)
        await self._note_failure(led, run, None)
        return False

    async def _record(self, led: Led, tick: str, run: ScheduleRun, fields: Sequence[bytes | str]) -> Any:
        """Publish a tick with its report, or only note it as done; the word of the script."""
        stream = self._keys.stream(led.topic.name, target_of(led.topic, led.schedule))
        keys = (stream, self._keys.every(led.topic.name, led.partition))
        limits = (led.topic.max_length, led.topic.on_full)
        args = (led.schedule.name, tick, *limits, run.as_line(), *fields)
        try:
            return await PUBLISH_TICK(self._client, keys, args)
        except PartitionSealed:
            await self._topics.find(led.topic.name)  # the next try goes to the partition that follows
            raise

    async def _note_failure(self, led: Led, run: ScheduleRun, error: Exception | None) -> None:
        """Keep a failure for operators, and wait longer after each. The log gets the traceback of the first one in a
        row, then a line at each doubling of their number."""
        name = led.schedule.name
        trace = "" if error is None else "".join(format_exception(error))[-LONGEST_TRACE:]
        run = replace(run, attempts=led.failures + 1)
        keys = (self._keys.every(led.topic.name, led.partition),)
        found = await NOTE_RUN(self._client, keys, (name, self._member, run.as_line(), trace))
        failures = found if isinstance(found, int) else led.failures + 1
        pause = min(RETRY_AFTER * 2 ** min(failures - 1, 10), LONGEST_PAUSE)
        if failures == 1:
            log.warning("schedule %s failed and will be retried: %s", name, run.error, exc_info=error)
        elif failures & (failures - 1) == 0:
            log.warning("schedule %s has failed %d times in a row: %s", name, failures, run.error)
        self._not_before[led.schedule.full_name] = monotonic() + pause

    async def _release(self, schedule: Schedule) -> None:
        with suppress(BrokerError):
            topic, partition = await self._partition_of(schedule)
            keys = (self._keys.every(topic.name, partition),)
            await LEAD_SCHEDULE(self._client, keys, (schedule.name, self._member, 0))
        self._led.discard(schedule.full_name)

    async def _partition_of(self, schedule: Schedule) -> tuple[Topic, int]:
        """The topic, and the partition that has its records: a resize leaves them where they are."""
        topic = await lookup_topic(self._topics, schedule.topic)
        return topic, topic.layout.root_of(target_of(topic, schedule))

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._schedules)} schedules, leads {sorted(self._led)}>"


def target_of(topic: Topic, schedule: Schedule) -> int:
    """The partition where a schedule publishes."""
    return topic.open_block(schedule.band).partition_for(schedule.name if schedule.key is None else schedule.key)
