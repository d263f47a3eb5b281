"""Connections that lead to the master and to nobody else, and the pool that can give up all of them."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from weakref import WeakSet

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.connection import SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.sentinel import SentinelManagedConnection as BlockingManagedConnection

from rsmq.sentinel.knowledge import Address
from rsmq.tls import SharedTls

MOVED: Final = "the master has moved meanwhile"


class Guided(SentinelManagedConnection):
    """A connection that may have taken so long to open that it leads to a master of yesterday."""

    async def connect_to(self, address: Address) -> None:
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        if not self.connection_pool.sentinel_manager.knowledge.is_master(self):
            await self.disconnect(nowait=True)
            raise RedisConnectionError(MOVED)


class GuidedTls(Guided, SharedTls):
    """The same by TLS."""


class BlockingGuided(BlockingManagedConnection):
    """The same for a thread, which also must not believe what a master of yesterday answers: it renews leases."""

    def connect_to(self, address: Address) -> None:
        super().connect_to(address)  # type: ignore[no-untyped-call]
        self._check()

    def read_response(self, *args: Any, **options: Any) -> Any:
        reply = super().read_response(*args, **options)
        self._check()
        return reply

    def _check(self) -> None:
        if not self.connection_pool.sentinel_manager.knowledge.is_master(self):
            self.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError(MOVED)


class BlockingGuidedTls(BlockingGuided, SSLConnection):
    """The same by TLS."""


class Pool(AsyncSentinelPool):
    """Knows every connection that it has made, also those that a `Wire` keeps for itself."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._made: WeakSet[AbstractConnection] = WeakSet()
        self._closing = set[asyncio.Task[None]]()

    def make_connection(self) -> AbstractConnection:
        connection: AbstractConnection = super().make_connection()  # type: ignore[no-untyped-call]
        self._made.add(connection)
        return connection

    def leave(self, master: Address) -> int:
        """Give up every connection to another server; returns how many. Called in the loop."""
        self.master_address = master
        stale = [each for each in self._made if each.is_connected and (each.host, each.port) != master]  # type: ignore[attr-defined]
        for connection in stale:
            task = asyncio.create_task(connection.disconnect(nowait=True))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return len(stale)
