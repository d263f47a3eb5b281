"""The broker for code without an event loop: scripts, Flask, Django. Each method is that of `Broker`, and blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from rsmq import control, dlq, persistence
from rsmq.broker.blocking import Blocking, BlockingContext, blocking, iterating, passed_on
from rsmq.broker.broker import Broker
from rsmq.broker.requests import RequestOptions
from rsmq.broker.typed_topic import BatchHandlerDecorator, HandlerDecorator, TypedTopic, checked_items
from rsmq.handler.handler import Handler
from rsmq.handler.options import By, SingleOptions
from rsmq.handler.schedule import Schedule
from rsmq.handler.service import Service
from rsmq.model.body import Offloading
from rsmq.model.duration import Duration
from rsmq.model.encoding import Codec
from rsmq.model.keys import Keys
from rsmq.model.message_ref import MessageRef
from rsmq.model.publish_options import ManyOptions, PublishOptions
from rsmq.model.settings import Overrides, Settings
from rsmq.producer.open_batch import BatchSettings, OpenBatch
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics
from rsmq.worker import Worker

T = TypeVar("T")


class SyncClient(Blocking):
    """The connected client of a `SyncBroker`. Replies are raw."""

    execute_command = blocking(Client.execute_command)
    pipelined = blocking(Client.pipelined)


class SyncTopics(Blocking):
    """The topics of a `SyncBroker`; the methods are those of `Topics`."""

    ensure = blocking(Topics.ensure)
    find = blocking(Topics.find)
    find_all = blocking(Topics.find_all)
    existing = blocking(Topics.existing)
    names = blocking(Topics.names)
    change = blocking(Topics.change)
    delete = blocking(Topics.delete)
    set_bands = blocking(Topics.set_bands)
    open_bands = blocking(Topics.open_bands)
    resize = blocking(Topics.resize)
    abort_resize = blocking(Topics.abort_resize)
    go_on_with_resize = blocking(Topics.go_on_with_resize)
    unaware_of_resize = blocking(Topics.unaware_of_resize)


class SyncSchedules(Blocking):
    """The schedules of a `SyncBroker`; the methods are those of `Schedules`."""

    run = blocking(control.Schedules.run)
    pause = blocking(control.Schedules.pause)
    resume = blocking(control.Schedules.resume)
    set = blocking(control.Schedules.set)
    reset = blocking(control.Schedules.reset)
    upsert = blocking(control.Schedules.upsert)
    remove = blocking(control.Schedules.remove)


class SyncDevices(Blocking):
    """The devices of a `SyncBroker`; the methods are those of `Devices`."""

    find = blocking(persistence.Devices.find)
    names = iterating(persistence.Devices.names)
    iterate = iterating(persistence.Devices.iterate)
    peek = blocking(persistence.Devices.peek)
    purge = blocking(persistence.Devices.purge)


class SyncDeadLetters(Blocking):
    """The dead letters of a `SyncBroker`; the methods are those of `DeadLetters`."""

    count = blocking(dlq.DeadLetters.count)
    select = iterating(dlq.DeadLetters.select)
    iterate = iterating(dlq.DeadLetters.iterate)
    get = blocking(dlq.DeadLetters.get)
    replay = blocking(dlq.DeadLetters.replay)
    replay_selected = blocking(dlq.DeadLetters.replay_selected)
    purge = blocking(dlq.DeadLetters.purge)


class SyncSession(BlockingContext):
    """A session of a device: `with broker.connect("device-42") as session: for letter in session: ...`.

    It behaves like `Session`. `for` waits for the next letter without end.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> persistence.Letter:
        letter: persistence.Letter = self._call(persistence.Session.__anext__, endless=True)
        return letter

    ack = blocking(persistence.Session.ack)
    receive = blocking(persistence.Session.receive)
    flush = blocking(persistence.Session.flush)


class SyncBatch(BlockingContext):
    """A batch to which this process publishes: `with broker.batch(...) as batch:`. See `OpenBatch`."""

    publish = blocking(OpenBatch.publish)
    close = blocking(OpenBatch.close)


class SyncTopic(Generic[T]):
    """A topic of a `SyncBroker` with the type of its payloads. Make it with `broker.topic("orders", Order)`."""

    def __init__(self, broker: SyncBroker, topic: TypedTopic[T]) -> None:
        self._broker, self._topic = broker, topic
        self.name = topic.name
        self.payload = topic.payload

    def checked(self, payload: T) -> T:
        """The payload. Raises ConfigError for one of another type."""
        return self._topic.checked(payload)

    def publish(self, payload: T, **options: Unpack[PublishOptions]) -> MessageRef:
        """Store one message and return its ref, which is its id. The options are those of `Broker.publish`."""
        return self._topic.publish_sync(payload, **options)

    def publish_sync(self, payload: T, **options: Unpack[PublishOptions]) -> MessageRef:
        """`publish`, under the name that it has at a `TypedTopic`."""
        return self._topic.publish_sync(payload, **options)

    def publish_many(
        self,
        items: Iterable[T],
        **options: Unpack[ManyOptions[T]],
    ) -> list[str]:
        """Store many messages and return their ids, as `Broker.publish_many` does."""
        return self._broker.publish_many(self.name, checked_items(self._topic, items), **options)

    @overload
    def handler(
        self, *, batch: int, linger: Duration | None = None, by: By | None = None, **options: Unpack[SingleOptions]
    ) -> BatchHandlerDecorator[T]: ...
    @overload
    def handler(self, **options: Unpack[SingleOptions]) -> HandlerDecorator[T]: ...
    def handler(self, **options: Any) -> Any:
        """Register a function for the messages of this topic, as `TypedTopic.handler` does."""
        return self._topic.handler(**options)

    def __repr__(self) -> str:
        return f"<SyncTopic {self.name} of {getattr(self.payload, '__name__', self.payload)}>"


class SyncBroker(Blocking):
    """`Broker` for code without an event loop: scripts, Flask, Django. Every method is there, without `await`.

    `with SyncBroker("redis://localhost") as broker: broker.publish("orders", order)`. Without `with`, the first call
    connects, and the connection stays until the process ends. One background thread serves all threads of the process.
    A child process has a connection of its own after a fork (a server that loads the application first). Ctrl-C ends
    the waiting call. `asynchronous` is the `Broker` behind it, for `async def` code, `rsmq.asgi` and the telemetry.
    `rsmq worker app:broker` takes both.
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
        self.asynchronous = Broker(settings, headers=headers, codecs=codecs, offload=offload, **overrides)
        super().__init__(self.asynchronous._portal, lambda broker: broker)

    # -- registering ----------------------------------------------------------------------------------------------

    handler = passed_on(Broker.handler)
    every = passed_on(Broker.every)
    middleware = passed_on(Broker.middleware)
    on_error = passed_on(Broker.on_error)
    on_dead = passed_on(Broker.on_dead)
    include = passed_on(Broker.include)
    deliver = passed_on(Broker.deliver)
    lifespan = passed_on(Broker.lifespan)
    before_publish = passed_on(Broker.before_publish)

    @overload
    def topic(self, name: str, payload: type[T], *, bands: Sequence[str] = ()) -> SyncTopic[T]: ...
    @overload
    def topic(self, name: str, payload: Any, *, bands: Sequence[str] = ()) -> SyncTopic[Any]: ...
    def topic(self, name: str, payload: Any, *, bands: Sequence[str] = ()) -> SyncTopic[Any]:
        """A topic whose payloads are of one type, as `Broker.topic`."""
        return SyncTopic(self, self.asynchronous.topic(name, payload, bands=bands))

    # -- connecting -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._portal.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.leave()

    def close(self) -> None:
        """Disconnect and end the thread; the next call connects again. Only needed without `with`, and rarely then."""
        self._portal.close()

    # -- publishing and devices -----------------------------------------------------------------------------------

    publish = blocking(Broker.publish)
    publish_sync = passed_on(Broker.publish_sync)

    @overload
    def request(self, topic: str, payload: Any, *, returns: type[T], **options: Unpack[RequestOptions]) -> T: ...
    @overload
    def request(self, topic: str, payload: Any, *, returns: Any = None, **options: Unpack[RequestOptions]) -> Any: ...
    @wraps(Broker.request)
    def request(self, *args: Any, **options: Any) -> Any:
        return self._call(lambda broker: broker.request(*args, **options))

    @overload
    def result(
        self, message: MessageRef | str, *, group: str, timeout: Duration, returns: type[T], topic: str | None = None,
        key: str | None = None,
    ) -> T: ...  # fmt: skip
    @overload
    def result(
        self, message: MessageRef | str, *, group: str, timeout: Duration, returns: Any = None,
        topic: str | None = None, key: str | None = None,
    ) -> Any: ...  # fmt: skip
    @wraps(Broker.result)
    def result(self, *args: Any, **options: Any) -> Any:
        return self._call(lambda broker: broker.result(*args, **options))

    publish_many = blocking(Broker.publish_many)
    send = blocking(Broker.send)
    send_many = blocking(Broker.send_many)

    def connect(self, client_id: str, *, clean: bool = False, window: int = 100, auto_ack: bool = False) -> SyncSession:
        """A session of a device: `with` opens it and ends its previous one, `for` yields letters. See `Session`."""
        return SyncSession(
            self._portal, lambda broker: broker.connect(client_id, clean=clean, window=window, auto_ack=auto_ack)
        )

    def batch(self, name: str, **options: Unpack[BatchSettings]) -> SyncBatch:
        """Messages with one callback when the last of them has ended: `with`, and the options of `Broker.batch`."""
        return SyncBatch(self._portal, lambda broker: broker.batch(name, **options))

    find_batch = blocking(Broker.find_batch)
    batches = blocking(Broker.batches)
    cancel_batch = blocking(Broker.cancel_batch)

    # -- one message ---

    look = blocking(Broker.look)
    find = blocking(Broker.find)
    cancel = blocking(Broker.cancel)
    erase = blocking(Broker.erase)
    reschedule = blocking(Broker.reschedule)

    # -- administration -------------------------------------------------------------------------------------------

    hold = blocking(Broker.hold)
    end_hold = blocking(Broker.end_hold)
    holds = blocking(Broker.holds)
    reset_group = blocking(Broker.reset_group)
    pause_group = blocking(Broker.pause_group)
    resume_group = blocking(Broker.resume_group)

    @property
    def client(self) -> SyncClient:
        """The connected client, for what rsmq has no method for. Replies are raw."""
        return SyncClient(self._portal, lambda broker: broker.client)

    @property
    def topics(self) -> SyncTopics:
        """The topics: find, list, change their limits, delete."""
        return SyncTopics(self._portal, lambda broker: broker.topics)

    @property
    def schedules(self) -> SyncSchedules:
        """The schedules: publish one now, pause it, give it another rule; add some that no code has."""
        return SyncSchedules(self._portal, lambda broker: broker.schedules)

    @property
    def devices(self) -> SyncDevices:
        """The devices: list them, read their inboxes, purge."""
        return SyncDevices(self._portal, lambda broker: broker.devices)

    @property
    def dead_letters(self) -> SyncDeadLetters:
        """The dead letters of all groups: list, replay, purge."""
        return SyncDeadLetters(self._portal, lambda broker: broker.dead_letters)

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, *, only: Iterable[str] = (), concurrency: int | None = None, max_messages: int | None = None) -> None:
        """Run the handlers in this process until `stop` or Ctrl-C, which stops gracefully. See also `rsmq worker`."""

        async def serve(_: Broker) -> None:
            await self.asynchronous.run(only=only, concurrency=concurrency, max_messages=max_messages)

        self._portal.call(serve, endless=True, interrupt=self.stop)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run the handlers in the background thread, beside your own code, and stop them gracefully after the block."""
        with self, self._portal.wrapped(self.asynchronous.running()):
            yield self

    def quiet(self) -> None:
        """Stop fetching; running handlers finish."""
        self._portal.run_soon(self.asynchronous.quiet)

    def stop(self, grace: Duration | None = None) -> None:
        """Stop fetching; cancel handlers that still run after `grace` (RSMQ_STOP_GRACE), their messages go back."""
        self._portal.run_soon(lambda: self.asynchronous.stop(grace))

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL of the server it is connected to."""

        async def ask(broker: Broker) -> str:
            return broker.url

        return str(self._call(ask))

    @property
    def settings(self) -> Settings:
        """The settings."""
        return self.asynchronous.settings

    @property
    def keys(self) -> Keys:
        """The names of the keys."""
        return self.asynchronous.keys

    @property
    def prefix(self) -> str:
        """The prefix of the names of topics: none, as in every broker."""
        return self.asynchronous.prefix

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers."""
        return self.asynchronous.handlers

    @property
    def declared_schedules(self) -> list[Schedule]:
        """The registered schedules."""
        return self.asynchronous.declared_schedules

    @property
    def services(self) -> list[Service]:
        """The services that run beside the handlers."""
        return self.asynchronous.services

    @property
    def worker(self) -> Worker | None:
        """The running worker, or None."""
        return self.asynchronous.worker

    @property
    def failure(self) -> Exception | None:
        """The error that ended the last worker, or None."""
        return self.asynchronous.failure

    def __repr__(self) -> str:
        return repr(self.asynchronous).replace("<Broker", "<SyncBroker", 1)
