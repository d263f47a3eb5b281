"""The connection of a broker: what `async with broker:` opens, shares between its users, and closes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import anyio

from rsmq import persistence
from rsmq.errors import OTHER_LOOP, BrokerUnavailable, ConfigError
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.log_guard import guard_loggers
from rsmq.model.log_names import shorten_names
from rsmq.model.member import new_member_id
from rsmq.model.own_tasks import own_tasks
from rsmq.model.settings import Settings
from rsmq.producer import Producer
from rsmq.redis.client.connector import Client, Connector, retrying
from rsmq.redis.embedded.server import server_for
from rsmq.redis.preflight import require
from rsmq.redis.topics import Declaration, Topics

MakeProducer = Callable[[Client, Keys, Settings, Topics], Producer]
Make = Callable[[], AbstractAsyncContextManager["Connection"]]


@dataclass(frozen=True, slots=True)
class Connection:
    """The parts of an open connection. All use one client and end with it."""

    connector: Connector
    client: Client
    topics: Topics
    producer: Producer
    inboxes: persistence.Inboxes
    loop: asyncio.AbstractEventLoop
    """The event loop that it was opened in. A call from another one would wait for ever."""


class BrokerPart(ABC):
    """A part of a broker that uses its open connection."""

    @property
    @abstractmethod
    def _connection(self) -> Connection:
        """The open connection, or ConfigError."""

    @property
    @abstractmethod
    def _producer(self) -> Producer | None:
        """The producer of the connection; None while it is not open."""


@asynccontextmanager
async def connection(
    settings: Settings,
    keys: Keys,
    *,
    declared: Callable[[str], Declaration],
    make_producer: MakeProducer,
    publishes_only: bool,
    encoding: Encoding = NO_CODECS,
) -> AsyncIterator[Connection]:
    """Connect to the server that the settings name; without a URL to the embedded server, which this may start.

    The nesting is the order of shutdown: producer and inboxes first, then the client, then the server. Raises
    BrokerUnavailable, and ConfigError for a server that would lose messages.
    """
    guard_loggers()
    if settings.log_names == "short":
        shorten_names()
    async with server_for(settings) as url:
        connector = Connector(url, settings)
        async with connector.connected() as client:
            async for attempt in retrying(settings):
                with attempt:
                    await require(client, settings, keys, publishes_only=publishes_only)
            topics = Topics(client, keys, settings, declared)
            producer = make_producer(client, keys, settings, topics)
            inboxes = persistence.Inboxes(client, keys, settings, new_member_id(), encoding)
            async with own_tasks() as tasks:
                await tasks.start(producer.run)
                with suppress(BrokerUnavailable):  # then this machine's clock has to do
                    await producer.learn_time()
                await tasks.start(inboxes.run)
                tasks.start_soon(connector.watch)
                yield Connection(connector, client, topics, producer, inboxes, asyncio.get_running_loop())
                tasks.cancel_scope.cancel()


class SharedConnection:
    """One connection for all concurrent users of a broker: opened for the first, closed after the last of them."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._task: ConnectionTask | None = None
        self.users = 0

    async def enter(self) -> Connection:
        """Add a user. If connecting fails, every waiting user gets the error."""
        if self._task is not None and self._task.loop is not asyncio.get_running_loop():
            raise ConfigError(OTHER_LOOP)
        self.users += 1
        if self._task is None:
            self._task = ConnectionTask(self._make)
        try:
            return await self._task.connected()
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Remove a user. The last one waits until the connection is closed, and gets the error that ended it."""
        self.users -= 1
        if self.users == 0 and self._task is not None:
            task, self._task = self._task, None
            await task.end()


class ConnectionTask:
    """The task that opens and closes a connection: task groups must end in the task that entered them.

    Users come and go in tasks of their own. An event loop that ends by an exception cancels all tasks at once, this one
    and those of the users. The connection stays open until they have settled their work and given back their leases.
    """

    def __init__(self, make: Make) -> None:
        self.loop = asyncio.get_running_loop()
        self._connection: asyncio.Future[Connection] = self.loop.create_future()
        self._users: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._unused = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._task = asyncio.create_task(self._run(make), name="rsmq-connection")

    async def _run(self, make: Make) -> None:
        with self._scope:
            async with make() as connection:
                self._connection.set_result(connection)
                try:
                    await self._unused.wait()
                except asyncio.CancelledError:
                    with anyio.CancelScope(shield=True):
                        await self._until_cancelled_users_leave()
                    raise

    async def _until_cancelled_users_leave(self) -> None:
        """Users that are not cancelled are not waited for: one of them may itself wait for the end of this task."""
        unused = asyncio.create_task(self._unused.wait())
        try:
            while not unused.done() and (users := [each for each in self._users if each.cancelling()]):
                await asyncio.wait([unused, *users], return_when=asyncio.FIRST_COMPLETED)
                self._users -= {each for each in users if each.done()}
        finally:
            unused.cancel()

    async def connected(self) -> Connection:
        """Wait for the connection. Cancelling one waiter does not affect the others."""
        if (user := asyncio.current_task()) is not None:
            self._users.add(user)
        await asyncio.wait((self._connection, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._connection.done():
            self._task.result()
        return self._connection.result()

    async def end(self) -> None:
        """Close the connection, also while it is being opened."""
        self._unused.set()
        if not self._connection.done():
            self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) and self._connection.done():
            raise error
