"""A managed failover: the name leads to another server, the old one lives on and closes no connection.

Every way to send a command, with every answer by which a server says "not here" or "not now": see `ELSEWHERE`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import anyio
import pytest
from redis.exceptions import RedisError

from rsmq.errors import BrokerError
from rsmq.model.settings import Settings
from rsmq.redis.client.client import BlockingClient, Client
from rsmq.redis.client.connector import Connector
from rsmq.redis.client.raw_connection import RawConnection, ShardedConnection, pack
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import PlainCommand
from rsmq.testing.proxy import Proxy
from tests.servers import Server, wait_until

KEY = "moved:{p}"


@pytest.fixture(scope="module")
def new() -> Iterator[Server]:
    """The server that the name leads to after the failover."""
    with Server(tcp=True) as server:
        yield server


@pytest.fixture
def old() -> Iterator[Server]:
    """The server that the name leads to before."""
    with Server(tcp=True) as server:
        yield server


def demote(server: Server, new: Server) -> None:
    """READONLY."""
    with server.client() as client:
        client.replicaof("127.0.0.1", new.port)


def lose_master(server: Server, new: Server) -> None:
    """MASTERDOWN, for reads as well."""
    with server.client() as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", 1)


def lose_replicas(server: Server, new: Server) -> None:
    """NOREPLICAS: a master that was cut off from its replicas."""
    with server.client() as client:
        client.config_set("min-replicas-to-write", 1)


def fall_silent(server: Server, new: Server) -> None:
    """No answer, and no closed socket."""
    server.pause()


async def single(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    return lambda: client.execute_command("SET", KEY, "1")


async def transaction(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    return lambda: client.pipelined([("SET", KEY, "1"), ("GET", KEY)])


async def script(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    return lambda: client.execute_command("EVAL", "return redis.call('SET', KEYS[1], '1')", 1, KEY)


async def raw(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    connection = RawConnection(client)
    end.push_async_callback(connection.close)

    async def send() -> Any:
        if not connection.is_open:
            await connection.open()
        return await connection.exchange([pack(("SET", KEY, "1"))])

    return send


async def sharded(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    connection = ShardedConnection(client)
    end.push_async_callback(connection.close)
    return lambda: connection.exchange([(KEY, pack(("SET", KEY, "1")))])


async def blocking(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    threaded = Connector(proxy.url, settings_for(proxy)).blocking_client()
    end.callback(threaded.disconnect)
    return lambda: anyio.to_thread.run_sync(lambda: threaded.execute_command("SET", KEY, "1"))


async def blocking_together(client: Client, proxy: Proxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    threaded: BlockingClient = Connector(proxy.url, settings_for(proxy)).blocking_client()
    end.callback(threaded.disconnect)
    return lambda: anyio.to_thread.run_sync(lambda: threaded.pipelined([("SET", KEY, "1")]))


def settings_for(proxy: Proxy) -> Settings:
    return Settings(url=proxy.url, command_timeout=timedelta(milliseconds=500), lease_ttl=timedelta(seconds=1.5))


def failed(reply: Any) -> bool:
    replies = reply if isinstance(reply, list) else [reply]
    return any(isinstance(each, Exception) for each in replies)


@pytest.mark.parametrize("state", [demote, lose_master, lose_replicas, fall_silent])
@pytest.mark.parametrize("way", [single, transaction, script, raw, sharded, blocking, blocking_together])
async def test_second_try_reaches_the_new_server(
    old: Server, new: Server, way: Callable[..., Any], state: Callable[[Server, Server], None]
) -> None:
    """One answer of the old server is enough: nothing is asked of it again."""
    async with (
        Proxy(old.port) as proxy, Connector(proxy.url, settings_for(proxy)).client() as client, AsyncExitStack() as end
    ):  # fmt: skip
        send = await way(client, proxy, end)
        assert not failed(await send())
        with new.client() as there:
            there.delete(KEY)
        proxy.move(new.port)
        state(old, new)
        if state in (demote, lose_master):
            wait_until(lambda: state is lose_master or role(old) == "slave", "the old server is a replica")
        try:
            first = await send()
            assert failed(first), "the old server still takes writes"
        except (BrokerError, RedisError, OSError):
            pass
        assert not failed(await send())
        with new.client() as there:
            assert there.get(KEY) == b"1"


def role(server: Server) -> str:
    with server.client() as client:
        return str(client.info("replication")["role"])


@pytest.mark.parametrize("state", [demote, lose_master, lose_replicas, fall_silent])
async def test_calls_that_wait_go_on_at_the_new_server(
    old: Server, new: Server, state: Callable[[Server, Server], None]
) -> None:
    """A batcher repeats what got no answer, at the server that the name leads to now."""
    async with Proxy(old.port) as proxy, Connector(proxy.url, settings_for(proxy)).client() as client:
        batcher = ScriptBatcher(client, patience=60)
        async with anyio.create_task_group() as tasks:
            await tasks.start(batcher.run)
            assert await batcher.submit(PlainCommand("SET"), [KEY], ["1"]) == b"OK"
            with new.client() as there:
                there.delete(KEY)
            proxy.move(new.port)
            state(old, new)
            assert await batcher.submit(PlainCommand("SET"), [KEY], ["1"]) == b"OK"
            with new.client() as there:
                assert there.get(KEY) == b"1"
            tasks.cancel_scope.cancel()
