"""The composition root: which roles one worker process has, how they are wired, in which order they end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import anyio
import anyio.to_thread

from rsmq.connect import Client, Connector, retrying
from rsmq.consumer.auditor import Auditor
from rsmq.consumer.consumer import Consumer
from rsmq.consumer.convoy import Convoy
from rsmq.consumer.delayer import Delayer
from rsmq.consumer.execution import build_call
from rsmq.consumer.lookout import Lookout
from rsmq.consumer.retention import Retention
from rsmq.errors import ConfigError
from rsmq.group import join_group
from rsmq.handler import Handler
from rsmq.heartbeat.beat import Beat
from rsmq.keys import Keys
from rsmq.middleware import Middleware
from rsmq.schedule import Every
from rsmq.stream import ensure_groups, start_id
from rsmq.ticker import Ticker
from rsmq.topic import Topic, Topics
from rsmq.vigil import Vigil

log = logging.getLogger("rsmq.worker")

Lifespan = Callable[[], AbstractAsyncContextManager[None]]


def new_member_id() -> str:
    """Unique per boot: two processes must never share a consumer name, or one reads what the other has in hand."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:40] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


class Worker:
    """Serves all handlers of a broker in this process.

    Life: `run` until `stop`. `quiet` takes nothing new but lets everything running finish; `stop` bounds that by the
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
        schedules: Sequence[Every] = (),
    ) -> None:
        if not (handlers or schedules):
            raise ConfigError("there is nothing to run: register a handler with @broker.handler(topic, group=...)")
        self.member = new_member_id()
        self.consumers: list[Consumer] = []
        self.beat: Beat | None = None
        self._connector, self._client, self._keys, self._settings = connector, client, keys, connector.settings
        self._handlers, self._middlewares, self._lifespans = handlers, middlewares, lifespans
        self._topics = Topics(client, keys, self._settings)
        self._ticker = Ticker(client, keys, self._settings, self._topics, self.member, schedules)
        self._convoy = Convoy(client)  # for what many handlers ask at the same time
        self._stops: list[float] = []

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`."""
        async with AsyncExitStack() as stack:
            for lifespan in self._lifespans:
                await stack.enter_async_context(lifespan())
            beat = await stack.enter_async_context(self._beating())
            pairs = [(handler, await self._prepared(handler)) for handler in self._handlers]
            self.consumers = [self._consumer(handler, topic, beat) for handler, topic in pairs]
            for grace in self._stops:
                self.stop(grace)
            async with anyio.create_task_group() as upkeep:
                await upkeep.start(self._convoy.run)
                upkeep.start_soon(self._delayer().run)
                upkeep.start_soon(self._retention().run)
                upkeep.start_soon(Lookout(self._settings, lambda: self.consumers).run)
                upkeep.start_soon(Vigil(self._client).run)
                upkeep.start_soon(self._auditor().run)
                async with anyio.create_task_group() as serving:
                    serving.start_soon(self._ticker.run)
                    for consumer in self.consumers:
                        serving.start_soon(consumer.run)
                    for consumer in self.consumers:
                        await consumer.started.wait()
                    log.info("member %s serves %s", self.member, ", ".join(map(repr, self._handlers)))
                    task_status.started()
                upkeep.cancel_scope.cancel()

    @asynccontextmanager
    async def _beating(self) -> AsyncIterator[Beat]:
        beat = Beat(self._connector, self._settings, self._keys, self.member)
        beat.start(asyncio.get_running_loop())
        self.beat = beat
        try:
            yield beat
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(beat.stop)

    async def _prepared(self, handler: Handler) -> Topic:
        """All of it may be repeated, so a line that breaks at the start only delays it."""
        async for attempt in retrying(self._settings):
            with attempt:
                topic = await self._prepare(handler)
        return topic

    async def _prepare(self, handler: Handler) -> Topic:
        topic = await self._topics.ensure(handler.topic, handler.partitions)
        await ensure_groups(self._client, self._keys, topic, handler.group, start_id(handler.start))
        await join_group(self._client, self._keys, topic, handler.group, handler.distribution)
        return topic

    def _consumer(self, handler: Handler, topic: Topic, beat: Beat) -> Consumer:
        call = build_call(handler, self._middlewares)
        return Consumer(
            self._client, self._keys, self._settings, self.member, topic, handler, call, beat, self._convoy.ask
        )

    def _delayer(self) -> Delayer:
        def partitions() -> list[tuple[str, int]]:
            held = {(lane.topic, lane.partition) for consumer in self.consumers for lane in consumer.lanes.values()}
            return sorted(held)

        return Delayer(self._client, self._keys, self._settings, partitions)

    def _retention(self) -> Retention:
        return Retention(self._client, self._keys, self._settings, self._topics, lambda: self.consumers)

    def _auditor(self) -> Auditor:
        return Auditor(self._client, self._keys, self._topics, lambda: self.consumers)

    @property
    def is_serving(self) -> bool:
        """Whether all handlers are being served, and nobody has said stop."""
        return bool(self.consumers) and not self._stops and all(each.started.is_set() for each in self.consumers)

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return bool(self._stops)

    def quiet(self) -> None:
        """Take nothing new; finish what runs, however long it takes; leave."""
        self.stop(float("inf"))

    def stop(self, grace: float | None = None) -> None:
        """Quiet, then cancel what still runs after `grace` seconds (default: the setting) and hand it back."""
        seconds = self._settings.stop_grace.total_seconds() if grace is None else grace
        self._stops.append(seconds)
        self._ticker.stop()
        for consumer in self.consumers:
            consumer.stop(seconds)

    def status(self) -> str:
        """What this member does, as JSON: for logs and the demo."""
        return json.dumps(
            {
                "member": self.member,
                "lanes": {repr(c.handler): sorted(c.lanes) for c in self.consumers},
                "stats": {repr(c.handler): dict(c.stats) for c in self.consumers},
            }
        )

    def __repr__(self) -> str:
        return f"<Worker {self.member} {len(self.consumers)} consumers>"
