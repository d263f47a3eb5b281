"""The object a user holds: it registers handlers, publishes messages and runs the worker of this process."""

from __future__ import annotations

import logging
import weakref
from asyncio import _get_running_loop
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, Unpack, overload

import anyio

from rsmq import dlq, persistence, worker
from rsmq.broker.commands import Commands
from rsmq.broker.connection import Connection, MakeProducer, SharedConnection, connection
from rsmq.broker.portal import Portal
from rsmq.broker.publishing import Publishing
from rsmq.broker.requests import Requesting, replying
from rsmq.broker.results import Results
from rsmq.broker.typed_topic import Problems, TypedTopic, refusing
from rsmq.errors import OTHER_LOOP, ConfigError
from rsmq.handler.handler import Handler, build_handler
from rsmq.handler.lifespan import OpenedLifespan
from rsmq.handler.middleware import Middleware
from rsmq.handler.retry import RetryPolicy
from rsmq.handler.router import Router
from rsmq.handler.selection import Serving
from rsmq.handler.service import Belongs, OnRow, Service
from rsmq.model.body import Offloading
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.encoding import Codec, Encoding
from rsmq.model.keys import Keys
from rsmq.model.layout import checked_bands
from rsmq.model.message_ref import MessageRef
from rsmq.model.own_tasks import Beside, raise_only
from rsmq.model.publish_options import PublishOptions
from rsmq.model.settings import Overrides, Settings, chosen_settings
from rsmq.model.words import count
from rsmq.producer import BeforePublish, Producer
from rsmq.producer.publication import check_function, checked_headers, preparation
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Declaration, Topics
from rsmq.redis.wire.url import database_of

log = logging.getLogger("rsmq")

T = TypeVar("T")
B = TypeVar("B", bound=BeforePublish)


class Broker(Router, Publishing, Requesting, Commands, Results):
    """Publishes messages and runs handlers, on the server that the settings name.

    Pass a URL, `Settings`, or settings by name: `Broker("redis://localhost", lease_ttl="10s")`. The environment
    (RSMQ_*) gives the others; without any URL it uses the project's embedded server. `async with broker:` connects. The
    constructor and the decorators do not: a wrong name, option or signature raises ConfigError where it is written.
    Each message that it publishes gets `headers`; those of a call come before them. `codecs` compress and encrypt its
    payloads, and read those of others: `codecs=[Zstd(), Encrypt(Keyring.from_env("RSMQ_KEYS"))]` of `rsmq.codecs`.
    With `offload=Offload("s3://bucket/folder")` large payloads lie in a store, and their messages say where.
    """

    def __init__(
        self,
        settings: Settings | str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        codecs: Sequence[Codec] = (),
        offload: Offloading | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        super().__init__()
        self._headers = checked_headers(headers)
        self._before_publish = list[BeforePublish]()
        self._problems: Problems = {}
        self.settings = chosen_settings(settings, overrides)
        self._codecs = tuple(codecs)
        self._offload = offload
        self.encoding = Encoding(self._codecs, int(self.settings.decoded_limit), offload)
        self.keys = Keys(self.settings.prefix, database_of(self.settings.url))
        self._typed_topics: dict[str, Any] = {}
        self._lifespans: list[worker.Lifespan] = []
        self._shared = SharedConnection(self._make_connection)
        self._open: Connection | None = None
        self.worker: worker.Worker | None = None
        """The running worker, or None."""
        self.failure: Exception | None = None
        """The error that ended the last worker, or None."""
        self._is_stopped_early = False
        self._runs = False
        self.cancelled = Counter()
        self._portal = Portal(self._publisher)
        self._bands: dict[str, tuple[str, ...]] = {}
        self.declared: Callable[[str], Declaration] = self._declaration_of
        self.make_producer: MakeProducer = Producer

    # -- registering ----------------------------------------------------------------------------------------------

    @overload
    def topic(self, name: str, payload: type[T], *, bands: Sequence[str] = ()) -> TypedTopic[T]: ...
    @overload
    def topic(self, name: str, payload: Any, *, bands: Sequence[str] = ()) -> TypedTopic[Any]: ...
    def topic(self, name: str, payload: Any, *, bands: Sequence[str] = ()) -> TypedTopic[Any]:
        """A topic whose payloads are of one type: `orders = broker.topic("orders", Order)`.

        Then `await orders.publish(order)` and `@orders.handler(group="billing")` are checked by mypy and pyright. For a
        union write `orders: TypedTopic[Order | Refund] = broker.topic("orders", Order | Refund)`.

        `bands`, the most urgent first and `normal` among them, such as `("urgent", "normal", "bulk")`: a message that
        is published with `band="urgent"` does not wait behind those of the other bands, however many there are. The
        topic gets the bands that it does not have, also while it is in use; none is taken away.
        """
        if bands:
            self._bands[name] = checked_bands(bands)
        topic: TypedTopic[Any] = TypedTopic(self, self._add, name, payload)
        self._typed_topics[name] = payload
        return topic

    def deliver(
        self,
        topic: str,
        *,
        to: Callable[..., Any],
        group: str = "devices",
        payload: Any = Any,
        expires: Duration | None = None,
        partitions: int | None = None,
        batch: int = 500,
        retry: RetryPolicy | None = None,
        plain: bool = False,
    ) -> None:
        """Store each message of `topic` in the inboxes of its devices. `group` is a group like any other.

        `to` is called like a handler, by its annotations, and returns a device id, several, or None; the parameter of
        a lambda gets the payload, decoded as `payload`. Every message reaches each device once, in stream order of its
        partition, through crashes, retries and resets of the group. Letters expire `expires` after publishing.
        `partitions`, `batch` and `retry` are those of `handler`. A letter is encoded as its message is, and decoded
        where it is read: by a session of a broker with the codecs. With `plain=True` it lies in the server as it was
        published, for devices that read their inbox without a key.
        """
        policy = RetryPolicy() if retry is None else retry
        feed = persistence.Feed(
            to, group, payload, expires, policy, lambda: self._connection.inboxes.writer, self.encoding, is_plain=plain
        )  # fmt: skip
        made = build_handler(
            feed, self._prefixed(topic), group=group, ordering="partition", retry=policy, batch=batch,
            partitions=partitions,
        )  # fmt: skip
        self._add(replace(made, stores_letters=True))

    def lifespan(self, function: Callable[[], AbstractAsyncContextManager[T]]) -> OpenedLifespan[T]:
        """Register an `@asynccontextmanager` function; each worker of this broker runs inside it.

        What it yields is for handlers: `pool: Annotated[Pool, Depends(pool.value)]`, if the function is called pool.
        """
        if not callable(function):
            raise ConfigError(
                f"{function!r} is not a lifespan: pass an @asynccontextmanager function without arguments"
            )
        self._refuse_late(f"lifespan {getattr(function, '__name__', function)}")
        opened = OpenedLifespan(function)
        self._lifespans.append(opened)
        return opened

    def before_publish(self, function: B) -> B:
        """Call `function(publication)` before each message of this broker is encoded: middleware for publishing.

        It may change `publication.headers`, or refuse the message with an error, which the caller gets. It is a plain
        function, must not block, and returns nothing. Several run in the order of their registration.
        """
        check_function(function)
        self._refuse_connected(f"register before_publish {getattr(function, '__name__', function)}")
        self._before_publish.append(function)
        return function

    def _declaration_of(self, topic: str) -> Declaration:
        """What the code says about a topic."""
        return Declaration(self._partitions_of(topic), self._bands.get(topic, ()))

    def _add(self, handler: Handler) -> None:
        super()._add(replying(self, handler) if handler.replies else handler)
        if handler.problem_of is not None:
            self._problems[handler.topic, handler.signature.payload] = handler.problem_of

    def _refuse_connected(self, what: str) -> None:
        if self._shared.users or self._portal.is_open:
            raise ConfigError(f"the broker is connected: {what} before `async with broker:` or publish_sync")

    def _refuse_late(self, what: str) -> None:
        """A worker serves what was registered when its lifespans had begun: the rest would be silently missing."""
        if self.worker is not None and self.worker.heartbeat is not None:
            raise ConfigError(f"{what} comes too late, the worker runs already: register it before `run` or `running`")
        super()._refuse_late(what)

    # -- connecting -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            self._open = await self._shared.enter()
        except BaseException:
            if not self._shared.users:  # the other users have left meanwhile
                self._open = None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._shared.users == 1:
            self._open = None
        await self._shared.leave()

    def _make_connection(self) -> AbstractAsyncContextManager[Connection]:
        worker.refuse_handler_process()
        return connection(
            self.settings, self.keys, declared=self.declared, make_producer=self._prepared_producer,
            publishes_only=not self.handlers, encoding=self.encoding,
        )  # fmt: skip

    def _prepared_producer(self, client: Client, keys: Keys, settings: Settings, topics: Topics) -> Producer:
        producer = self.make_producer(client, keys, settings, topics)
        checks = [refusing(self._problems)] if self._problems else []
        producer.prepare = preparation(self._headers, [*self._before_publish, *checks])
        producer.encode_by(self.encoding or None)
        return producer

    @property
    def _connection(self) -> Connection:
        opened = self._open
        if opened is None:
            raise ConfigError("the broker is not connected: do this inside `async with broker:`")
        if opened.loop is not _get_running_loop() is not None:
            raise ConfigError(OTHER_LOOP)
        return opened

    @property
    def client(self) -> Client:
        """The connected client, for what rsmq has no method for. Replies are raw."""
        return self._connection.client

    @property
    def url(self) -> str:
        """The URL of the server it is connected to."""
        return self._connection.connector.url

    # -- publishing -----------------------------------------------------------------------------------------------

    def publish_sync(self, topic: str, payload: Any, **options: Unpack[PublishOptions]) -> MessageRef:
        """`publish` for code without an event loop: scripts, Django, Flask. Keeps one connection in a thread.

        Takes the options of `publish`. Safe from any number of threads, and after a fork (a server that loads the
        application before it forks).
        """
        ref: MessageRef = self._portal.call(lambda broker: broker.publish(topic, payload, **options))
        return ref

    def _publisher(self) -> Broker:
        """A second broker for the thread of `publish_sync`, with the same settings, tracing and partitions."""
        publisher = Broker(self.settings, headers=self._headers, codecs=self._codecs, offload=self._offload)
        publisher._before_publish = self._before_publish
        publisher._problems = self._problems
        publisher.make_producer = self.make_producer
        user = weakref.ref(self)  # a thread that held the broker would keep it for ever

        def declared(topic: str) -> Declaration:
            broker = user()
            return Declaration() if broker is None else broker.declared(topic)

        publisher.declared = declared
        return publisher

    @property
    def _producer(self) -> Producer | None:
        """The producer of the connection, with its counts; None while the broker is not connected."""
        return None if self._open is None else self._open.producer

    # -- devices --------------------------------------------------------------------------------------------------

    async def send(
        self,
        client_id: str,
        payload: Any,
        *,
        topic: str = "",
        headers: Mapping[str, str] | None = None,
        expires: Duration | None = None,
    ) -> None:
        """Store one letter for a device, connected or not. When this returns, the server has confirmed the letter.

        Calls made at the same time share one write. The letter is kept until the device acknowledges it, it expires
        (`expires`, at most RSMQ_INBOX_TTL), or newer ones push it out of a full inbox (RSMQ_INBOX_LIMIT). Raises
        TooLarge, NotJson, or BrokerUnavailable (the letter may be stored).
        """
        await self._connection.inboxes.writer.send(client_id, payload, topic, headers, expires)

    async def send_many(
        self,
        letters: Iterable[tuple[str, Any]],
        *,
        topic: str = "",
        headers: Mapping[str, str] | None = None,
        expires: Duration | None = None,
    ) -> None:
        """Store many letters, given as (client id, payload) pairs, in the order given per device."""
        await self._connection.inboxes.writer.send_many(letters, topic, headers, expires)

    def connect(
        self, client_id: str, *, clean: bool = False, window: int = 100, auto_ack: bool = False
    ) -> persistence.Session:
        """A session of a device: `async with` opens it and ends its previous one, `async for` yields letters.

        At most `window` yielded letters are unacknowledged. `clean` starts with an empty inbox. With `auto_ack` a
        letter is acknowledged when the loop asks for the next one, or ends without an error.
        """
        return persistence.Session(self._connection.inboxes, client_id, clean=clean, window=window, auto_ack=auto_ack)

    @property
    def devices(self) -> persistence.Devices:
        """The devices: list them, read their inboxes, purge."""
        return persistence.Devices(self.client, self.keys, self.encoding)

    # -- administration -------------------------------------------------------------------------------------------

    @property
    def topics(self) -> Topics:
        """The topics: find, list, change their limits, delete."""
        return self._connection.topics

    @property
    def dead_letters(self) -> dlq.DeadLetters:
        """The dead letters of all groups: list, replay, purge."""
        return dlq.DeadLetters(self.client, self.keys, self.encoding)

    # -- running --------------------------------------------------------------------------------------------------

    async def run(
        self,
        *,
        only: Iterable[str] = (),
        concurrency: int | None = None,
        max_messages: int | None = None,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Connect and run the handlers in this process until `stop` or cancellation.

        It takes no signals: they are your program's. If that takes none either, SIGTERM ends it at once, and what runs
        is repeated. `rsmq worker` stops gracefully.

        `only`: patterns such as `sms/*` for the `topic/group` of the handlers to serve (all); schedules and outboxes
        run in every worker. `concurrency` takes the place of that of each handler. After `max_messages` it stops by
        itself, as by `quiet`: for handlers whose libraries keep memory. Raises ConfigError while it runs already.
        """
        serving = Serving(tuple(only), concurrency, max_messages)
        if self._runs:  # `stop` would reach one of two workers, and the other one would run for ever
            raise ConfigError(
                "this broker runs its handlers already: call `run` or `running` once, for example in the lifespan of "
                "the application, or make another Broker"
            )
        self._runs = True
        self.failure = None
        self._is_stopped_early = False
        try:
            await self._run(serving, task_status)
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._runs = False

    async def _run(self, serving: Serving, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self:
            if self._is_stopped_early:
                task_status.started()
                return
            self.worker = running = worker.Worker(
                self._connection.connector, self.client, self.keys, serving.chosen(self.handlers), self._middlewares,
                self._lifespans, self.declared_schedules, self.services, serving.max_messages, self.declared,
                self.encoding,
            )  # fmt: skip
            running.producer = self._connection.producer
            try:
                await running.run(task_status=task_status)
            except BaseExceptionGroup as group:
                raise_only(group)
            finally:
                self.worker = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the worker beside your own code, as in a FastAPI lifespan, and stop it gracefully after the block."""
        async with self, Beside(self.run, self.stop):
            yield self

    def quiet(self) -> None:
        """Stop fetching; running handlers finish. May be called from any thread."""
        if self.worker is not None:
            self._in_its_loop(self.worker.quiet)

    def stop(self, grace: Duration | None = None) -> None:
        """Stop fetching; cancel handlers that still run after `grace` (RSMQ_STOP_GRACE), their messages go back.

        While `run` connects, it ends `run` before a handler starts. May be called from any thread.
        """
        seconds = None if grace is None else checked_duration("grace", grace).total_seconds()
        self._is_stopped_early = True
        if self.worker is not None:
            self._in_its_loop(partial(self.worker.stop, seconds))

    def _in_its_loop(self, action: Callable[[], None]) -> None:
        """Call a function in the event loop of the worker: at once, or soon if this is another thread."""
        opened = self._open
        if opened is None or opened.loop is _get_running_loop():
            action()
        else:
            opened.loop.call_soon_threadsafe(action)

    def _add_service(self, service: Service) -> None:
        """What a service keeps outside of the server belongs to the prefix of this broker."""
        if isinstance(service, Belongs):
            service.belong_to(self.keys.prefix, self.encoding)
        super()._add_service(service)

    def __repr__(self) -> str:
        return f"<Broker {count(len(self.handlers), 'handler')}{' connected' if self._open else ''}>"


def producer_of(broker: Broker) -> Producer | None:
    """The producer of a broker's connection, with its counts; None while the broker is not connected."""
    return broker._producer


def payloads_of(broker: Broker) -> Mapping[str, Any]:
    """The type of the payloads of each topic that a broker has declared."""
    return broker._typed_topics


@contextmanager
def pointed_at(
    broker: Broker, settings: Settings, *, around: Middleware | None = None, on_row: OnRow = lambda _: None
) -> Iterator[Broker]:
    """Use other settings of a broker inside the block, for tests: another server, another prefix, also for its
    outboxes.

    `around` is a middleware for the block, outside all others; `on_row` is called with each row that is put into an
    outbox. Raises ConfigError while the broker is connected.
    """
    broker._refuse_connected("change its settings")
    settings_before = broker.settings
    keys_before = broker.keys
    middlewares_before = list(broker._middlewares)
    broker.settings = settings
    broker.keys = Keys(settings.prefix, database_of(settings.url))
    broker._middlewares[:0] = [] if around is None else [around]
    try:
        with ExitStack() as stack:
            for service in broker.services:
                if isinstance(service, Belongs):
                    stack.enter_context(service.lent_to(settings.prefix, on_row))
            yield broker
    finally:
        broker._portal.close()
        broker.settings = settings_before
        broker.keys = keys_before
        broker._middlewares = middlewares_before
