"""The guide: makes the clients of one Sentinel-managed master, and moves all of them together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import anyio
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from rsmq.address import sentinel_options, split_sentinel, tls_options
from rsmq.client import BlockingClient, Client
from rsmq.sentinel.connection import BlockingGuided, BlockingGuidedTls, Guided, GuidedTls, Pool
from rsmq.sentinel.knowledge import Address, Knowledge
from rsmq.sentinel.watcher import BlockingWatchers, Watchers

log = logging.getLogger("rsmq.sentinel")

LOOK_EVERY: Final = 10.0
"""Seconds between two looks without an announcement, which may have been lost."""
PAUSE: Final = 1.0
SWITCH: Final = "+switch-master"


class Guide:
    """Makes the clients of one Sentinel-managed master, and moves them when it changes."""

    def __init__(self, url: str, seconds: float, tls: dict[str, Any]) -> None:
        """`tls`: what every TLS connection has besides the options of the URL; empty for none."""
        self._hosts, self._name, self._options = split_sentinel(url)
        self._seconds, self._is_tls = seconds, bool(tls)
        tls = tls_options(url) | tls
        self._options |= tls
        self._access = sentinel_options(url) | ({"ssl": True, **tls} if tls else {})
        self._pools: WeakSet[Pool] = WeakSet()
        self._blocking_pools: WeakSet[SentinelConnectionPool] = WeakSet()
        self._knowledge = Knowledge(self._moved)
        self._loop: asyncio.AbstractEventLoop | None = None

    def client(self, options: dict[str, Any]) -> Client:
        """An asyncio client."""
        watchers = Watchers(self._knowledge, self._hosts, self._seconds, self._access)
        options = {**self._options, **options, "connection_class": GuidedTls if self._is_tls else Guided}
        client = watchers.master_for(self._name, redis_class=Client, connection_pool_class=Pool, **options)
        assert isinstance(client, Client)
        assert isinstance(client.connection_pool, Pool)
        self._pools.add(client.connection_pool)
        return client

    def blocking_client(self, options: dict[str, Any], timeout: float) -> BlockingClient:
        """A client for a thread."""
        # no retry of redis-py: with its pauses a heartbeat would stand for seconds before a sentinel that is down
        patience = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": Retry(NoBackoff(), 0)}
        watchers = BlockingWatchers(self._hosts, sentinel_kwargs=patience | self._access)  # type: ignore[no-untyped-call]
        watchers.knowledge = self._knowledge
        options |= {"connection_class": BlockingGuidedTls if self._is_tls else BlockingGuided}
        options = self._options | options
        client = watchers.master_for(self._name, redis_class=BlockingClient, **options)  # type: ignore[no-untyped-call]
        assert isinstance(client, BlockingClient)
        pool = client.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        self._blocking_pools.add(pool)
        return client

    async def watch(self) -> None:
        """Listen to the sentinels until cancelled; after each announcement leave every other server."""
        self._loop = asyncio.get_running_loop()
        watchers = Watchers(self._knowledge, self._hosts, self._seconds, self._access)
        try:
            async with anyio.create_task_group() as tasks:
                for sentinel in watchers.sentinels:
                    tasks.start_soon(self._listen, sentinel, lambda: watchers.discover_master(self._name))
        finally:
            with anyio.CancelScope(shield=True):
                await watchers.aclose()

    async def _listen(self, sentinel: Any, find: Callable[[], Any]) -> None:
        while True:
            pubsub = sentinel.pubsub()
            try:
                await pubsub.subscribe(SWITCH)
                while True:
                    self._leave(await find())
                    await pubsub.get_message(ignore_subscribe_messages=False, timeout=LOOK_EVERY)
            except (RedisError, OSError) as error:
                log.debug("a sentinel is away: %s", error)
            finally:
                with anyio.CancelScope(shield=True):
                    await pubsub.aclose()
            await anyio.sleep(PAUSE)

    def _moved(self, master: Address) -> None:
        """Whoever finds it out first, thread or loop: all go at once. Half here, half there, a member would settle
        with one master what it has read from the other."""
        for pool in list(self._blocking_pools):  # a thread may be using one: that is dropped when it gives it back
            pool.proxy.master_address = master
            pool.disconnect(inuse_connections=False)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave, master)

    def _leave(self, master: Address) -> None:
        left = sum([pool.leave(master) for pool in list(self._pools)])
        if left:
            log.warning("the master is %s:%d now: %d connections to the last one are given up", *master, left)

    def __repr__(self) -> str:
        return f"<Guide {self._name} master={self._knowledge.master}>"
