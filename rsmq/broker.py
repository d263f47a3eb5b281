"""The object a user holds: handlers are registered on it, messages published through it, workers run from it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar, Unpack

import anyio

from rsmq.connect import Client
from rsmq.connection import Connection, MakeProducer, SharedConnection, connection
from rsmq.dlq import DeadLetters
from rsmq.errors import ConfigError
from rsmq.group import reset_group, set_paused
from rsmq.keys import Keys
from rsmq.middleware import Middleware
from rsmq.override import Overrides
from rsmq.persistence import Devices, Feed, Session
from rsmq.portal import Portal
from rsmq.producer import Producer
from rsmq.retry import RetryPolicy
from rsmq.router import Router
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics
from rsmq.worker import Lifespan, Worker

log = logging.getLogger("rsmq")

T = TypeVar("T")


class Broker(Router):
    """Publishes messages and runs handlers, on the server that the settings name.

    `async with broker:` connects (without RSMQ_URL it starts or joins this project's embedded server). Everything the
    constructor and the decorators do is local: a wrong name or signature fails here, before anything is touched.
    """

    def __init__(self, settings: Settings | None = None, **overrides: Unpack[Overrides]) -> None:
        super().__init__()
        self.settings = Settings(**overrides) if settings is None else settings
        self.keys = Keys(self.settings.prefix)
        self._lifespans: list[Lifespan] = []
        self._shared = SharedConnection(self._make_connection)
        self._open: Connection | None = None
        self._worker: Worker | None = None
        self._portal = Portal()
        self.declared: Callable[[str], int | None] = self.partitions_of
        self.make_producer: MakeProducer = Producer

    # -- registering ----------------------------------------------------------------------------------------------

    def deliver(
        self,
        topic: str,
        *,
        to: Callable[..., Any],
        group: str = "devices",
        payload: Any = Any,
        expiry: timedelta | None = None,
        partitions: int | None = None,
        batch: int = 500,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Feed device inboxes from `topic`: a group like any other, whose workers store each message for its devices.

        `to` is called like a handler, by its annotations, and returns a device id, several, or None; the parameter of
        a lambda gets the payload, decoded as `payload`. Every message reaches each device once, in stream order of its
        partition, through crashes, retries and resets of the group. `expiry` counts from publishing.
        """
        policy = RetryPolicy() if retry is None else retry
        feed = Feed(to, group, payload, expiry, policy, lambda: self._connection.office.post)
        self.handler(
            topic, group=group, ordering="partition", retry=policy, batch=batch, partitions=partitions
        )(feed)  # fmt: skip

    def lifespan(self, function: Lifespan) -> Lifespan:
        """Register an `@asynccontextmanager` function that surrounds the life of every worker of this broker."""
        self._lifespans.append(function)
        return function

    @contextmanager
    def pointed_at(self, settings: Settings, *, around: Middleware | None = None) -> Iterator[Self]:
        """Work with other settings inside the block, for tests: another server, another prefix.

        `around` is a middleware for the block, outside all others. Raises ConfigError while the broker is in use.
        """
        if self._shared.users or self._portal.is_open:
            raise ConfigError("the broker is connected: point it elsewhere before `async with broker:` or publish_sync")
        before = (self.settings, self.keys, list(self._middlewares))
        self.settings, self.keys = settings, Keys(settings.prefix)
        self._middlewares[:0] = [] if around is None else [around]
        try:
            yield self
        finally:
            self._portal.close()
            self.settings, self.keys, self._middlewares = before

    # -- connecting -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            self._open = await self._shared.enter()
        except BaseException:
            if not self._shared.users:  # who was connected has left meanwhile
                self._open = None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._shared.users == 1:
            self._open = None
        await self._shared.leave()

    def _make_connection(self) -> AbstractAsyncContextManager[Connection]:
        return connection(
            self.settings, self.keys, declared=self.declared, make_producer=self.make_producer,
            publishes_only=not self.handlers,
        )  # fmt: skip

    @property
    def _connection(self) -> Connection:
        if self._open is None:
            raise ConfigError("the broker is not connected: do this inside `async with broker:`")
        return self._open

    @property
    def client(self) -> Client:
        """The connected client, for what rsmq has no method for. Replies are raw."""
        return self._connection.client

    @property
    def url(self) -> str:
        """Where it is connected to."""
        return self._connection.connector.url

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
    ) -> str:
        """Store one message and return its id, when the server has confirmed it.

        Calls made at the same time share one write. With `message_id` it is stored once however often it is published
        inside the dedup window. Raises TooLarge, TopicFull, BrokerUnavailable (not stored), PublishUnknown (perhaps
        stored: publish again with its `message_id`).
        """
        return await self._connection.producer.publish(
            topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
            wait_replicas=wait_replicas,
        )  # fmt: skip

    async def publish_many(
        self,
        topic: str,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        headers: Mapping[str, str] | None = None,
        batch: int = 500,
    ) -> list[str]:
        """Store many messages, in the order given per key, one call per partition and batch; returns their ids."""
        return await self._connection.producer.publish_many(topic, items, key=key, headers=headers, batch=batch)

    def publish_sync(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
    ) -> str:
        """`publish` for code without an event loop: scripts, Django, Flask. Keeps one connection in a thread.

        Safe from any number of threads, and after a fork (a server that loads the application before it forks).
        """
        portal = self._portal.open(self._twin)
        options: dict[str, Any] = {
            "key": key, "headers": headers, "delay": delay, "at": at, "message_id": message_id,
            "wait_replicas": wait_replicas,
        }  # fmt: skip
        return str(portal.call(lambda broker: broker.publish(topic, payload, **options)))

    def _twin(self) -> Broker:
        """Another broker that publishes alike."""
        twin = Broker(self.settings)
        twin.make_producer, twin.declared = self.make_producer, self.declared
        return twin

    @property
    def producer(self) -> Producer | None:
        """What publishes while the broker is connected, with its counts."""
        return None if self._open is None else self._open.producer

    # -- devices --------------------------------------------------------------------------------------------------

    async def send(
        self,
        client_id: str,
        payload: Any,
        *,
        topic: str = "",
        headers: Mapping[str, str] | None = None,
        expiry: timedelta | None = None,
    ) -> None:
        """Store one letter for a device, connected or not. When this has returned, the server has it.

        Calls made at the same time share one write. It is kept until the device acknowledges it, it expires, or newer
        ones need its place (RSMQ_INBOX_LIMIT). Raises TooLarge, BrokerUnavailable (it may or may not be stored).
        """
        await self._connection.office.post.send(client_id, payload, topic, headers, expiry)

    async def send_many(
        self,
        letters: Iterable[tuple[str, Any]],
        *,
        topic: str = "",
        headers: Mapping[str, str] | None = None,
        expiry: timedelta | None = None,
    ) -> None:
        """Store many letters, given as (client id, payload), in the order given per device, many in one write."""
        await self._connection.office.post.send_many(letters, topic, headers, expiry)

    def connect(self, client_id: str, *, clean: bool = False, window: int = 100, auto_ack: bool = False) -> Session:
        """A session of a device: `async with` opens it and shuts out its previous one, `async for` yields letters.

        At most `window` letters are out unacknowledged. `clean` starts with an empty inbox. With `auto_ack` a letter
        is acknowledged when the next one is asked for, or the loop is left without an error.
        """
        return self._connection.office.connect(client_id, clean=clean, window=window, auto_ack=auto_ack)

    @property
    def devices(self) -> Devices:
        """The devices: list, look into their inboxes, purge."""
        return Devices(self.client, self.keys)

    # -- asking and steering --------------------------------------------------------------------------------------

    @property
    def topics(self) -> Topics:
        """The topics: find, list, change their limits, delete."""
        return self._connection.topics

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of all groups: list, replay, purge."""
        return DeadLetters(self.client, self.keys)

    async def reset_group(self, topic: str, group: str, to: str | datetime = "earliest") -> None:
        """Let a group handle a topic again from `to`: `earliest`, `latest`, a stream id, or a time (topic replay).

        Works while its workers run. What was pending or waits for a retry belongs to the old run and is dropped.
        """
        await reset_group(self.client, self.keys, await self._existing(topic), group, to)

    async def pause_group(self, topic: str, group: str) -> None:
        """Stop delivering to a group, in all its workers, until `resume_group`."""
        await set_paused(self.client, self.keys, (await self._existing(topic)).name, group, paused=True)

    async def resume_group(self, topic: str, group: str) -> None:
        """Deliver to a paused group again."""
        await set_paused(self.client, self.keys, (await self._existing(topic)).name, group, paused=False)

    async def _existing(self, topic: str) -> Topic:
        found = await self.topics.find(topic)
        if found is None:
            raise ConfigError(f"there is no topic {topic!r}: see `rsmq topic list`")
        return found

    # -- working --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the handlers in this process until `stop` or cancellation."""
        async with self:
            worker = Worker(
                self._connection.connector, self.client, self.keys, self.handlers, self._middlewares, self._lifespans,
                self.schedules,
            )  # fmt: skip
            self._worker = worker
            try:
                await worker.run(task_status=task_status)
            finally:
                self._worker = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """The worker beside your own code, as in a FastAPI lifespan: stops gracefully at the end of the block."""
        ended = anyio.Event()

        async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            try:
                await self.run(task_status=task_status)
            finally:
                ended.set()

        async with self, anyio.create_task_group() as tasks:
            await tasks.start(run)
            try:
                yield self
            finally:
                self.stop()
                with anyio.CancelScope(shield=True):  # also when the block ends with an error
                    await ended.wait()

    @property
    def worker(self) -> Worker | None:
        """The worker that runs now, if any."""
        return self._worker

    def quiet(self) -> None:
        """Take nothing new; finish what runs."""
        if self._worker is not None:
            self._worker.quiet()

    def stop(self, grace: timedelta | None = None) -> None:
        """Take nothing new; cancel and hand back what still runs after the grace."""
        if self._worker is not None:
            self._worker.stop(None if grace is None else grace.total_seconds())

    def __repr__(self) -> str:
        return f"<Broker {len(self.handlers)} handlers{' connected' if self._open else ''}>"
