"""Sentinel: where the master is, and leaving the one that is master no more.

A master that is cut off from its sentinels goes on answering whoever is on its side of the cut. A client that stays
there loses what it writes, however long ago another one was promoted. So all sentinels are asked, the newest
configuration among their answers counts, and whenever they announce a switch every connection to another server is
given up, not only the idle ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.sentinel import SentinelManagedConnection as BlockingManagedConnection

from rsmq.address import sentinel_options, split_sentinel, tls_options
from rsmq.client import BlockingClient, Client
from rsmq.tls import SharedTls

log = logging.getLogger("rsmq.sentinel")

LATECOMERS: Final = 0.25
"""Seconds that the other sentinels have when one has answered: one that cannot be reached must not hold up all."""
LOOK_EVERY: Final = 10.0
"""Seconds between two looks without an announcement, which may have been lost."""
PAUSE: Final = 1.0
SWITCH: Final = "+switch-master"

Address = tuple[str, int]


class Knowledge:
    """What is known of the master, by the newest configuration that any sentinel has named.

    A configuration names one master. An older one never counts again, nor another master for the same one, unless all
    sentinels say so who were asked after it was known: then somebody has set them up anew.
    """

    def __init__(self, moved: Callable[[Address], None]) -> None:
        self.master: Address | None = None
        self.epoch = -1
        self._moved = moved

    def learn(self, states: list[Any], sentinels: int, since: int) -> Address:
        """The master, after what some of so many sentinels say who were asked when epoch `since` was known."""
        said = [(int(each["config-epoch"]), (str(each["ip"]), int(each["port"]))) for each in states]
        epoch, address = max(said)
        is_anew = len(states) == sentinels and since == self.epoch and len(set(said)) == 1
        if epoch > self.epoch or is_anew or self.master is None:
            before, self.epoch, self.master = self.master, epoch, address
            if before not in (None, address):
                self._moved(address)
        return self.master

    def is_master(self, connection: Any) -> bool:
        """Whether a connection leads there."""
        return self.master in (None, (connection.host, connection.port))


ADDRESS: Final = "SENTINEL GET-MASTER-ADDR-BY-NAME"


def is_moving(state: Any) -> bool:
    """Whether this sentinel leads a failover. From the promotion on it names the old master under the new
    configuration, until every replica follows: only the answer to ADDRESS is right by then."""
    return state is not None and "failover_in_progress" in state["flags"]


def moved(state: Any, address: Any) -> Any:
    """What it says, with the address that it sends clients to. That one is up, whatever is said of the other."""
    host, port = address
    host = host.decode() if isinstance(host, bytes) else host
    if (host, int(port)) == (state["ip"], int(state["port"])):
        return state
    return state | {"ip": host, "port": int(port), "is_sdown": False, "is_odown": False}


class Watchers(AsyncSentinel):
    """All sentinels of one master, for the loop."""

    def __init__(self, knowledge: Knowledge, hosts: list[Address], seconds: float, access: dict[str, Any]) -> None:
        # no `socket_timeout`: on Python 3.11 it swallows cancellations
        patience = {"socket_timeout": None, "socket_connect_timeout": seconds, "retry": AsyncRetry(NoBackoff(), 0)}
        super().__init__(hosts, sentinel_kwargs=patience | access)  # type: ignore[no-untyped-call]
        self.knowledge, self._seconds = knowledge, seconds

    async def discover_master(self, service_name: str) -> Address:
        """The address. Raises what `absence` says while no sentinel knows a master that is up."""
        states, since, errors = list[Any](), self.knowledge.epoch, list[Exception]()
        with anyio.move_on_after(self._seconds) as limit:

            async def ask(sentinel: Any) -> None:
                try:
                    state = (await sentinel.sentinel_masters()).get(service_name)
                    if is_moving(state):
                        state = moved(state, await sentinel.execute_command(ADDRESS, service_name))
                except (RedisError, OSError) as error:
                    log.debug("a sentinel does not answer: %s", error)
                    errors.append(error)
                    return
                if state and self.check_master_state(state, service_name):
                    states.append(state)
                    limit.deadline = min(limit.deadline, anyio.current_time() + LATECOMERS)

            async with anyio.create_task_group() as tasks:
                for sentinel in self.sentinels:
                    tasks.start_soon(ask, sentinel)
        if not states:
            raise absence(service_name, errors)
        return self.knowledge.learn(states, len(self.sentinels), since)


class BlockingWatchers(Sentinel):
    """The same for a thread: one after the other, until most have answered; who does not answer is asked last."""

    knowledge: Knowledge

    def discover_master(self, service_name: str) -> Address:
        """The address. Raises what `absence` says while no sentinel knows a master that is up."""
        states, since, errors = list[Any](), self.knowledge.epoch, list[Exception]()
        silent: list[Any] = []
        for sentinel in list(self.sentinels):
            try:
                masters: Any = sentinel.sentinel_masters()
                state = masters.get(service_name)
                if is_moving(state):
                    state = moved(state, sentinel.execute_command(ADDRESS, service_name))
            except (RedisError, OSError) as error:
                silent.append(sentinel)
                errors.append(error)
                continue
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                states.append(state)
            if len(states) > len(self.sentinels) // 2:
                break
        self.sentinels = [each for each in self.sentinels if each not in silent] + silent
        if not states:
            raise absence(service_name, errors)
        return self.knowledge.learn(states, len(self.sentinels), since)


def absence(name: str, errors: list[Exception]) -> RedisError:
    """Why there is no master: a refusal of the sentinels will not pass by itself, anything else may."""
    for error in errors:
        cause = error.__cause__ if isinstance(error.__cause__, RedisError) else error
        if isinstance(cause, AuthenticationError | NoPermissionError):
            return AuthenticationError(
                f"a sentinel: {cause}; give sentinel_username and sentinel_password in its query"
            )
    return MasterNotFoundError(f"No master found for {name!r}" + "".join(f" ({error})" for error in errors[:1]))


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
