"""One broker used by several tasks: they share a connection, and come and go in any order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta

import anyio
import anyio.lowlevel
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


def test_connection_stays_open_for_users_when_the_loop_is_ended_by_an_exit(server: Server, prefix: str) -> None:
    """The loop cancels all tasks at once, and a user still has to give back its leases. A new connection would leak."""
    broker, ids = make_broker(server, prefix), list[int]()

    async def use() -> None:
        async with broker:
            ids.append(await broker.client.execute_command("CLIENT", "ID"))
            asyncio.get_running_loop().call_soon(sys.exit)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    for _ in range(20):  # the connection has the time to end
                        ids.append(await broker.client.execute_command("CLIENT", "ID"))

    with pytest.raises(SystemExit):
        asyncio.run(use())
    assert len(ids) == 21
    assert len(set(ids)) == 1


async def test_user_that_cancels_all_other_tasks_does_not_wait_for_itself(server: Server, prefix: str) -> None:
    """The connection ends although this user has not left."""
    async with make_broker(server, prefix):
        others = [each for each in asyncio.all_tasks() if each.get_name() == "rsmq-connection"]
        for each in others:
            each.cancel()
        assert others
        await asyncio.wait(others)


def test_loop_ends_although_a_user_has_not_left(server: Server, prefix: str) -> None:
    """A script that enters a broker and never leaves it, in a task that has ended."""
    broker = make_broker(server, prefix)

    async def enter() -> str:
        await broker.__aenter__()
        return await broker.publish("t", {})

    assert asyncio.run(enter())


CALLS: dict[str, Callable[[Broker], Awaitable[object]]] = {
    "publish": lambda broker: broker.publish("t", {}),
    "publish to a new topic": lambda broker: broker.publish("u", {}),
    "publish with a unique name": lambda broker: broker.publish("t", {}, unique="a"),
    "publish many": lambda broker: broker.publish_many("t", [{}]),
    "send": lambda broker: broker.send("device", {}),
    "look": lambda broker: broker.look("1-1", topic="t"),
    "enter": lambda broker: broker.__aenter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_call_from_another_event_loop_is_refused(
    server: Server, prefix: str, call: Callable[[Broker], Awaitable[object]]
) -> None:
    """Before, it waited for ever. The text says what to use instead, and the broker goes on in its own event loop."""

    async def bounded() -> object:
        return await asyncio.wait_for(call(broker), 30)

    async with make_broker(server, prefix) as broker:
        await broker.publish("t", {})
        with pytest.raises(ConfigError, match=r"another event loop.*publish_sync"):
            await asyncio.to_thread(asyncio.run, bounded())
        assert await broker.publish("t", {})


async def test_stop_while_run_connects_ends_it_before_a_handler_starts(server_url: str, prefix: str) -> None:
    """As when a service ends in the moment in which it starts."""
    broker, handled = Broker(Settings(url=server_url, prefix=prefix, preflight="warn")), list[int]()

    @broker.handler("orders", group="billing")
    async def bill(number: int) -> None:
        handled.append(number)

    await publish_one(server_url, prefix)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(broker.run)
            await anyio.lowlevel.checkpoint()
            assert broker.worker is None
            broker.stop()
    assert handled == []


async def publish_one(url: str, prefix: str) -> None:
    """A message that waits."""
    async with Broker(Settings(url=url, prefix=prefix, preflight="warn")) as other:
        await other.publish("orders", 1)
