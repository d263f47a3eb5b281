"""The composition root: the roles of one worker process, how they are connected, and in which order they end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final

import anyio
import anyio.to_thread

from rsmq.consumer.consumer import Consumer
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.errors import ConfigError
from rsmq.handler.handler import Handler
from rsmq.handler.middleware import Middleware
from rsmq.handler.schedule import Schedule
from rsmq.handler.service import Service
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.membership import refuse_mixed_ordering
from rsmq.heartbeat.worker_log import WorkerLog
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.interrupt import signal_errors_marked
from rsmq.model.keys import Keys
from rsmq.model.member import STOP, new_member_id
from rsmq.producer import Producer
from rsmq.redis.client.connector import Client, Connector, retrying
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.server_context import ServerContext
from rsmq.redis.streams import ensure_groups, join_group, start_id
from rsmq.redis.topics import Declaration, Topic, Topics
from rsmq.worker.added_schedules import AddedSchedules
from rsmq.worker.auditor import Auditor
from rsmq.worker.band_opener import BandOpener
from rsmq.worker.batch_ends import BatchEnds
from rsmq.worker.delayed_poller import DelayedPoller
from rsmq.worker.eviction_monitor import EvictionMonitor
from rsmq.worker.retention import Retention
from rsmq.worker.row_actions import WorkerRowActions
from rsmq.worker.scheduler import Scheduler
from rsmq.worker.services import Services
from rsmq.worker.strays import StrayMover

log = logging.getLogger("rsmq.worker")

COUNTED_EVERY: Final = 0.1
"""Seconds between two looks at how many messages are settled."""

Lifespan = Callable[[], AbstractAsyncContextManager[Any]]


class Worker:
    """Serves all handlers of a broker in this process.

    `run` lasts until `stop`. `quiet` fetches nothing new and lets running handlers finish; `stop` bounds that by the
    grace; a second `stop` ends at once.
    """

    def __init__(
        self,
        connector: Connector,
        client: Client,
        keys: Keys,
        handlers: Sequence[Handler],
        middlewares: Sequence[Middleware],
        lifespans: Sequence[Lifespan],
        schedules: Sequence[Schedule] = (),
        services: Sequence[Service] = (),
        max_messages: int | None = None,
        declared: Callable[[str], Declaration] = lambda _: Declaration(),
        encoding: Encoding = NO_CODECS,
    ) -> None:
        if not (handlers or schedules or services):
            raise ConfigError("there is nothing to run: register a handler with @broker.handler(topic, group=...)")
        self.member = new_member_id()
        self.consumers: list[Consumer] = []
        self.heartbeat: Heartbeat | None = None
        self.producer: Producer | None = None
        """Encodes the outputs of handlers. The broker sets it."""
        self._connector = connector
        self._client = client
        self._keys = keys
        self._settings = connector.settings
        self._handlers = handlers
        self._middlewares = middlewares
        self._lifespans = lifespans
        self._topics = Topics(client, keys, self._settings, declared)
        self._scheduler = Scheduler(client, keys, self._settings, self._topics, self.member, schedules)
        actions = WorkerRowActions(lambda: self.producer, client, keys, self._settings, self._topics)
        about = ServerContext(client, keys, self._settings, self._topics, self.member, actions)
        self._services = Services(services, about)
        self._added_schedules = AddedSchedules(about, self._scheduler.check, encoding)
        self._log = WorkerLog(len(handlers))
        self._batcher = ScriptBatcher(client)  # for scripts that many handlers call at the same time
        self._max_messages = max_messages
        self._encoding = encoding
        self.is_exhausted = False
        """Whether it stops because it has settled as many messages as it may."""
        self._stops: list[float] = []
        self._ended_members: list[str] = []

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`."""
        async with AsyncExitStack() as stack:
            stack.enter_context(signal_errors_marked())
            for lifespan in self._lifespans:
                await stack.enter_async_context(lifespan())
            heartbeat = await stack.enter_async_context(self._running_heartbeat())
            await self._services.claim()
            pairs = [(handler, await self._prepared(handler)) for handler in self._handlers]
            self.consumers = [self._consumer(handler, topic, heartbeat) for handler, topic in pairs]
            self._log.watch([consumer.stats for consumer in self.consumers])
            for grace in self._stops:  # they came before there was anything to stop
                self._stop_consumers(grace)
            for member in self._ended_members:
                self.member_ended(member)
            async with anyio.create_task_group() as upkeep:
                await upkeep.start(self._batcher.run)
                for role in self._roles():
                    upkeep.start_soon(role)
                async with anyio.create_task_group() as serving:
                    self._scheduler.publish_by(self.producer)
                    serving.start_soon(self._scheduler.run)
                    serving.start_soon(self._services.run)
                    for consumer in self.consumers:
                        serving.start_soon(consumer.run)
                    for consumer in self.consumers:
                        await consumer.started.wait()
                    log.info("member %s serves %s", self.member, ", ".join(map(repr, self._handlers)))
                    task_status.started()
                upkeep.cancel_scope.cancel()
            self._log.flush()

    @asynccontextmanager
    async def _running_heartbeat(self) -> AsyncIterator[Heartbeat]:
        heartbeat = Heartbeat(self._connector, self._settings, self._keys, self.member, self._end_at_request)
        heartbeat.start(asyncio.get_running_loop())
        self.heartbeat = heartbeat
        try:
            yield heartbeat
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(heartbeat.stop)

    async def _prepared(self, handler: Handler) -> Topic:
        """Every step may be repeated, so a connection that breaks during the start only delays it."""
        async for attempt in retrying(self._settings):
            with attempt:
                topic = await self._topics.ensure(handler.topic, handler.partitions)
                await ensure_groups(self._client, self._keys, topic, handler.group, start_id(handler.start))
                await join_group(self._client, self._keys, topic, handler.group, handler.distribution)
                about = (topic.name, handler.group, self.member, handler.ordering)
                await refuse_mixed_ordering(self._client, self._keys, *about)
        return topic

    def _consumer(self, handler: Handler, topic: Topic, heartbeat: Heartbeat) -> Consumer:
        context = ConsumerContext(
            self._client, self._keys, self._settings, self.member, topic, handler, producer=self.producer,
            worker_log=self._log, encoding=self._encoding,
        )  # fmt: skip
        return Consumer(context, self._middlewares, heartbeat, self._batcher.ask)

    def _roles(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """The roles that run once for all consumers; they end after the consumers."""
        client, keys, settings = self._client, self._keys, self._settings
        return [
            DelayedPoller(client, keys, settings, self._partitions, self._topics).run,
            Retention(client, keys, settings, self._topics, self.consumers).run,
            EvictionMonitor(client).run,
            Auditor(client, keys, self._topics, self.consumers).run,
            StrayMover(client, keys, self._topics, self.consumers).run,
            BandOpener(self._topics, self.consumers).run,
            *self._sweeper(),
            BatchEnds(client, keys, self._topics, self.consumers).run,
            self._added_schedules.run,
            self._monitor_leases,
            *(() if self._max_messages is None else (partial(self._count_messages, self._max_messages),)),
        ]

    def _sweeper(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """The role of a broker with a store of its own class for large bodies."""
        if self._encoding.bodies is None:
            return []
        role: Callable[[], Coroutine[Any, Any, None]]
        role = import_module("rsmq.worker.body_sweeper").BodySweeper(
            self._client, self._keys, self._topics, self._encoding.bodies
        ).run  # fmt: skip
        return [role]

    def _partitions(self) -> list[tuple[str, int]]:
        return sorted({(lane.topic, lane.partition) for each in self.consumers for lane in each.lanes.values()})

    async def _monitor_leases(self) -> None:
        """Wake the consumers that have a lost lease: one timer for all handlers, where each would need its own.

        A lease ends by the clock or because another role found it lost. Neither calls the consumer.
        """
        while True:
            await anyio.sleep(self._settings.presence_interval.total_seconds())
            for consumer in self.consumers:
                if not all(lane.lease.is_held() for lane in consumer.lanes.values()):
                    consumer.membership.wake()

    async def _count_messages(self, most: int) -> None:
        """Stop as by `quiet` when so many messages are settled."""
        while sum(consumer.stats["settled"] for consumer in self.consumers) < most:
            await anyio.sleep(COUNTED_EVERY)
        log.info("member %s has settled %d messages: it stops, as it was told to", self.member, most)
        self.is_exhausted = True
        self.quiet()

    def refused(self) -> list[str]:
        """What the server has refused for a lease, and why. From any thread."""
        return self._connector.refusals.standing(self._settings.lease_ttl.total_seconds())

    @property
    def is_serving(self) -> bool:
        """Whether all handlers are served and no stop was requested."""
        return bool(self.consumers) and not self._stops and all(each.started.is_set() for each in self.consumers)

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return bool(self._stops)

    def member_ended(self, member: str) -> None:
        """The process of another member has ended, says the parent process of both."""
        if not self.consumers:
            self._ended_members.append(member)
        for consumer in self.consumers:
            consumer.membership.ended(member)

    def quiet(self) -> None:
        """Fetch nothing new, let running handlers finish without a deadline, then end."""
        self.stop(float("inf"))

    def _end_at_request(self, word: str) -> None:
        """An operator wants this process to end."""
        log.warning("member %s ends, because an operator has asked for that (%s)", self.member, word)
        if word == STOP:
            self.stop()
        else:
            self.quiet()

    def stop(self, grace: float | None = None) -> None:
        """Like `quiet`, but after `grace` seconds (default: the setting) cancel handlers and hand messages back."""
        seconds = self._settings.stop_grace.total_seconds() if grace is None else grace
        self._stops.append(seconds)
        self._scheduler.stop()
        self._services.stop()
        self._stop_consumers(seconds)

    def _stop_consumers(self, grace: float) -> None:
        for consumer in self.consumers:
            consumer.stop(grace)

    def __repr__(self) -> str:
        return f"<Worker {self.member} {len(self.consumers)} consumers>"


def refuse_handler_process() -> None:
    """Raise ConfigError in the process of a handler while it imports the main module of its program."""
    if "__main__" not in sys.modules:  # see `import_program` of the handler's process
        raise ConfigError(
            "a handler with execution='process' imports your program in its process, and there it would publish or run "
            'the broker again: put the lines that do so under `if __name__ == "__main__":`'
        )
