"""Leases: taken, released, held for a bounded time; the last owner's reader is cut off."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from datetime import timedelta

import anyio
import pytest

from rsmq.errors import BrokerUnavailable
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings, lease_margin
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.scripts import OK, RESET_GROUP, TAKE_LEASE
from tests.servers import Kind, Server
from tests.unchecked import unchecked

pytestmark = pytest.mark.anyio
TOPIC, GROUP = "orders", "billing"


def lease_until(deadline: float) -> Lease:
    """A grant that is held until then."""
    return Lease(TOPIC, GROUP, 0, "key", "one", "1", deadline)


def test_lease_past_its_deadline_is_not_held() -> None:
    """The local clock decides; a renewal that comes too late changes nothing."""
    assert lease_until(monotonic() + 60).is_held()
    over = lease_until(monotonic())
    over.prolong(monotonic() + 60)
    assert not over.is_held()


def test_lost_lease_is_never_held_again() -> None:
    """A renewal that was in progress does not revive it."""
    lease = lease_until(monotonic() + 60)
    lease.lose()
    lease.prolong(monotonic() + 60)
    assert not lease.is_held()
    assert "lost" in repr(lease)


async def test_lease_deadline_is_before_the_end_on_the_server(client: Client, keys: Keys, settings: Settings) -> None:
    """The deadline counts from before the call, less the margin."""
    before = monotonic()
    lease = await Leases(client, keys, settings, "one").take(TOPIC, 0, GROUP, reader="")
    assert lease is not None
    held_for = (settings.lease_ttl - lease_margin(settings)).total_seconds()
    assert before + held_for <= lease.deadline <= monotonic() + held_for


async def test_held_lease_is_refused_to_another_member(client: Client, keys: Keys, settings: Settings) -> None:
    """It is granted after the release, under the next epoch; a stale release frees nothing."""
    one, two = (Leases(client, keys, settings, name) for name in ("one", "two"))
    lease = await one.take(TOPIC, 0, GROUP, reader="")
    assert lease is not None
    assert await two.take(TOPIC, 0, GROUP, reader="") is None
    await one.release(lease)
    other = await two.take(TOPIC, 0, GROUP, reader="")
    assert other is not None
    assert int(other.epoch) > int(lease.epoch)
    await one.release(lease)
    assert await one.take(TOPIC, 0, GROUP, reader="") is None


async def test_lease_of_an_absent_owner_with_a_subscriber_is_refused(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """The script checks the subscribers itself; the absence of a third member does not count either."""
    assert await Leases(client, keys, settings, "one").take(TOPIC, 0, GROUP, reader="")
    listener = client.pubsub()
    await listener.subscribe(keys.presence("one"))
    await listener.get_message(timeout=30)
    two = Leases(client, keys, settings, "two")
    assert await two.take(TOPIC, 0, GROUP, reader="", absent={"one"}) is None
    await listener.aclose()
    assert await two.take(TOPIC, 0, GROUP, reader="", absent={"three"}) is None


async def test_partition_without_a_record_waits_for_the_longest_lease(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """The record was deleted: the last owner may have a longer lease than the member that asks, and believes in it."""
    stream, member = keys.stream(TOPIC, 0), json.dumps({"member": "one", "lease_ttl_ms": 600_000})
    await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    assert await Leases(client, keys, settings, "one").take(TOPIC, 0, GROUP, reader="")
    await client.execute_command("SADD", keys.members(TOPIC, GROUP), "one")
    await client.execute_command("SET", keys.alive(TOPIC, GROUP, "one"), member)
    await client.execute_command("DEL", keys.lease(TOPIC, 0, GROUP))
    short = unchecked(settings, lease_ttl=timedelta(seconds=1))
    assert await Leases(client, keys, short, "two").take(TOPIC, 0, GROUP, reader="") is None
    until_ms = int(await client.execute_command("HGET", keys.lease(TOPIC, 0, GROUP), "until_ms"))
    assert until_ms - int((await client.execute_command("TIME"))[0]) * 1000 > 500_000


# -- the last owner's reader ------------------------------------------------------------------------------------------


@pytest.fixture(params=["valkey-9.1 unix", "valkey-9.1 tcp", "redis-8.2 unix", "redis-8.2 tcp"])
async def foreign(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of another kind of server, or over another kind of socket."""
    kind: Kind
    kind, _, socket = request.param.partition(" ")
    with Server(kind=kind, tcp=socket == "tcp") as server:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            yield client


async def test_blocked_read_of_the_last_owner_receives_nothing(foreign: Client, keys: Keys, settings: Settings) -> None:
    """Its connection is closed before the new owner reads: later messages go to the new owner."""
    stream = keys.stream(TOPIC, 0)
    await foreign.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    reader = RawConnection(foreign)
    await reader.open()
    short = unchecked(settings, lease_ttl=timedelta(0))
    assert await Leases(foreign, keys, short, "one").take(
        TOPIC, 0, GROUP, reader=f"{reader.client_id} {reader.address}"
    )
    await reader.send([pack(("XREADGROUP", "GROUP", GROUP, "one", "BLOCK", 60_000, "STREAMS", stream, ">"))])
    assert await Leases(foreign, keys, settings, "two").take(TOPIC, 0, GROUP, reader="")
    await foreign.execute_command("XADD", stream, "*", "data", "1")
    assert (await foreign.execute_command("XPENDING", stream, GROUP))[0] == 0
    with pytest.raises(BrokerUnavailable):
        await reader.receive(1, 10)


async def test_last_owner_is_cut_off_after_a_lost_reply(client: Client, keys: Keys, settings: Settings) -> None:
    """The reply that named the reader was lost: the next call returns it again."""
    stream, lease = keys.stream(TOPIC, 0), keys.lease(TOPIC, 0, GROUP)
    await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    reader = RawConnection(client)
    await reader.open()
    short = unchecked(settings, lease_ttl=timedelta(0))
    assert await Leases(client, keys, short, "one").take(TOPIC, 0, GROUP, reader=f"{reader.client_id} {reader.address}")
    await reader.send([pack(("XREADGROUP", "GROUP", GROUP, "one", "BLOCK", 60_000, "STREAMS", stream, ">"))])
    assert (await TAKE_LEASE(client, (lease, stream), ("two", 60_000, "", "", "", GROUP, "")))[0] == OK
    assert await Leases(client, keys, settings, "two").take(TOPIC, 0, GROUP, reader="")
    await client.execute_command("XADD", stream, "*", "data", "1")
    assert (await client.execute_command("XPENDING", stream, GROUP))[0] == 0
    with pytest.raises(BrokerUnavailable):
        await reader.receive(1, 10)


@pytest.mark.parametrize("ending", ["released late", "reset", "taken by a member that ended"])
async def test_late_read_is_cut_off_however_its_lease_ended(
    client: Client, keys: Keys, settings: Settings, ending: str
) -> None:
    """The read may arrive at the server long after that: the next owner closes its connection first."""
    stream, lease_key = keys.stream(TOPIC, 0), keys.lease(TOPIC, 0, GROUP)
    await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    reader = RawConnection(client)
    await reader.open()
    one, two = (Leases(client, keys, settings, name) for name in ("one", "two"))
    lease = await one.take(TOPIC, 0, GROUP, reader=reader.name)
    assert lease is not None
    if ending == "released late":
        await one.release(lease, reader.name)
    elif ending == "reset":
        at = (TOPIC, 0, GROUP)
        parts = (keys.retry, keys.cancels, keys.cancelled, keys.waits, keys.calls)
        names = (stream, lease_key, *[part(*at) for part in parts])
        assert await RESET_GROUP(client, names, (GROUP, "0")) == OK
    else:
        await client.execute_command("HSET", lease_key, "until_ms", 0)
        assert (await TAKE_LEASE(client, (lease_key, stream), ("three", 0, "5 addr", "", "", GROUP, "")))[0] == OK
    assert await two.take(TOPIC, 0, GROUP, reader="") is not None
    with pytest.raises(BrokerUnavailable):
        await reader.exchange([pack(("PING",))])


async def test_connection_from_another_address_is_not_cut_off(client: Client, keys: Keys, settings: Settings) -> None:
    """After a restart of the server the same client id belongs to another connection."""
    reader = RawConnection(client)
    await reader.open()
    short = unchecked(settings, lease_ttl=timedelta(0))
    assert await Leases(client, keys, short, "one").take(TOPIC, 0, GROUP, reader=f"{reader.client_id} 192.0.2.1:99")
    assert await Leases(client, keys, settings, "two").take(TOPIC, 0, GROUP, reader="")
    assert await reader.exchange([pack(("PING",))]) == [b"PONG"]
    await reader.close()


async def test_user_without_client_kill_gets_the_lease_and_one_warning(
    prefix: str, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Cutting off is only a help: the epoch keeps the last owner out anyway."""
    with Server(tcp=True) as server:
        with server.client() as admin:
            admin.execute_command(
                "ACL", "SETUSER", "worker", "on", ">pw", "~*", "&*", "+@all", "-client|kill"
            )  # fmt: skip
        url = server.url.replace("redis://", "redis://worker:pw@")
        settings = Settings(url=url, prefix=prefix)
        short = unchecked(settings, lease_ttl=timedelta(0))
        async with Connector(url, settings).connected() as client:
            two = Leases(client, keys, settings, "two")
            with caplog.at_level(logging.WARNING, "rsmq.lease"):
                for partition in range(3):
                    await Leases(client, keys, short, "one").take(TOPIC, partition, GROUP, reader="7 127.0.0.1:1")
                    assert await two.take(TOPIC, partition, GROUP, reader="")
    assert len([record for record in caplog.records if "cut off" in record.getMessage()]) == 1


async def test_lease_after_a_lost_reply_is_granted_again(client: Client, keys: Keys, settings: Settings) -> None:
    """A grant without a reply is no lease; the same member takes it again under a new epoch."""
    one = Leases(client, keys, settings, "one")
    await client.execute_command("CLIENT", "PAUSE", 300, "WRITE")
    with anyio.move_on_after(0.05):
        await one.take(TOPIC, 0, GROUP, reader="")
    await client.execute_command("CLIENT", "UNPAUSE")
    assert await one.take(TOPIC, 0, GROUP, reader="") is not None
