"""The connection of a broker: what it has from `async with broker:` to its end, and how that is made and unmade."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio

from rsmq.connect import Client, Connector, retrying
from rsmq.embedded import server_for
from rsmq.keys import Keys
from rsmq.persistence import PostOffice
from rsmq.preflight import require
from rsmq.producer import Producer
from rsmq.settings import Settings
from rsmq.topic import Topics
from rsmq.worker import new_member_id

MakeProducer = Callable[[Client, Keys, Settings, Topics], Producer]
Make = Callable[[], AbstractAsyncContextManager["Connection"]]


@dataclass(frozen=True, slots=True)
class Connection:
    """All of it lives on one client, and ends with it."""

    connector: Connector
    client: Client
    topics: Topics
    producer: Producer
    office: PostOffice


@asynccontextmanager
async def connection(
    settings: Settings,
    keys: Keys,
    *,
    declared: Callable[[str], int | None],
    make_producer: MakeProducer,
    publishes_only: bool,
) -> AsyncIterator[Connection]:
    """Connect to the server that the settings name; without a URL it is the embedded one, started if need be.

    Nesting is the order of the end: what publishes and posts is ended first, then the client, then the server. Raises
    BrokerUnavailable, and ConfigError for a server that would lose messages.
    """
    async with server_for(settings.url) as url:
        connector = Connector(url, settings)
        async with connector.connected() as client:
            async for attempt in retrying(settings):
                with attempt:
                    await require(client, settings, keys, publishes_only=publishes_only)
            topics = Topics(client, keys, settings, declared)
            producer = make_producer(client, keys, settings, topics)
            office = PostOffice(client, keys, settings, new_member_id())
            async with anyio.create_task_group() as tasks:
                await tasks.start(producer.run)
                await tasks.start(office.run)
                tasks.start_soon(connector.watch)
                yield Connection(connector, client, topics, producer, office)
                tasks.cancel_scope.cancel()


class SharedConnection:
    """One connection for all who use it at a time: made for the first of them, ended after the last, in any order."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._host: Host | None = None
        self.users = 0

    async def enter(self) -> Connection:
        """Use it. Raises what connecting raises, to everybody who waits for it."""
        self.users += 1
        if self._host is None:
            self._host = Host(self._make)
        try:
            return await self._host.connected()
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Use it no more. The last one waits for its end, and is told what went wrong with it."""
        self.users -= 1
        if self.users == 0 and self._host is not None:
            host, self._host = self._host, None
            await host.end()


class Host:
    """The task in which a connection lives: what it starts has to end where it began, whoever comes and goes."""

    def __init__(self, make: Make) -> None:
        self._connection: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._unused = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._task = asyncio.create_task(self._run(make), name="rsmq-connection")

    async def _run(self, make: Make) -> None:
        with self._scope:
            async with make() as connection:
                self._connection.set_result(connection)
                await self._unused.wait()

    async def connected(self) -> Connection:
        """Wait for it; who stops waiting leaves it to the others."""
        await asyncio.wait((self._connection, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._connection.done():
            self._task.result()
        return self._connection.result()

    async def end(self) -> None:
        """End it, also while it is being made."""
        self._unused.set()
        if not self._connection.done():
            self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) and self._connection.done():
            raise error
