"""A managed failover: the name leads to another server, the old one lives on and closes no connection.

Every way to send a command, with every answer by which a server says "not here" or "not now": `ANSWERS` is the table.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import anyio
import pytest
from redis.exceptions import RedisError

from rsmq.errors import BrokerError
from rsmq.model.settings import Settings
from rsmq.redis.client.client import TRANSIENT, BlockingClient, Client
from rsmq.redis.client.connector import Connector
from rsmq.redis.client.raw_connection import RawConnection, ShardedConnection, pack
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import PlainCommand
from tests.redis.answers import ANSWERS, AnsweringProxy
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


async def single(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    return lambda: client.execute_command("SET", KEY, "1")


async def transaction(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    return lambda: client.pipelined([("SET", KEY, "1"), ("GET", KEY)])


async def script(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    return lambda: client.execute_command("EVAL", "return redis.call('SET', KEYS[1], '1')", 1, KEY)


async def raw(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    connection = RawConnection(client)
    end.push_async_callback(connection.close)

    async def send() -> Any:
        if not connection.is_open:
            await connection.open()
        return await connection.exchange([pack(("SET", KEY, "1"))])

    return send


async def sharded(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    connection = ShardedConnection(client)
    end.push_async_callback(connection.close)
    return lambda: connection.exchange([(KEY, pack(("SET", KEY, "1")))])


async def blocking(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    threaded = Connector(proxy.url, settings_for(proxy)).blocking_client()
    end.callback(threaded.disconnect)
    return lambda: anyio.to_thread.run_sync(lambda: threaded.execute_command("SET", KEY, "1"))


async def blocking_together(client: Client, proxy: AnsweringProxy, end: AsyncExitStack) -> Callable[[], Awaitable[Any]]:
    threaded: BlockingClient = Connector(proxy.url, settings_for(proxy)).blocking_client()
    end.callback(threaded.disconnect)
    return lambda: anyio.to_thread.run_sync(lambda: threaded.pipelined([("SET", KEY, "1")]))


def settings_for(proxy: AnsweringProxy) -> Settings:
    return Settings(url=proxy.url, command_timeout=timedelta(milliseconds=500), lease_ttl=timedelta(seconds=1.5))


def failed(reply: Any) -> bool:
    replies = reply if isinstance(reply, list) else [reply]
    return any(isinstance(each, Exception) for each in replies)


async def is_refused(send: Callable[[], Awaitable[Any]]) -> bool:
    try:
        return failed(await send())
    except (BrokerError, RedisError, OSError):
        return True


STAYS = ("BUSY", "OOM", "TRYAGAIN")
"""Said by the right server of what it cannot do now: a new connection would not help."""
WAYS = [single, transaction, script, raw, sharded, blocking, blocking_together]


@pytest.mark.parametrize("answer", ANSWERS)
async def test_second_try_reaches_the_new_server(old: Server, new: Server, answer: str) -> None:
    """One answer of the old server is enough: nothing is asked of it again, in any way. Who stays goes on there."""
    for way in WAYS:
        async with (
            AnsweringProxy(old.port) as proxy,
            Connector(proxy.url, settings_for(proxy)).client() as client,
            AsyncExitStack() as end,
        ):
            send = await way(client, proxy, end)
            assert not await is_refused(send)
            with new.client() as there:
                there.delete(KEY)
            proxy.answer = answer
            proxy.move(new.port)
            assert await is_refused(send), f"{way.__name__}: the answer is taken for a result"
            if answer in STAYS:
                assert await is_refused(send), f"{way.__name__}: it has left the right server"
                proxy.answer = ""
            assert not await is_refused(send), way.__name__
            with new.client() as there:
                assert there.get(KEY) == (None if answer in STAYS else b"1"), way.__name__


@pytest.mark.parametrize("answer", [each for each in ANSWERS if each not in STAYS])
async def test_calls_that_wait_go_on_at_the_new_server(old: Server, new: Server, answer: str) -> None:
    """A batcher repeats what got no answer, at the server that the name leads to now."""
    async with AnsweringProxy(old.port) as proxy, Connector(proxy.url, settings_for(proxy)).client() as client:
        batcher = ScriptBatcher(client, patience=60)
        async with anyio.create_task_group() as tasks:
            await tasks.start(batcher.run)
            assert await batcher.submit(PlainCommand("SET"), [KEY], ["1"]) == b"OK"
            with new.client() as there:
                there.delete(KEY)
            proxy.answer = answer
            proxy.move(new.port)
            assert await batcher.submit(PlainCommand("SET"), [KEY], ["1"]) == b"OK"
            with new.client() as there:
                assert there.get(KEY) == b"1"
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("state", ["demoted", "without its master", "without its replicas", "of a full disk"])
async def test_real_servers_say_it_so(old: Server, new: Server, state: str) -> None:
    """The table has the words of real servers: in each of these states a server is left after its first answer."""
    async with AnsweringProxy(old.port) as proxy, Connector(proxy.url, settings_for(proxy)).client() as client:
        send = await single(client, proxy, AsyncExitStack())
        assert not await is_refused(send)
        with new.client() as there:
            there.delete(KEY)
        with old.client() as there:
            if state == "demoted":
                there.replicaof("127.0.0.1", new.port)
            elif state == "without its master":
                there.config_set("replica-serve-stale-data", "no")
                there.replicaof("127.0.0.1", 1)
            elif state == "without its replicas":
                there.config_set("min-replicas-to-write", 1)
            else:
                there.config_set("save", "1 1")
                shutil.rmtree(old.directory)
                there.bgsave()
                wait_until(lambda: there.info("persistence")["rdb_last_bgsave_status"] == "err", "it cannot save")
        proxy.move(new.port)
        assert await is_refused(send)
        assert not await is_refused(send)
        with new.client() as there:
            assert there.get(KEY) == b"1"


@pytest.mark.parametrize("answer", ["READONLY", "OOM", "silence"])
async def test_what_is_refused_for_long_is_named(old: Server, answer: str) -> None:
    """Probes say what stands still and why, whichever way it was sent, until the server does it again."""
    async with AnsweringProxy(old.port) as proxy, AsyncExitStack() as end:
        connector = Connector(proxy.url, settings_for(proxy))
        client = await end.enter_async_context(connector.client())
        for way in (single, transaction, script, raw, sharded):
            send = await way(client, proxy, end)
            proxy.answer = answer
            while not connector.refusals.standing(0.05):
                assert await is_refused(send)
            (said,) = connector.refusals.standing(0.05)
            assert TRANSIENT.get(answer, "no answer from the server at redis://127.0.0.1") in said
            proxy.answer = ""
            while await is_refused(send):  # the answers of a connection that was silent are not awaited
                pass
            assert connector.refusals.standing(0.05) == [], way.__name__
