"""Listens for the NOTIFY with which rows of an outbox announce themselves on PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
import anyio.to_thread
from sqlalchemy.ext.asyncio import AsyncEngine

from rsmq.model.backoff import Backoff
from rsmq.sql.database import Database

log = logging.getLogger("rsmq.outbox")

WAIT: Final = 0.25
"""Seconds of one wait in a thread, which cannot be interrupted."""


class CommitListener:
    """Sets `news` when rows were committed, while `is_wanted`. It has a connection of its own, and opens it
    again when it breaks.

    Without a channel, or with a driver that it does not know, it never listens.
    """

    def __init__(self, database: Database, channel: str | None) -> None:
        self._database, self._channel = database, channel
        self._listen = {
            ("asyncpg", True): self._with_asyncpg,
            ("psycopg", True): self._with_psycopg,
            ("psycopg_async", True): self._with_psycopg,
            ("psycopg", False): self._in_a_thread,
        }.get((database.sync_engine.dialect.driver, database.is_async))
        self._backoff = Backoff(0.1, 5.0)
        self.news = asyncio.Event()
        self.is_wanted = False
        self.is_listening = False

    async def run(self) -> None:
        """Until cancelled; at once if there is nothing to listen to."""
        if self._channel is None or self._listen is None:
            return
        while True:
            while not self.is_wanted:
                await anyio.sleep(WAIT)
            try:
                await self._listen(self._channel)
            except Exception as error:
                level = logging.WARNING if self._backoff.failures == 0 else logging.DEBUG
                log.log(level, "the outbox is polled, because LISTEN fails: %s", error)
                await anyio.sleep(self._backoff.next())
            finally:
                self.is_listening = False

    def _started(self) -> None:
        self._backoff.reset()
        self.is_listening = True
        self.news.set()  # what was committed before

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """The driver's own connection, which does not go back to the pool."""
        assert isinstance(self._database.engine, AsyncEngine)
        connection = await self._database.engine.connect()
        try:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            await connection.run_sync(lambda each: each.detach())
            try:
                yield raw
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(2), suppress(Exception):
                    await raw.close()
                    await connection.invalidate()  # else SQLAlchemy would roll back on it, and log that it cannot
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2), suppress(Exception):
                await connection.close()

    async def _with_asyncpg(self, channel: str) -> None:
        ended = asyncio.Event()
        async with self._connected() as raw:
            raw.add_termination_listener(lambda *_: ended.set())
            await raw.add_listener(channel, lambda *_: self.news.set())
            self._started()
            while not ended.is_set() and self.is_wanted:
                with anyio.move_on_after(WAIT):
                    await ended.wait()

    async def _with_psycopg(self, channel: str) -> None:
        async with self._connected() as raw:
            await raw.set_autocommit(True)
            await raw.execute(f"LISTEN {channel}")
            self._started()
            while self.is_wanted:
                async for _ in raw.notifies(timeout=WAIT):
                    self.news.set()

    async def _in_a_thread(self, channel: str) -> None:
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def listen() -> None:
            with self._database.sync_engine.connect() as connection:
                raw: Any = connection.connection.driver_connection
                connection.detach()
                raw.autocommit = True
                raw.execute(f"LISTEN {channel}")
                loop.call_soon_threadsafe(self._started)
                while self.is_wanted and not stop.is_set():
                    for _ in raw.notifies(timeout=WAIT):
                        loop.call_soon_threadsafe(self.news.set)

        try:
            await anyio.to_thread.run_sync(listen, abandon_on_cancel=True)
        finally:
            stop.set()
