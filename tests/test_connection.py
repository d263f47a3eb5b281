"""One broker used by several tasks: they connect together, and come and go in any order."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable, ConfigError, Settings
from tests.servers import Server


def make_broker(server: Server, prefix: str) -> Broker:
    """One that gives up soon."""
    return Broker(
        Settings(url=server.url, prefix=prefix, preflight="warn", unavailable_timeout=timedelta(milliseconds=200))
    )


async def test_who_comes_while_another_connects_waits_for_it(server: Server, prefix: str) -> None:
    """All of them can publish at once."""
    broker = make_broker(server, prefix)

    async def publish(n: int) -> str:
        async with broker:
            return await broker.publish("t", {"n": n})

    assert len(set(await asyncio.gather(*(publish(n) for n in range(10))))) == 10


async def test_who_came_first_may_leave_first(server: Server, prefix: str, no_task_left: None) -> None:
    """The others go on; after the last of them nothing is open."""
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


async def test_all_who_wait_are_told_why_it_fails(prefix: str, no_task_left: None) -> None:
    """And when the server is there again the next one connects."""
    with Server() as server:
        broker = make_broker(server, prefix)
        server.kill()
        found = await asyncio.gather(*(broker.__aenter__() for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [BrokerUnavailable] * 3
        server.start()
        async with broker:
            await broker.publish("t", {})


async def test_who_is_cancelled_while_it_connects_leaves_it_to_the_others(
    server: Server, prefix: str, no_task_left: None
) -> None:
    """The first gives up at once; the second has asked meanwhile, and is connected."""
    broker = make_broker(server, prefix)
    first, second = asyncio.create_task(broker.__aenter__()), asyncio.create_task(broker.__aenter__())
    await asyncio.sleep(0)
    first.cancel()
    await second
    await broker.publish("t", {})
    await broker.__aexit__()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_who_is_cancelled_alone_ends_it(prefix: str, no_task_left: None) -> None:
    """Nobody waits any more, so nothing goes on connecting."""
    with Server() as server:
        broker = Broker(Settings(url=server.url, prefix=prefix, unavailable_timeout=timedelta(hours=1)))
        server.kill()
        with anyio.move_on_after(0.1):
            await broker.__aenter__()
        with pytest.raises(ConfigError, match="not connected"):
            await broker.publish("t", {})


async def test_who_is_cancelled_after_the_others_have_left_leaves_nothing_open(
    server: Server, prefix: str, no_task_left: None
) -> None:
    """The last to leave has never been inside: what the others had is ended all the same."""
    broker = make_broker(server, prefix)
    async with broker:
        late = asyncio.create_task(broker.__aenter__())
        await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    with pytest.raises(ConfigError, match="not connected"):
        await broker.publish("t", {})
