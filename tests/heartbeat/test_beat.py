"""The heartbeat, its presence and the membership that others see, on a real server with real connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from rsmq.connect import Client, Connector
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.settings import Settings
from tests.heartbeat.member import GROUP, TOPIC, Member, member
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.anyio


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
    async with asyncio.timeout(20):
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


async def test_joining_without_memory_costs_no_lease(prefix: str) -> None:
    """What is refused is asked for last, and again: the member shows as soon as there is room."""
    with Server() as server:
        settings = Settings(url=server.url, prefix=prefix, lease_ttl=timedelta(seconds=1))
        connector = Connector(server.url, settings)
        async with connector.connected() as client, member("one", client, connector, settings) as one:
            lease = await one.take()
            assert lease is not None
            await client.execute_command("CONFIG", "SET", "maxmemory", "1")
            joining = asyncio.create_task(one.beat.join("refunds", GROUP, {}, lambda: None))
            started = lease.deadline
            await until(lambda: lease.deadline > started + 2 or one.lost, "two more leases have been renewed")
            assert not one.lost
            assert not joining.done()
            await client.execute_command("CONFIG", "SET", "maxmemory", "0")
            await joining
            assert await client.execute_command("EXISTS", one.keys.alive("refunds", GROUP, "one")) == 1


async def test_a_member_pruned_by_mistake_shows_again(pair: tuple[Member, Member], client: Client) -> None:
    """Whoever prunes may have looked before the heartbeat was back: every beat looks at the set, too."""
    one, two = pair

    async def is_out_of_sight() -> bool:  # its next beat may have come before anybody looked
        await client.execute_command("SREM", one.keys.members(TOPIC, GROUP), "two")
        one.membership.notice()
        return one.membership.live == ("one",)

    await until(is_out_of_sight, "it is out of sight")
    two.beat.poke()
    await until(lambda: one.membership.live == ("one", "two"), "it is back")


async def test_a_goodbye_is_not_undone_by_a_beat(
    pair: tuple[Member, Member], client: Client, connector: Connector
) -> None:
    """A beat that began before the goodbye, and finds the key gone after it, does not write it again."""
    _, two = pair
    (sign,) = two.beat._signboard.signs
    await two.beat.leave(TOPIC, GROUP)
    thread = connector.blocking_client()
    two.beat._signboard.put_up(thread, sign)
    thread.close()
    assert await client.execute_command("EXISTS", two.keys.alive(TOPIC, GROUP, "two")) == 0
    assert await client.execute_command("SMEMBERS", two.keys.members(TOPIC, GROUP)) == [b"one"]


async def test_a_server_that_forgot_the_scripts_gets_them_again(pair: tuple[Member, Member], client: Client) -> None:
    """SCRIPT FLUSH, a restart or a failover cost nobody a lease."""
    one, _ = pair
    lease = await one.take()
    assert lease is not None
    for _ in range(2):
        await client.execute_command("SCRIPT", "FLUSH")
        before = lease.deadline
        one.beat.poke()
        await until(lambda before=before: lease.deadline > before or one.lost, "it is renewed")  # type: ignore[misc]
    assert not one.lost


async def test_after_an_outage_the_leases_are_renewed_before_anybody_takes_them(prefix: str) -> None:
    """The server is away for less than a lease: the same epoch, nobody dead, nobody absent."""
    with Server(aof=True) as server:
        settings = Settings(url=server.url, prefix=prefix)
        connector = Connector(server.url, settings)
        async with (
            connector.connected() as client,
            member("one", client, connector, settings) as one,
            member("two", client, connector, settings) as two,
        ):
            await until(lambda: one.membership.live == two.membership.live == ("one", "two"), "they see each other")
            lease = await one.take()
            assert lease is not None
            before = lease.deadline
            await asyncio.to_thread(server.restart)
            await until(lambda: lease.deadline > before or one.lost, "it is renewed")
            assert await two.take(two.membership.absent) is None
            assert not one.lost
            assert two.membership.live == ("one", "two")


async def test_messages_in_hand_are_kept_young(pair: tuple[Member, Member], client: Client) -> None:
    """Shared distribution: touched in chunks; what another has claimed stays with the other."""
    one, _ = pair
    stream = one.keys.stream(TOPIC, 0)
    await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    for _ in range(1200):
        await client.execute_command("XADD", stream, "*", "data", "1")
    rows = (await client.execute_command("XREADGROUP", "GROUP", GROUP, "one", "STREAMS", stream, ">"))[0][1]
    held = [entry_id for entry_id, _ in rows]
    await client.execute_command("XCLAIM", stream, GROUP, "two", 0, held[0])
    await client.execute_command("XCLAIM", stream, GROUP, "one", 0, *held[1:], "IDLE", 600_000, "JUSTID")
    lease = Lease.shared(TOPIC, GROUP, 0, "one", deadline := time.monotonic() + 5)
    one.beat.touch(stream, GROUP, lease, lambda: held)
    one.beat.poke()
    await until(lambda: lease.deadline != deadline, "the belief is prolonged")
    assert await client.execute_command("XPENDING", stream, GROUP, "IDLE", 500_000, "-", "+", 10) == []
    assert [row[0] for row in await client.execute_command("XPENDING", stream, GROUP, "-", "+", 9, "two")] == held[:1]


async def test_a_stream_without_its_group_ends_no_beat(pair: tuple[Member, Member], client: Client) -> None:
    """What cannot be touched runs out; what comes after it in the same beat is touched."""
    one, _ = pair
    await client.execute_command("XGROUP", "CREATE", one.keys.stream(TOPIC, 0), GROUP, "0", "MKSTREAM")
    deadline = time.monotonic() + 5
    gone, there = (Lease.shared(TOPIC, GROUP, partition, "one", deadline) for partition in (7, 0))
    for lease in (gone, there):
        one.beat.touch(one.keys.stream(TOPIC, lease.partition), GROUP, lease, lambda: [b"1-1"])
    one.beat.poke()
    await until(lambda: there.deadline != deadline, "the other one is touched")
    assert gone.deadline == deadline


async def test_a_lease_given_back_while_it_is_renewed_is_not_lost(pair: tuple[Member, Member]) -> None:
    """A renewal that began before the release is refused; only who still watches the lease is told."""
    one, _ = pair
    lease = await one.take()
    assert lease is not None
    one.beat.forget(lease)
    one.beat._lost(lease, one.lost.append)
    await asyncio.sleep(0)
    assert not one.lost
    assert lease.is_held()


async def test_a_lease_that_took_long_to_get_is_renewed_at_once(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """A slow line has eaten half of it, and the next beat may take as long: it does not wait for its turn."""
    slow = settings.model_copy(update={"lease_ttl": timedelta(hours=1)})
    async with member("one", client, connector, slow) as one:
        lease = await one.leases.take(TOPIC, 0, GROUP, reader="")
        assert lease is not None
        lease.deadline -= timedelta(minutes=30).total_seconds()
        late = lease.deadline
        one.beat.watch(lease, one.lost.append)
        await until(lambda: lease.deadline > late, "it is renewed")
