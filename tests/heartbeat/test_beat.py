"""The heartbeat, its presence and the membership that others see, on a real server with real connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rsmq.connect import Client, Connector
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.heartbeat.membership import Membership
from rsmq.keys import Keys
from rsmq.settings import Settings
from tests.servers import Server

pytestmark = pytest.mark.anyio
TOPIC, GROUP = "orders", "billing"


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for a state."""
    with anyio.move_on_after(20):
        while not condition():
            await asyncio.sleep(0.01)
        return
    raise AssertionError(f"never: {what}")


class Member:
    """One member as a worker would hold it."""

    def __init__(self, name: str, client: Client, connector: Connector, settings: Settings) -> None:
        self.name, self.keys = name, Keys(settings.prefix)
        self.beat = Beat(connector, settings, self.keys, name)
        self.membership = Membership(client, self.keys, settings, name, TOPIC, GROUP)
        self.leases = Leases(client, self.keys, settings, name)
        self.lost: list[Lease] = []

    async def take(self, absent: frozenset[str] = frozenset()) -> Lease | None:
        """Take the lease of partition 0 and have it renewed."""
        lease = await self.leases.take(TOPIC, 0, GROUP, reader="", absent=absent)
        if lease is not None:
            self.beat.watch(lease, self.lost.append)
        return lease

    async def vanish(self) -> None:
        """End both threads without goodbye: the sockets close, as those of a killed process."""
        await anyio.to_thread.run_sync(self.beat.stop)


@asynccontextmanager
async def member(name: str, client: Client, connector: Connector, settings: Settings) -> AsyncIterator[Member]:
    """A member that has joined and watches."""
    one = Member(name, client, connector, settings)
    one.beat.start(asyncio.get_running_loop())
    async with anyio.create_task_group() as tasks:
        await one.beat.join(TOPIC, GROUP, {"handler": "h"}, one.membership.notice)
        await tasks.start(one.membership.run)
        yield one
        tasks.cancel_scope.cancel()
    await one.vanish()


@pytest.fixture
async def pair(client: Client, connector: Connector, settings: Settings) -> AsyncIterator[tuple[Member, Member]]:
    """Two members that see each other."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(member("one", client, connector, settings))
        two = await stack.enter_async_context(member("two", client, connector, settings))
        await until(lambda: one.membership.live == two.membership.live == ("one", "two"), "they see each other")
        yield one, two


async def test_a_goodbye_is_seen_at_once(pair: tuple[Member, Member], client: Client) -> None:
    """Leaving is announced; nothing of the member is left."""
    one, two = pair
    await two.beat.leave(TOPIC, GROUP)
    await until(lambda: one.membership.live == ("one",), "the other is gone")
    assert await client.execute_command("SMEMBERS", one.keys.members(TOPIC, GROUP)) == [b"one"]
    assert await client.execute_command("EXISTS", one.keys.alive(TOPIC, GROUP, "two")) == 0


async def test_a_member_whose_sockets_close_is_replaced_before_its_lease_ends(
    pair: tuple[Member, Member], client: Client
) -> None:
    """Absent after the grace; its lease is granted under the next epoch although the server still counts it as held."""
    one, two = pair
    held = await two.take()
    assert held is not None
    assert await one.take() is None
    await two.vanish()
    await until(lambda: one.membership.absent == {"two"}, "its absence is seen")
    assert await client.execute_command("EXISTS", one.keys.alive(TOPIC, GROUP, "two")) == 1
    lease = await one.take(one.membership.absent)
    assert lease is not None
    assert int(lease.epoch) == int(held.epoch) + 1


async def test_a_lost_subscription_is_renewed_within_the_grace(pair: tuple[Member, Member], client: Client) -> None:
    """Killing every subscription of a live member makes nobody absent."""
    one, two = pair
    channel = one.keys.presence("two")
    await client.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
    seen: set[frozenset[str]] = set()
    with anyio.fail_after(20):
        while (await client.execute_command("PUBSUB", "NUMSUB", channel))[1] == 0:
            seen.add(one.membership.absent)
    for _ in range(8):  # two graces long
        await one.membership.wait(0.25)
        seen.add(one.membership.absent)
    assert seen == {frozenset()}
    assert two.membership.live == ("one", "two")


async def test_a_lease_taken_by_another_is_lost_at_the_next_beat(pair: tuple[Member, Member]) -> None:
    """The owner is told in its loop, and never believes in that grant again."""
    one, two = pair
    lease = await one.take()
    assert lease is not None
    await one.leases.release(lease)
    assert await two.take() is not None
    one.beat.poke()
    await until(lambda: one.lost == [lease], "the loss is told")
    assert not lease.is_held()
    lease.prolong(float("inf"))
    assert not lease.is_held()


async def test_a_blocked_event_loop_loses_nothing(client: Client, connector: Connector, settings: Settings) -> None:
    """The loop stands still for two leases; the thread goes on beating."""
    short = settings.model_copy(update={"lease_ttl": timedelta(seconds=1)})
    async with member("one", client, connector, short) as one:
        lease = await one.take()
        assert lease is not None
        time.sleep(2)  # noqa: ASYNC251 - this is what a handler that blocks the loop does
        assert lease.is_held()
        assert await Leases(client, one.keys, short, "two").take(TOPIC, 0, GROUP, reader="") is None
        assert not one.lost


async def test_a_server_out_of_memory_kills_no_member(prefix: str) -> None:
    """PEXPIRE and the renewal work where SET is refused."""
    with Server() as server:
        settings = Settings(url=server.url, prefix=prefix, lease_ttl=timedelta(seconds=1))
        connector = Connector(server.url, settings)
        async with connector.connected() as client, member("one", client, connector, settings) as one:
            lease = await one.take()
            assert lease is not None
            await client.execute_command("CONFIG", "SET", "maxmemory", "1")
            started = lease.deadline
            await until(lambda: lease.deadline > started + 2 or one.lost, "two more leases have been renewed")
            assert not one.lost
            assert await client.execute_command("EXISTS", one.keys.alive(TOPIC, GROUP, "one")) == 1
            await client.execute_command("CONFIG", "SET", "maxmemory", "0")
