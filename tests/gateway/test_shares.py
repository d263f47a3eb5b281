"""Shared subscriptions: traps 62 and 70."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rsmq import Broker
from rsmq.model.mqtt_subscription import shard_of
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

Make = Callable[..., RawClient]
KEPT = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}


async def drain(client: RawClient) -> list[bytes]:
    """What has come up to now. Messages of QoS 1 are acknowledged, those of QoS 2 finished."""
    client.send(p.PING)
    got, is_answered, releases = list[bytes](), False, 0
    while not is_answered or releases:
        each = await client.take()
        is_answered = is_answered or each.kind == 13
        if each.kind == 3:
            got.append(each.payload)
            if each.qos:
                client.send(p.ack(4 if each.qos == 1 else 5, each.packet_id))
                releases += each.qos == 2
        elif each.kind == 6:
            client.send(p.ack(7, each.packet_id))
            releases -= 1
    return got


async def collect(members: list[RawClient], count: int) -> list[list[bytes]]:
    """What each member gets, until they have so many different messages together."""
    got: list[list[bytes]] = [[] for _ in members]
    async with asyncio.timeout(60):
        while len({each for found in got for each in found}) < count:
            for found, member in zip(got, members, strict=True):
                found += await drain(member)
    return got


async def test_each_message_goes_to_one_member_of_each_share(client: Make, name: str) -> None:
    """A subscription that is not shared, and another share, get their own copy. Version 3 may share, too."""
    members = [await client(level).connect(f"{name}-{number}") for number, level in enumerate((5, 5, 4))]
    for number, member in enumerate(members):
        assert await member.subscribe((f"$share/one/{name}/#", number % 3)) == bytes([number % 3])
    alone, other = await client(5).connect(f"{name}-alone"), await client(5).connect(f"{name}-other")
    await alone.subscribe((f"{name}/+", 1))
    await other.subscribe((f"$share/two/{name}/x", 1), raw_props=b"\x0b\x07")
    sender = await client().connect(f"{name}-s")
    for qos in (0, 1, 2):
        for number in range(20):
            await sender.publish(f"{name}/x", b"%d %d" % (qos, number), qos, number + 1)
    wanted = {b"%d %d" % (qos, number) for qos in (0, 1, 2) for number in range(20)}
    got = await collect(members, 60)
    assert all(got), "each member has some"
    assert sorted(each for found in got for each in found) == sorted(wanted)
    for one in (alone, other):
        (found,) = await collect([one], 60)
        assert sorted(found) == sorted(wanted)
    await sender.publish(f"{name}/x", b"last")
    assert (await other.message()).properties[11] == [7]


async def test_a_member_may_have_the_same_filter_of_its_own(client: Make, name: str) -> None:
    one = await client(5).connect(name)
    await one.subscribe((f"$share/g/{name}", 1), (name, 1))
    for qos in (0, 1):
        await one.publish(name, b"twice", qos)
        assert [(await one.message()).payload for _ in range(2)] == [b"twice"] * 2
    one.send(p.unsubscribe([f"$share/g/{name}", f"$share/h/{name}"], 3, 5))
    assert (await one.take(11)).reasons == b"\0\x11"
    for qos in (0, 1):
        await one.publish(name, b"once", qos)
        assert (await one.message()).payload == b"once"
    assert await one.is_silent()


async def test_a_share_gets_no_retained_messages(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name), await client(5).connect(f"{name}-s")
    await sender.publish(name, b"kept", 1, retain=True)
    assert await one.subscribe((f"$share/g/{name}", 1)) == b"\1"
    assert await one.is_silent()
    await sender.publish(name, b"new", 1, retain=True)
    got = await one.message()
    assert (got.payload, got.retain) == (b"new", False)


async def test_connected_members_come_first_and_messages_wait_where_there_are_none(
    client: Make, name: str, broker: Broker
) -> None:
    here, away = await client(5).connect(f"{name}-here", **KEPT), await client(5).connect(f"{name}-away", **KEPT)
    sender = await client().connect(f"{name}-s")
    for each in (here, away):
        await each.subscribe((f"$share/g/{name}", 1))
    await away.disconnect()
    key = broker.keys.mqtt(shard_of(f"{name}-away"), "subscriptions")
    while not (await broker.client.execute_command("HGET", key, f"{name}-away")).endswith(b",0]"):
        await asyncio.sleep(0.01)  # the gateway notes that it is away after it has closed the socket
    for number in range(20):
        await sender.publish(name, b"%d" % number)
        assert (await here.message()).payload == b"%d" % number
    await here.disconnect()
    for number in range(20):
        await sender.publish(name, b"%d" % number)
    again = [await client(5).connect(f"{name}-{each}", **KEPT) for each in ("here", "away")]
    got = await collect(again, 20)
    assert sorted(int(each) for found in got for each in found) == list(range(20))
    for number in range(20):  # both are connected again
        await sender.publish(name, b"%d" % number)
    assert all(await collect(again, 20))


async def test_what_a_member_has_not_acknowledged_goes_to_others_when_its_session_ends(client: Make, name: str) -> None:
    """Not a message of QoS 2 that was on its way to it."""
    leaving = await client(5).connect(f"{name}-l", raw_props=b"\x21\0\2")
    staying = await client(5).connect(f"{name}-s")
    sender = await client().connect(f"{name}-p")
    await leaving.subscribe((f"$share/g/{name}/#", 2), raw_props=b"\x0b\x05")
    for number in range(10):
        await sender.publish(f"{name}/1", b"%d" % number)
    await sender.publish(f"{name}/2", b"never sent", 2)
    out = [await leaving.take(3) for _ in range(2)]
    assert [each.properties[11] for each in out] == [[5], [5]]
    await staying.subscribe((f"$share/g/{name}/#", 2), raw_props=b"\x0b\x06")
    leaving.abort()
    got = [await staying.take(3) for _ in range(11)]
    assert [each.payload for each in got] == [b"%d" % number for number in range(10)] + [b"never sent"]
    assert {each.properties[11][0] for each in got} == {6}
    staying.send(b"".join(p.ack(4, each.packet_id) for each in got[:-1]))
    staying.send(p.ack(5, got[-1].packet_id))
    staying.send(p.ack(7, (await staying.take(6)).packet_id))

    leaving = await client(5).connect(f"{name}-2")
    await leaving.subscribe((f"$share/h/{name}-2", 2))
    await sender.publish(f"{name}-2", b"its own", 2)
    await leaving.take(3)
    await staying.subscribe((f"$share/h/{name}-2", 2))
    await leaving.disconnect()
    assert await drain(staying) == []


async def test_no_message_of_a_share_is_lost_when_its_gateway_is_killed(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    """Members with clean sessions there; the survivor's member gets what they have not acknowledged.

    What the dead gateway was routing when it was killed may come twice: it is routed again, for other members.
    """
    sender = await client().connect(f"{name}-s")
    staying = await client(5).connect(name)
    await staying.subscribe((f"$share/g/{name}", 1))
    with GatewayProcess(server.url, fleet_prefix, routes={"ingest/#": "ingest"}) as dying:
        members = [await client(5, dying.port).connect(f"{name}-{number}") for number in range(3)]
        for each in members:
            await each.subscribe((f"$share/g/{name}", 1))
        for number in range(30):
            await sender.publish(name, b"%d" % number)
        first = await members[0].message(ack=False)
        dying.kill()
    (got,) = await collect([staying], 30)
    assert {int(each) for each in got} == set(range(30))
    assert first.payload in got
