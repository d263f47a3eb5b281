"""What users of other brokers have reported, played with real gateways: docs/robustness.md has the table.

1. A subscriber is cut off without a FIN; what is published until it takes its session over (Mosquitto 1650).
2. A retained message is published at one node while a client subscribes at another one (VerneMQ 2251, 1633).
3. The expiry of a retained message, and of one that waits, counts down (HiveMQ CE 616, 784); it ends (NanoMQ 525).
4. A member of a share is closed with messages that it has not acknowledged (Mosquitto 2662).
5. Retained messages and shares (EMQX 1784, VerneMQ 808).
6. A session that is taken over or resumed gets no retained messages again (mochi-mqtt 153).
7. A topic alias is used at once, by many messages, and by a client that leaves behind them (NanoMQ 848, 1591, 2377).
8. A session without an expiry is taken over: its will comes, and it is no session to resume (EMQX 10551, 18565).
9. A retained message of 300 000 bytes and more (zigbee2mqtt 13030, 23771).
10. A client with a small Receive Maximum never acknowledges one message (EMQX 16296: its packet id is not used again).
11. A slow client subscribes to more retained messages than it reads at once (Mosquitto 2887, 3096, 3223).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rsmq import Broker
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

KEPT = b"\x11\0\0\0\x3c"
"""The property Session Expiry Interval: a minute."""


@pytest.fixture(scope="module")
def fleet(server: Server, fleet_prefix: str) -> Iterator[list[GatewayProcess]]:
    """Two gateways."""
    with ExitStack() as stack:
        yield [stack.enter_context(GatewayProcess(server.url, fleet_prefix)) for _ in range(2)]


async def connect(gateway: GatewayProcess, name: str, level: int = 5, **options: Any) -> RawClient:
    return await RawClient(gateway.port, level).connect(name, **{"keep_alive": 0, **options})


def expires(seconds: int) -> bytes:
    """The property Message Expiry Interval."""
    return b"\x02" + seconds.to_bytes(4, "big")


@pytest.mark.parametrize("level", [4, 5])
async def test_messages_published_while_a_connection_was_half_open_come_after_the_takeover(
    fleet: list[GatewayProcess], name: str, level: int
) -> None:
    """It has got them, and nobody has read them: they come again, in order, at the other gateway."""
    options = {"clean": False} | ({"raw_props": KEPT} if level == 5 else {})
    old = await connect(fleet[0], name, level, **options)
    await old.subscribe((name, 1))
    sender = await connect(fleet[0], f"{name}-s")
    for number in range(1, 31):
        await sender.publish(name, b"%d" % number, 1, number)
    new = await connect(fleet[1], name, level, **options)
    assert new.connack is not None
    assert new.connack.session_present
    await sender.publish(name, b"31", 1, 31)
    assert [int((await new.message()).payload) for _ in range(31)] == list(range(1, 32))
    assert await new.is_silent()


async def test_who_subscribes_at_another_gateway_while_a_retained_message_comes_misses_nothing(
    fleet: list[GatewayProcess], name: str
) -> None:
    """It gets `online` as the retained message or as a new one, and the last it gets is `online`."""
    sender = await connect(fleet[0], f"{name}-s")

    async def once(number: int) -> None:
        topic = f"{name}/{number}"
        await sender.publish(topic, b"offline", 0, retain=True)
        reader = await connect(fleet[1], f"{name}-{number}")
        subscribing = asyncio.ensure_future(reader.subscribe((topic, 1)))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        sender.send(p.publish(topic, b"online", 1, number + 1, 5, retain=True))
        await subscribing
        while (await reader.message()).payload != b"online":
            pass
        reader.abort()

    for number in range(40):
        await once(number)


async def test_the_expiry_of_a_retained_message_counts_down_and_ends(
    fleet: list[GatewayProcess], broker: Broker, name: str
) -> None:
    sender, away = await connect(fleet[0], f"{name}-s"), await connect(fleet[0], f"{name}-a", raw_props=KEPT)
    await away.subscribe((f"{name}/#", 1))
    await away.disconnect()
    await sender.publish(f"{name}/long", b"x", 1, 1, retain=True, raw_props=expires(1000))
    await sender.publish(f"{name}/short", b"x", 1, 2, retain=True, raw_props=expires(1))
    began = await broker.client.execute_command("TIME")

    async def seconds_have_passed() -> bool:
        now = await broker.client.execute_command("TIME")
        return int(now[0]) >= int(began[0]) + 3

    await until(seconds_have_passed, "the server's clock has gone on")
    late = await connect(fleet[1], f"{name}-l")
    await late.subscribe((f"{name}/#", 1))
    back = await connect(fleet[1], f"{name}-a", clean=False, raw_props=KEPT)
    for each in (late, back):
        got = await each.message()
        assert got.topic == f"{name}/long"
        assert 0 < got.properties[2][0] < 999
        assert await each.is_silent()


async def test_what_a_member_of_a_share_has_not_acknowledged_goes_to_another_when_it_is_closed(
    fleet: list[GatewayProcess], name: str
) -> None:
    """Its session ends with its connection."""
    members = [await connect(fleet[n % 2], f"{name}-{n}") for n in range(3)]
    for each in members:
        await each.subscribe((f"$share/g/{name}", 1))
    sender = await connect(fleet[0], f"{name}-s")
    for number in range(1, 31):
        await sender.publish(name, b"%d" % number, 1, number)
    kept = [await members[0].message(ack=False)]
    assert kept
    members[0].close()
    got = set[int]()

    async def read(one: RawClient) -> None:
        while len(got) < 30:
            got.add(int((await one.message()).payload))

    readers = [asyncio.ensure_future(read(each)) for each in members[1:]]
    try:
        await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert got == set(range(1, 31))
    finally:
        for each in readers:
            each.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def test_a_share_gets_no_retained_message_and_each_new_one_once(fleet: list[GatewayProcess], name: str) -> None:
    sender = await connect(fleet[0], f"{name}-s")
    await sender.publish(name, b"retained", 1, retain=True)
    members = [await connect(each, f"{name}-{n}") for n, each in enumerate(fleet)]
    for each in members:
        await each.subscribe((f"$share/g/{name}", 1))
    await sender.publish(name, b"new", 1, retain=True)
    first = {asyncio.ensure_future(each.message()): each for each in members}
    done, waiting = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert [each.result().payload for each in done] == [b"new"]
    for each in waiting:
        each.cancel()
        await asyncio.gather(each, return_exceptions=True)
        assert await first[each].is_silent()


async def test_a_session_that_goes_on_gets_no_retained_messages_again(
    fleet: list[GatewayProcess], broker: Broker, name: str
) -> None:
    sender = await connect(fleet[0], f"{name}-s")
    await sender.publish(name, b"retained", 1, retain=True)
    one = await connect(fleet[0], name, raw_props=KEPT)
    await one.subscribe((name, 1))
    assert (await one.message()).payload == b"retained"
    assert await one.is_silent()

    async def is_acknowledged() -> bool:
        device = await broker.devices.find(name)
        return device is not None and device.backlog == 0

    # a takeover that is faster than the acknowledgement gets it once more, with DUP, as MQTT has it
    await until(is_acknowledged, "the retained message is acknowledged at the server")
    for at in (1, 0):  # a takeover, and a return
        two = await connect(fleet[at], name, clean=False, raw_props=KEPT)
        assert await two.is_silent()
        await two.disconnect() if at else None


@pytest.mark.parametrize("qos", [0, 1])
async def test_topic_aliases_work_at_once_and_to_the_last_message_of_a_client(
    fleet: list[GatewayProcess], name: str, qos: int
) -> None:
    """Ten messages in one write, the first of which sets the alias, and a DISCONNECT behind them."""
    reader = await connect(fleet[1], f"{name}-r")
    await reader.subscribe((name, 1))
    for number in range(5):
        sender = await connect(fleet[0], f"{name}-{number}")
        assert sender.connack is not None
        alias = sender.connack.properties[34][0]  # the largest that is allowed
        assert alias > 0
        prop = b"\x23" + alias.to_bytes(2, "big")
        data = p.publish(name, b"0", qos, 1, 5, raw_props=prop)
        data += b"".join(p.publish("", b"%d" % n, qos, n + 1, 5, raw_props=prop) for n in range(1, 10))
        sender.send(data + p.DISCONNECT)
        assert [int((await reader.message()).payload) for _ in range(10)] == list(range(10))
    bad = await connect(fleet[0], f"{name}-bad")
    bad.send(p.publish(name, b"x", qos, 1, 5, raw_props=b"\x23" + (alias + 1).to_bytes(2, "big")))
    last = await bad.ended()
    assert last is not None
    assert (last.kind, last.reason) == (14, 0x94)


@pytest.mark.parametrize(("level", "clean"), [(4, True), (5, True), (5, False)])
async def test_a_session_without_an_expiry_is_taken_over_with_its_will_and_not_resumed(
    fleet: list[GatewayProcess], name: str, level: int, clean: bool
) -> None:
    watcher = await connect(fleet[0], f"{name}-w")
    await watcher.subscribe((name, 1))
    old = await connect(fleet[0], name, level, will=(name, b"gone", 1, False))
    await old.subscribe((f"{name}/x", 1))
    new = await connect(fleet[1], name, level, clean=clean)
    assert new.connack is not None
    assert not new.connack.session_present
    assert (await watcher.message()).payload == b"gone"
    last = await old.ended()
    if level == 5:
        assert last is not None
        assert last.reason == 0x8E
    await (await connect(fleet[0], f"{name}-s")).publish(f"{name}/x", b"x", 1)
    assert await new.is_silent()


@pytest.mark.parametrize(("limit", "size", "is_taken"), [("256KiB", 200_000, True), ("256KiB", 300_000, False),
                                                         ("1MiB", 1_000_000, True)])  # fmt: skip
@pytest.mark.parametrize("level", [4, 5])
async def test_a_large_retained_message_is_taken_up_to_the_limit_and_refused_above_it(
    server: Server, fleet_prefix: str, name: str, limit: str, size: int, is_taken: bool, level: int
) -> None:
    """A client that is refused gets the reason in version 5; the log has it, too."""
    prefix = f"{fleet_prefix}-{name}"
    with GatewayProcess(server.url, prefix, settings={"payload_limit": limit}) as gateway:
        watcher, sender = await connect(gateway, "watcher", level), await connect(gateway, "sender", level)
        await watcher.subscribe(("z2m/#", 1))
        sender.send(p.publish("z2m/devices", b"x" * size, 1, 1, level, retain=True))
        if not is_taken:
            last = await sender.ended()
            assert last is None or level == 5
            if last is not None:
                assert last.reason == 0x95
            assert await watcher.is_silent()
            assert "packet_too_large" in gateway.log().lower() or "larger" in gateway.log()
            return
        assert (await sender.answer(4)).packet_id == 1
        late = await connect(gateway, "late", level)
        await late.subscribe(("z2m/devices", 1))
        for each in (watcher, late):
            assert len((await each.message()).payload) == size


async def test_a_message_that_is_never_acknowledged_keeps_its_packet_id(fleet: list[GatewayProcess], name: str) -> None:
    """With a Receive Maximum of 2, one place stays for all others."""
    one = await connect(fleet[0], name, clean=False, raw_props=KEPT + b"\x21\0\2")
    await one.subscribe((name, 1))
    sender = await connect(fleet[1], f"{name}-s")
    for number in range(200):
        await sender.publish(name, b"%d" % number, 1, number + 1)
    stuck = await one.message(ack=False)
    for number in range(1, 200):
        got = await one.message()
        assert int(got.payload) == number
        assert got.packet_id != stuck.packet_id
    again = await connect(fleet[1], name, clean=False, raw_props=KEPT)
    got = await again.message()
    assert (got.packet_id, got.payload, got.dup) == (stuck.packet_id, b"0", True)


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_client_that_is_slow_gets_all_retained_messages_of_a_new_subscription(
    server: Server, fleet_prefix: str, name: str, qos: int
) -> None:
    """More than its socket and its inbox hold: what it has not read yet waits, and pushes nothing out."""
    number, size = (400, 60_000) if qos == 0 else (300, 10)
    options = {"settings": {"inbox_limit": 100}, "full_inbox_wait": 600}
    with GatewayProcess(server.url, f"{fleet_prefix}-{name}", **options) as gateway:
        sender = await connect(gateway, "sender")
        for each in range(1, number + 1):
            await sender.publish(f"home/{each}", b"%d" % each + bytes(size), 1, each, retain=True)
        slow = await connect(gateway, "slow", raw_props=b"\x21\0\x0a")
        assert await slow.subscribe(("home/#", qos)) == bytes([qos])
        for each in range(1, 101):  # the gateway sends it what it can
            await sender.publish("other", b"x", 1, each)
        got = [await slow.message() for _ in range(number)]
        assert {each.topic for each in got} == {f"home/{each}" for each in range(1, number + 1)}
        assert await slow.is_silent()
        assert await slow.subscribe(("other", 0), packet_id=2) == b"\0"
