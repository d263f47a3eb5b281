"""The heartbeat, its presence and the membership that other members see, on a real server with real connections."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

from rsmq.heartbeat.heartbeat import InFlightMessages
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.heartbeat.presence import Presence
from rsmq.heartbeat.registration import GroupMembership, Registration
from rsmq.model.clock import monotonic
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import BlockingClient, Client, Connector
from rsmq.redis.scripts import TOUCH_MESSAGES
from tests.heartbeat.member import GROUP, TOPIC, Member, member
from tests.patience import until
from tests.servers import Server
from tests.unchecked import unchecked

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pair(client: Client, connector: Connector, settings: Settings) -> AsyncIterator[tuple[Member, Member]]:
    """Two members that see each other."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(member("one", client, connector, settings))
        two = await stack.enter_async_context(member("two", client, connector, settings))
        await until(lambda: one.membership.live == two.membership.live == ("one", "two"), "they see each other")
        yield one, two


async def test_member_is_not_seen_before_its_presence(
    client: Client, connector: Connector, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would count its silence from then, and replace it when its presence breaks soon after it has begun."""
    subscribe, register, gate, seen = Presence._subscribe, Registration.add, threading.Event(), list[bool]()

    def subscribe_late(self: Presence, pubsub: Any) -> None:
        gate.wait(30)
        subscribe(self, pubsub)

    def note(self: Registration, membership: GroupMembership) -> None:
        seen.append(gate.is_set())
        register(self, membership)

    monkeypatch.setattr(Presence, "_subscribe", subscribe_late)
    monkeypatch.setattr(Registration, "add", note)
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(gate.set))
    async with member("one", client, connector, settings):
        assert seen == [True]


async def test_leaving_member_is_removed_from_the_view_at_once(pair: tuple[Member, Member], client: Client) -> None:
    """Leaving is announced, and no key of the member is left."""
    one, two = pair
    await two.heartbeat.leave(TOPIC, GROUP)
    await until(lambda: one.membership.live == ("one",), "the other is gone")
    assert await client.execute_command("SMEMBERS", one.keys.members(TOPIC, GROUP)) == [b"one"]
    assert await client.execute_command("EXISTS", one.keys.alive(TOPIC, GROUP, "two")) == 0


async def test_member_whose_sockets_close_is_replaced_before_its_lease_ends(
    pair: tuple[Member, Member], client: Client
) -> None:
    """It is absent after the grace; its lease is granted under the next epoch although it has not run out."""
    one, two = pair
    held = await two.take()
    assert held is not None
    assert await one.take() is None
    await two.vanish()
    await until(lambda: one.membership.absent == {"two"}, "its absence is seen")
    assert await client.execute_command("EXISTS", one.keys.alive(TOPIC, GROUP, "two")) == 1
    lease = await one.take(one.membership.absent)
    assert lease is not None
    assert int(lease.epoch) > int(held.epoch)


async def test_killed_subscription_of_a_live_member_is_renewed_within_the_grace(
    pair: tuple[Member, Member], client: Client
) -> None:
    """No member becomes absent when every subscription is killed."""
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


async def test_what_a_member_has_said_is_written_again_after_a_failover(
    pair: tuple[Member, Member], client: Client
) -> None:
    """The new master may have what it said before: who resizes a topic would wait for this member for ever."""
    one, key = pair[0], pair[0].keys.alive(TOPIC, GROUP, "one")
    before = await client.execute_command("GET", key)

    async def is_said() -> bool:
        return json.loads(await client.execute_command("GET", key)).get("layout") == 7

    one.heartbeat.tell(TOPIC, GROUP, layout=7)
    await until(is_said, "it is written")
    await client.execute_command("SET", key, before, "KEEPTTL")
    await client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL")
    await until(is_said, "it is written again")


async def test_lease_taken_by_another_is_lost_at_the_next_heartbeat(pair: tuple[Member, Member]) -> None:
    """The callback runs in the owner's loop, and the lease object is never held again."""
    one, two = pair
    lease = await one.take()
    assert lease is not None
    await one.leases.release(lease)
    assert await two.take() is not None
    one.heartbeat.renew_now()
    await until(lambda: one.lost == [lease], "the loss is reported")
    assert not lease.is_held()
    lease.prolong(float("inf"))
    assert not lease.is_held()


async def test_lease_with_a_blocked_event_loop_stays_held(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """The loop is blocked for two leases; the thread keeps renewing."""
    short = unchecked(settings, lease_ttl=timedelta(seconds=2))
    async with member("one", client, connector, short) as one:
        lease = await one.take()
        assert lease is not None
        time.sleep(4)  # noqa: ASYNC251 - this is what a handler that blocks the loop does
        assert lease.is_held()
        assert await Leases(client, one.keys, short, "two").take(TOPIC, 0, GROUP, reader="") is None
        assert not one.lost


async def test_member_of_a_server_out_of_memory_stays_alive(prefix: str) -> None:
    """PEXPIRE and the renewal work although SET is refused."""
    with Server() as server:
        settings = Settings(url=server.url, prefix=prefix, lease_ttl=timedelta(seconds=5))
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


async def test_joining_without_memory_keeps_the_leases(prefix: str) -> None:
    """The refused writes come last and are repeated: the member is visible as soon as there is memory."""
    with Server() as server:
        settings = Settings(url=server.url, prefix=prefix, lease_ttl=timedelta(seconds=5))
        connector = Connector(server.url, settings)
        async with connector.connected() as client, member("one", client, connector, settings) as one:
            lease = await one.take()
            assert lease is not None
            await client.execute_command("CONFIG", "SET", "maxmemory", "1")
            joining = asyncio.create_task(one.heartbeat.join("refunds", GROUP, {}, lambda: None))
            started = lease.deadline
            await until(lambda: lease.deadline > started + 2 or one.lost, "two more leases have been renewed")
            assert not one.lost
            assert not joining.done()
            await client.execute_command("CONFIG", "SET", "maxmemory", "0")
            await joining
            assert await client.execute_command("EXISTS", one.keys.alive("refunds", GROUP, "one")) == 1


async def test_member_pruned_by_mistake_is_visible_again(pair: tuple[Member, Member], client: Client) -> None:
    """A member may prune another just before its heartbeat is back: every heartbeat also checks the set."""
    one, two = pair

    async def is_out_of_sight() -> bool:  # its next heartbeat may come before the other member looks
        await client.execute_command("SREM", one.keys.members(TOPIC, GROUP), "two")
        one.membership.refresh()
        return one.membership.live == ("one",)

    await until(is_out_of_sight, "it is out of sight")
    two.heartbeat.renew_now()
    await until(lambda: one.membership.live == ("one", "two"), "it is back")


async def test_withdrawn_membership_is_not_written_again_by_a_late_heartbeat(
    pair: tuple[Member, Member], client: Client, connector: Connector
) -> None:
    """A heartbeat that began before the withdrawal and finds the key gone after it does not write it again."""
    _, two = pair
    (membership,) = two.heartbeat._registration.memberships
    await two.heartbeat.leave(TOPIC, GROUP)
    thread = connector.blocking_client()
    two.heartbeat._registration.write(thread, membership)
    thread.close()
    assert await client.execute_command("EXISTS", two.keys.alive(TOPIC, GROUP, "two")) == 0
    assert await client.execute_command("SMEMBERS", two.keys.members(TOPIC, GROUP)) == [b"one"]


async def test_renewal_after_script_flush_sends_the_source(pair: tuple[Member, Member], client: Client) -> None:
    """SCRIPT FLUSH, a restart or a failover costs no lease."""
    one, _ = pair
    lease = await one.take()
    assert lease is not None
    for _ in range(2):
        await client.execute_command("SCRIPT", "FLUSH")
        before = lease.deadline
        one.heartbeat.renew_now()
        await until(lambda before=before: lease.deadline > before or one.lost, "it is renewed")  # type: ignore[misc]
    assert not one.lost


async def test_lease_after_a_short_outage_is_renewed_before_another_member_takes_it(prefix: str) -> None:
    """The server is away for less than a lease and the grace: the epoch stays, no member is dead or absent."""
    with Server(aof=True) as server:
        settings = Settings(url=server.url, prefix=prefix, presence_grace="PT5S")
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


class Hindered(Connector):
    """Its first clients for threads cannot be made."""

    failures = 4

    def blocking_client(self) -> BlockingClient:
        if self.failures:
            self.failures -= 1
            raise OSError("too many open files")
        return super().blocking_client()


async def test_member_whose_connections_cannot_be_made_at_first_lives(
    client: Client, server_url: str, settings: Settings
) -> None:
    """Neither the thread of the heartbeat nor that of the presence ends with such an error."""
    hindered = Hindered(server_url, settings)
    async with member("one", client, hindered, settings) as one:
        await until(lambda: one.membership.live == ("one",), "it is seen")
        lease = await one.take()
        assert lease is not None
        before = lease.deadline
        await until(lambda: lease.deadline > before, "it is renewed")
    assert not hindered.failures


async def test_touched_messages_in_flight_keep_a_short_idle_time(pair: tuple[Member, Member], client: Client) -> None:
    """Shared distribution: messages are touched in chunks; a message that another member claimed stays with it."""
    one, _ = pair
    stream = one.keys.stream(TOPIC, 0)
    await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    for _ in range(1200):
        await client.execute_command("XADD", stream, "*", "data", "1")
    rows = (await client.execute_command("XREADGROUP", "GROUP", GROUP, "one", "STREAMS", stream, ">"))[0][1]
    held = [entry_id for entry_id, _ in rows]
    await client.execute_command("XCLAIM", stream, GROUP, "two", 0, held[0])
    await client.execute_command("XCLAIM", stream, GROUP, "one", 0, *held[1:], "IDLE", 600_000, "JUSTID")
    lease = Lease.shared(TOPIC, GROUP, 0, "one", deadline := monotonic() + 5)
    taken = list[bytes]()
    one.heartbeat.touch(InFlightMessages(stream, GROUP, lease, "dlq", lambda: held, lambda ids, _: taken.extend(ids)))
    one.heartbeat.renew_now()
    await until(lambda: lease.deadline != deadline, "the lease is prolonged")
    assert await client.execute_command("XPENDING", stream, GROUP, "IDLE", 500_000, "-", "+", 10) == []
    assert [row[0] for row in await client.execute_command("XPENDING", stream, GROUP, "-", "+", 9, "two")] == held[:1]
    await until(lambda: taken[:1] == held[:1], "the owner hears which lease it has lost")


async def test_heartbeat_touches_every_partition_in_the_exchange_that_renews_the_leases(
    pair: tuple[Member, Member], client: Client, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease counts from the start of the heartbeat: an exchange for each partition would use it up."""
    one, _ = pair
    leases = [Lease.shared(TOPIC, GROUP, partition, "one", monotonic() + 5) for partition in range(3)]
    for lease in leases:
        stream = one.keys.stream(TOPIC, lease.partition)
        await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
        one.heartbeat.touch(InFlightMessages(stream, GROUP, lease, "dlq", lambda: [b"1-1"], lambda *_: None))
    blocking, exchanges = connector.blocking_client(), list[list[Any]]()
    send = blocking.pipelined

    def note(commands: Any, **options: Any) -> Any:
        exchanges.append([command[1] for command in commands])
        return send(commands, **options)

    monkeypatch.setattr(blocking, "pipelined", note)
    await asyncio.to_thread(one.heartbeat._renew_all, blocking)
    blocking.close()
    first, *others = [exchange.count(TOUCH_MESSAGES.sha) for exchange in exchanges]
    assert (first, sum(others)) == (3, 0)


async def test_touch_of_a_stream_without_its_group_skips_only_that_stream(
    pair: tuple[Member, Member], client: Client
) -> None:
    """The lease of that partition runs out; the next stream of the same heartbeat is touched."""
    one, _ = pair
    await client.execute_command("XGROUP", "CREATE", one.keys.stream(TOPIC, 0), GROUP, "0", "MKSTREAM")
    deadline = monotonic() + 5
    gone, there = (Lease.shared(TOPIC, GROUP, partition, "one", deadline) for partition in (7, 0))
    for lease in (gone, there):
        stream = one.keys.stream(TOPIC, lease.partition)
        one.heartbeat.touch(InFlightMessages(stream, GROUP, lease, "dlq", lambda: [b"1-1"], lambda *_: None))
    one.heartbeat.renew_now()
    await until(lambda: there.deadline != deadline, "the other one is touched")
    assert gone.deadline == deadline


async def test_lease_released_during_its_renewal_is_not_reported_as_lost(pair: tuple[Member, Member]) -> None:
    """A renewal that began before the release is refused, and the forgotten lease gets no callback."""
    one, _ = pair
    lease = await one.take()
    assert lease is not None
    one.heartbeat.forget(lease)
    one.heartbeat._lost(lease, one.lost.append)
    await asyncio.sleep(0)
    assert not one.lost
    assert lease.is_held()


async def test_lease_that_took_long_to_take_is_renewed_at_once(
    client: Client, connector: Connector, settings: Settings
) -> None:
    """A slow connection has used up half of it, and the next heartbeat may be as slow, so it starts at once."""
    slow = unchecked(settings, lease_ttl=timedelta(hours=1))
    async with member("one", client, connector, slow) as one:
        lease = await one.leases.take(TOPIC, 0, GROUP, reader="")
        assert lease is not None
        lease.deadline -= timedelta(minutes=30).total_seconds()
        late = lease.deadline
        one.heartbeat.renew(lease, one.lost.append)
        await until(lambda: lease.deadline > late, "it is renewed")
