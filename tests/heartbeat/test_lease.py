"""Leases: taken, given back, believed in for a bounded time, and the last owner's reader cut off."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import timedelta

import anyio
import pytest

from rsmq.clock import monotonic
from rsmq.connect import Client, Connector
from rsmq.errors import BrokerUnavailable
from rsmq.heartbeat.lease import Lease, Leases
from rsmq.keys import Keys
from rsmq.script import OK, TAKE_LEASE
from rsmq.settings import Settings
from rsmq.wire import Wire, pack
from tests.servers import Kind, Server

pytestmark = pytest.mark.anyio
TOPIC, GROUP = "orders", "billing"


def lease_until(deadline: float) -> Lease:
    """A grant that is believed in until then."""
    return Lease(TOPIC, GROUP, 0, "key", "one", "1", deadline)


def test_it_is_believed_until_its_deadline() -> None:
    """By the local clock, without asking anybody; a renewal that comes too late changes nothing."""
    assert lease_until(monotonic() + 60).is_held()
    over = lease_until(monotonic())
    over.prolong(monotonic() + 60)
    assert not over.is_held()


def test_once_lost_it_is_never_held_again() -> None:
    """A renewal that was on its way does not bring it back."""
    lease = lease_until(monotonic() + 60)
    lease.lose()
    lease.prolong(monotonic() + 60)
    assert not lease.is_held()
    assert "lost" in repr(lease)


async def test_belief_ends_before_the_server_gives_it_away(client: Client, keys: Keys, settings: Settings) -> None:
    """Counted from before the call, less the margin."""
    before = monotonic()
    lease = await Leases(client, keys, settings, "one").take(TOPIC, 0, GROUP, reader="")
    assert lease is not None
    believed = (settings.lease_ttl - settings.lease_margin).total_seconds()
    assert before + believed <= lease.deadline <= monotonic() + believed


async def test_one_owner_at_a_time(client: Client, keys: Keys, settings: Settings) -> None:
    """Refused while held, granted after the release under the next epoch; a stale release frees nothing."""
    one, two = (Leases(client, keys, settings, name) for name in ("one", "two"))
    lease = await one.take(TOPIC, 0, GROUP, reader="")
    assert lease is not None
    assert await two.take(TOPIC, 0, GROUP, reader="") is None
    await one.release(lease)
    other = await two.take(TOPIC, 0, GROUP, reader="")
    assert other is not None
    assert (lease.epoch, other.epoch) == ("1", "2")
    await one.release(lease)
    assert await one.take(TOPIC, 0, GROUP, reader="") is None


async def test_whoever_is_said_to_be_absent_but_listens_keeps_it(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """The server looks itself; a third member's absence does not count either."""
    assert await Leases(client, keys, settings, "one").take(TOPIC, 0, GROUP, reader="")
    listener = client.pubsub()
    await listener.subscribe(keys.presence("one"))
    await listener.get_message(timeout=5)
    two = Leases(client, keys, settings, "two")
    assert await two.take(TOPIC, 0, GROUP, reader="", absent={"one"}) is None
    await listener.aclose()
    assert await two.take(TOPIC, 0, GROUP, reader="", absent={"three"}) is None


# -- the last owner's reader ------------------------------------------------------------------------------------------


@pytest.fixture(params=["valkey-9.1 unix", "valkey-9.1 tcp", "redis-8.2 unix", "redis-8.2 tcp"])
async def foreign(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of another kind of server, or over another kind of socket."""
    kind: Kind
    kind, _, socket = request.param.partition(" ")
    with Server(kind=kind, tcp=socket == "tcp") as server:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            yield client


async def test_a_blocked_read_of_the_last_owner_takes_nothing(foreign: Client, keys: Keys, settings: Settings) -> None:
    """Its connection is ended before the new owner reads: what is published then goes to the new owner."""
    stream = keys.stream(TOPIC, 0)
    await foreign.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    wire = Wire(foreign)
    await wire.open()
    short = settings.model_copy(update={"lease_ttl": timedelta(0)})
    assert await Leases(foreign, keys, short, "one").take(TOPIC, 0, GROUP, reader=f"{wire.client_id} {wire.address}")
    await wire.send([pack(("XREADGROUP", "GROUP", GROUP, "one", "BLOCK", 60_000, "STREAMS", stream, ">"))])
    assert await Leases(foreign, keys, settings, "two").take(TOPIC, 0, GROUP, reader="")
    await foreign.execute_command("XADD", stream, "*", "data", "1")
    assert (await foreign.execute_command("XPENDING", stream, GROUP))[0] == 0
    with pytest.raises(BrokerUnavailable):
        await wire.receive(1, 10)


async def test_the_last_owner_is_cut_off_though_the_first_answer_was_lost(
    client: Client, keys: Keys, settings: Settings
) -> None:
    """The server has granted it and nobody heard whom to cut off: whoever asks again is told once more."""
    stream, lease = keys.stream(TOPIC, 0), keys.lease(TOPIC, 0, GROUP)
    await client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    wire = Wire(client)
    await wire.open()
    short = settings.model_copy(update={"lease_ttl": timedelta(0)})
    assert await Leases(client, keys, short, "one").take(TOPIC, 0, GROUP, reader=f"{wire.client_id} {wire.address}")
    await wire.send([pack(("XREADGROUP", "GROUP", GROUP, "one", "BLOCK", 60_000, "STREAMS", stream, ">"))])
    assert (await TAKE_LEASE(client, (lease, stream), ("two", 60_000, "", "", "", GROUP)))[0] == OK
    assert await Leases(client, keys, settings, "two").take(TOPIC, 0, GROUP, reader="")
    await client.execute_command("XADD", stream, "*", "data", "1")
    assert (await client.execute_command("XPENDING", stream, GROUP))[0] == 0
    with pytest.raises(BrokerUnavailable):
        await wire.receive(1, 10)


async def test_nobody_elses_connection_is_cut_off(client: Client, keys: Keys, settings: Settings) -> None:
    """After a restart of the server the same number is another connection, from another address."""
    wire = Wire(client)
    await wire.open()
    short = settings.model_copy(update={"lease_ttl": timedelta(0)})
    assert await Leases(client, keys, short, "one").take(TOPIC, 0, GROUP, reader=f"{wire.client_id} 192.0.2.1:99")
    assert await Leases(client, keys, settings, "two").take(TOPIC, 0, GROUP, reader="")
    assert await wire.exchange([pack(("PING",))]) == [b"PONG"]
    await wire.close()


async def test_a_user_who_may_not_kill_gets_the_lease_and_one_warning(
    prefix: str, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """The cut is a help, not a condition: the epoch keeps the last owner out anyway."""
    with Server(tcp=True) as server:
        with server.client() as admin:
            admin.execute_command(
                "ACL", "SETUSER", "worker", "on", ">pw", "~*", "&*", "+@all", "-client|kill"
            )  # fmt: skip
        url = server.url.replace("redis://", "redis://worker:pw@")
        settings = Settings(url=url, prefix=prefix)
        short = settings.model_copy(update={"lease_ttl": timedelta(0)})
        async with Connector(url, settings).connected() as client:
            two = Leases(client, keys, settings, "two")
            with caplog.at_level(logging.WARNING, "rsmq.lease"):
                for partition in range(3):
                    await Leases(client, keys, short, "one").take(TOPIC, partition, GROUP, reader="7 127.0.0.1:1")
                    assert await two.take(TOPIC, partition, GROUP, reader="")
    assert len([record for record in caplog.records if "cut off" in record.message]) == 1


async def test_an_answer_that_does_not_come_is_an_error(client: Client, keys: Keys, settings: Settings) -> None:
    """A grant nobody heard of is no lease; asked again, the same member gets it under a new epoch."""
    one = Leases(client, keys, settings, "one")
    await client.execute_command("CLIENT", "PAUSE", 300, "WRITE")
    with anyio.move_on_after(0.05):
        await one.take(TOPIC, 0, GROUP, reader="")
    await client.execute_command("CLIENT", "UNPAUSE")
    assert await one.take(TOPIC, 0, GROUP, reader="") is not None
