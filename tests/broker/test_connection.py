"""One broker used by several tasks: they share a connection, and come and go in any order."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable, ConfigError, Settings
from tests.servers import Server


def make_broker(server: Server, prefix: str) -> Broker:
    """A broker with a short connection timeout."""
    return Broker(
        Settings(url=server.url, prefix=prefix, preflight="warn", unavailable_timeout=timedelta(milliseconds=200))
    )


async def test_users_who_come_while_connecting_share_the_connection(server: Server, prefix: str) -> None:
    """Ten tasks enter the broker at the same time, and all can publish."""
    broker = make_broker(server, prefix)

    async def publish(n: int) -> str:
        async with broker:
            return await broker.publish("t", {"n": n})

    assert len(set(await asyncio.gather(*(publish(n) for n in range(10))))) == 10


async def test_first_user_may_leave_first(server: Server, prefix: str, no_task_left: None) -> None:
    """The other users continue; after the last one nothing is open."""
    broker, first_has_left = make_broker(server, prefix), anyio.Event()

    async def second() -> None:
        async with broker:
            both.set()
            await first_has_left.wait()
            await broker.publish("t", {})

    both = anyio.Event()
    async with anyio.create_task_group() as tasks:
        async with broker:
            tasks.start_soon(second)
            await both.wait()
        first_has_left.set()
    with pytest.raises(ConfigError, match="not connected"):
        await broker.publish("t", {})


async def test_failed_connect_raises_for_every_waiting_user(prefix: str, no_task_left: None) -> None:
    """When the server is back, the next user connects."""
    with Server() as server:
        broker = make_broker(server, prefix)
        server.kill()
        found = await asyncio.gather(*(broker.__aenter__() for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [BrokerUnavailable] * 3
        server.start()
        async with broker:
            await broker.publish("t", {})


async def test_user_cancelled_while_connecting_leaves_it_to_the_others(
    server: Server, prefix: str, no_task_left: None
) -> None:
    """The first user is cancelled at once; the second one, who waits for the same connection, gets it."""
    broker = make_broker(server, prefix)
    first, second = asyncio.create_task(broker.__aenter__()), asyncio.create_task(broker.__aenter__())
    await asyncio.sleep(0)
    first.cancel()
    await second
    await broker.publish("t", {})
    await broker.__aexit__()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_only_user_cancelled_while_connecting_ends_it(prefix: str, no_task_left: None) -> None:
    """Without a waiting user the connection attempt stops."""
    with Server() as server:
        broker = Broker(Settings(url=server.url, prefix=prefix, unavailable_timeout=timedelta(hours=1)))
        server.kill()
        with anyio.move_on_after(0.1):
            await broker.__aenter__()
        with pytest.raises(ConfigError, match="not connected"):
            await broker.publish("t", {})


async def test_last_user_cancelled_leaves_nothing_open(server: Server, prefix: str, no_task_left: None) -> None:
    """The last user is cancelled while entering, after the others left: the connection is closed."""
    broker = make_broker(server, prefix)
    async with broker:
        late = asyncio.create_task(broker.__aenter__())
        await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    with pytest.raises(ConfigError, match="not connected"):
        await broker.publish("t", {})
