"""Sentinel: find the master, and leave a server that is no longer the master.

A master that is cut off from its sentinels still answers the clients on its side of the partition. What they write
there is lost once another master is promoted. So all sentinels are asked and the newest configuration counts. When they
announce a switch, every connection to another server is closed, not only the idle ones.
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

from rsmq.redis.client.client import BlockingClient, Client
from rsmq.redis.client.pool_connections import SharedTlsConnection, repair
from rsmq.redis.wire.slots import Address
from rsmq.redis.wire.url import sentinel_options, split_sentinel, tls_options

log = logging.getLogger("rsmq.sentinel")

LATECOMERS: Final = 0.25
"""Seconds that the other sentinels get after the first reply: an unreachable one must not delay the rest."""
ADDRESS: Final = "SENTINEL GET-MASTER-ADDR-BY-NAME"
CHECK_EVERY: Final = 10.0
"""Seconds between two checks without an announcement: one may have been lost."""
PAUSE: Final = 1.0
SWITCH: Final = "+switch-master"
MOVED: Final = "the master has changed"


class SentinelClients:
    """Makes the clients of one Sentinel-managed master, and moves them when it changes."""

    def __init__(self, url: str, seconds: float, tls: dict[str, Any]) -> None:
        """`tls`: options of every TLS connection besides those of the URL; empty for none."""
        hosts, name, options = split_sentinel(url)
        self._hosts = hosts
        self._name = name
        self._options = options
        self._seconds = seconds
        self._is_tls = bool(tls)
        tls = tls_options(url) | tls
        self._options |= tls
        self._access = sentinel_options(url) | ({"ssl": True, **tls} if tls else {})
        self._pools: WeakSet[MasterPool] = WeakSet()
        self._blocking_pools: WeakSet[SentinelConnectionPool] = WeakSet()
        self._master_state = MasterState(self._moved)
        self._loop: asyncio.AbstractEventLoop | None = None

    def client(self, options: dict[str, Any]) -> Client:
        """An asyncio client."""
        discovery = MasterDiscovery(self._master_state, self._hosts, self._seconds, self._access)
        kind = MasterTlsConnection if self._is_tls else MasterConnection
        options = {**self._options, **options, "connection_class": kind}
        client = discovery.master_for(self._name, redis_class=Client, connection_pool_class=MasterPool, **options)
        assert isinstance(client, Client)
        assert isinstance(client.connection_pool, MasterPool)
        self._pools.add(client.connection_pool)
        return client

    def blocking_client(self, options: dict[str, Any], timeout: float) -> BlockingClient:
        """A client for a thread."""
        # no retries in redis-py: its pauses would stop a heartbeat for seconds when a sentinel is down
        patience = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": Retry(NoBackoff(), 0)}
        discovery = BlockingMasterDiscovery(self._hosts, sentinel_kwargs=patience | self._access)  # type: ignore[no-untyped-call]
        discovery.master_state = self._master_state
        kind = BlockingMasterTlsConnection if self._is_tls else BlockingMasterConnection
        options = {**self._options, **options, "connection_class": kind}
        client = discovery.master_for(self._name, redis_class=BlockingClient, **options)  # type: ignore[no-untyped-call]
        assert isinstance(client, BlockingClient)
        pool = client.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        self._blocking_pools.add(pool)
        return client

    async def watch(self) -> None:
        """Listen to the sentinels until cancelled; after each announcement close the connections to other servers."""
        self._loop = asyncio.get_running_loop()
        discovery = MasterDiscovery(self._master_state, self._hosts, self._seconds, self._access)
        try:
            async with anyio.create_task_group() as tasks:
                for sentinel in discovery.sentinels:
                    tasks.start_soon(self._listen, sentinel, discovery)
        finally:
            with anyio.CancelScope(shield=True):
                await discovery.aclose()

    async def _listen(self, sentinel: Any, discovery: MasterDiscovery) -> None:
        while True:
            pubsub = sentinel.pubsub()
            try:
                await pubsub.subscribe(SWITCH)
                while True:
                    self._disconnect_others(await discovery.discover_master(self._name))
                    await pubsub.get_message(ignore_subscribe_messages=False, timeout=CHECK_EVERY)
            except (RedisError, OSError) as error:
                log.debug("a sentinel does not answer: %s", error)
            finally:
                with anyio.CancelScope(shield=True):
                    await pubsub.aclose()
            await anyio.sleep(PAUSE)

    def _moved(self, master: Address) -> None:
        """Move all clients at once, whichever thread found the new master first: a member that uses two masters would
        settle with one what it has read from the other."""
        for pool in list(self._blocking_pools):  # a connection in use is dropped when its thread gives it back
            pool.proxy.master_address = master
            pool.disconnect(inuse_connections=False)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._disconnect_others, master)

    def _disconnect_others(self, master: Address) -> None:
        if closed := sum([pool.disconnect_others(master) for pool in list(self._pools)]):
            log.warning("the master is now %s:%d: closed %d connections to the previous one", *master, closed)

    def __repr__(self) -> str:
        return f"<SentinelClients {self._name} master={self._master_state.master}>"


class MasterState:
    """The master in the newest configuration (by its epoch) that any sentinel has reported.

    A configuration has one master. An older configuration is ignored, and so is another master for the same one.
    Exception: all sentinels report it, and all were asked after the newest was known. Then an operator has set them up
    anew.
    """

    def __init__(self, moved: Callable[[Address], None]) -> None:
        self.master: Address | None = None
        self.epoch = -1
        self._moved = moved

    def learn(self, states: list[Any], sentinels: int, since: int) -> Address:
        """The master after these replies. `sentinels` were asked, at a time when `since` was the newest epoch."""
        said = [(int(each["config-epoch"]), (str(each["ip"]), int(each["port"]))) for each in states]
        epoch, address = max(said)
        is_anew = len(states) == sentinels and since == self.epoch and len(set(said)) == 1
        if epoch > self.epoch or is_anew or self.master is None:
            before = self.master
            self.epoch = epoch
            self.master = address
            if before not in (None, address):
                self._moved(address)
        return self.master

    def is_master(self, connection: Any) -> bool:
        """Whether a connection leads to it."""
        return self.master in (None, (connection.host, connection.port))


def is_moving(state: Any) -> bool:
    """Whether this sentinel leads a failover. Between the promotion and the last replica's switch it reports the old
    master under the new configuration; only the address that it gives to clients is right by then."""
    return state is not None and "failover_in_progress" in state["flags"]


def redirected(state: Any, address: Any) -> Any:
    """Its reply with the address that it gives to clients. That server is up, even if the reply says otherwise."""
    host, port = address
    host = host.decode() if isinstance(host, bytes) else host
    if (host, int(port)) == (state["ip"], int(state["port"])):
        return state
    return state | {"ip": host, "port": int(port), "is_sdown": False, "is_odown": False}


def absence(name: str, errors: list[Exception]) -> RedisError:
    """The error for a missing master: refused credentials do not heal by themselves, anything else may."""
    for error in errors:
        cause = error.__cause__ if isinstance(error.__cause__, RedisError) else error
        if isinstance(cause, AuthenticationError | NoPermissionError):
            return AuthenticationError(
                f"a sentinel: {cause}; give sentinel_username and sentinel_password in its query"
            )
    return MasterNotFoundError(f"No master found for {name!r}" + "".join(f" ({error})" for error in errors[:1]))


class MasterDiscovery(AsyncSentinel):
    """All sentinels of one master, for the event loop: asked at the same time."""

    def __init__(self, master_state: MasterState, hosts: list[Address], seconds: float, access: dict[str, Any]) -> None:
        # no `socket_timeout`: on Python 3.11 it swallows cancellations
        patience = {"socket_timeout": None, "socket_connect_timeout": seconds, "retry": AsyncRetry(NoBackoff(), 0)}
        super().__init__(hosts, sentinel_kwargs=patience | access)  # type: ignore[no-untyped-call]
        for sentinel in self.sentinels:
            repair(sentinel.connection_pool)
        self.master_state, self._seconds = master_state, seconds

    async def discover_master(self, service_name: str) -> Address:
        """The address of the master. Raises `absence` while no sentinel knows a master that is up."""
        states, since, errors = list[Any](), self.master_state.epoch, list[Exception]()
        with anyio.move_on_after(self._seconds) as limit:

            async def ask(sentinel: Any) -> None:
                try:
                    state = (await sentinel.sentinel_masters()).get(service_name)
                    if is_moving(state):
                        state = redirected(state, await sentinel.execute_command(ADDRESS, service_name))
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
        return self.master_state.learn(states, len(self.sentinels), since)


class BlockingMasterDiscovery(Sentinel):
    """Finds the master in a thread: asks one after the other until most answered; next time the silent ones last."""

    master_state: MasterState

    def discover_master(self, service_name: str) -> Address:
        """The address of the master. Raises `absence` while no sentinel knows a master that is up."""
        states, since, silent = list[Any](), self.master_state.epoch, dict[Any, Exception]()
        for sentinel in list(self.sentinels):
            try:
                masters: Any = sentinel.sentinel_masters()
                state = masters.get(service_name)
                if is_moving(state):
                    state = redirected(state, sentinel.execute_command(ADDRESS, service_name))
            except (RedisError, OSError) as error:
                silent[sentinel] = error
                continue
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                states.append(state)
            if len(states) > len(self.sentinels) // 2:
                break
        self.sentinels = [each for each in self.sentinels if each not in silent] + list(silent)
        if not states:
            raise absence(service_name, list(silent.values()))
        return self.master_state.learn(states, len(self.sentinels), since)


class MasterConnection(SentinelManagedConnection):
    """Opening may take so long that the master has changed by then: such a connection is closed."""

    async def connect_to(self, address: Address) -> None:
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        if not self.connection_pool.sentinel_manager.master_state.is_master(self):
            await self.disconnect(nowait=True)
            raise RedisConnectionError(MOVED)


class MasterTlsConnection(MasterConnection, SharedTlsConnection):
    """A `MasterConnection` over TLS."""


class BlockingMasterConnection(BlockingManagedConnection):
    """A connection to the master for a thread. It renews leases: it trusts no reply of a previous master either."""

    def connect_to(self, address: Address) -> None:
        super().connect_to(address)  # type: ignore[no-untyped-call]
        self._check()

    def read_response(self, *args: Any, **options: Any) -> Any:
        reply = super().read_response(*args, **options)
        self._check()
        return reply

    def _check(self) -> None:
        if not self.connection_pool.sentinel_manager.master_state.is_master(self):
            self.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError(MOVED)


class BlockingMasterTlsConnection(BlockingMasterConnection, SSLConnection):
    """A `BlockingMasterConnection` over TLS."""


class MasterPool(AsyncSentinelPool):
    """Knows every connection that it has made, also those that a `RawConnection` keeps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._made: WeakSet[AbstractConnection] = WeakSet()
        self._closing = set[asyncio.Task[None]]()

    def make_connection(self) -> AbstractConnection:
        connection: AbstractConnection = super().make_connection()  # type: ignore[no-untyped-call]
        self._made.add(connection)
        return connection

    def disconnect_others(self, master: Address) -> int:
        """Close every connection to another server; returns how many. Called in the event loop."""
        self.master_address = master
        stale = [each for each in self._made if each.is_connected and (each.host, each.port) != master]  # type: ignore[attr-defined]
        for connection in stale:
            task = asyncio.create_task(connection.disconnect(nowait=True))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return len(stale)
