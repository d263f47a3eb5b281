"""How connections begin: traps 18 to 28, against a running gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from rsmq.model.keys import Keys
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

Make = Callable[..., RawClient]
KEPT = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}


async def test_a_malformed_packet_ends_its_connection_and_no_other(client: Make, name: str) -> None:
    other = await client().connect(name)
    rng = random.Random(7)
    valid = [p.publish("a", b"x", 1, 3, 5), p.subscribe([("a", 1)], 2, 5), p.ack(6, 1), p.PING]
    for number in range(60):
        one = await client(5).connect(f"{name}-{number}")
        data = bytearray(rng.choice(valid))
        data[rng.randrange(len(data))] = rng.randrange(256)
        one.send(bytes(data) + b"\xff" * 20_000)
        last = await one.ended()
        assert last is not None
        assert last.kind == 14
        assert last.reason >= 0x80
    assert await other.is_silent()


@pytest.mark.parametrize(("level", "code"), [(4, 2), (3, 2)])
async def test_an_empty_client_id_without_clean_session_is_refused(client: Make, level: int, code: int) -> None:
    one = await client(level).connect("", clean=False)
    assert one.connack is not None
    assert one.connack.reason == code
    assert await one.ended() is None


async def test_an_empty_client_id_gets_an_assigned_one(client: Make) -> None:
    one = await client(5).connect("")
    assert one.connack is not None
    assert one.connack.reason == 0
    (assigned,) = one.connack.properties[18]
    two = await client(5).connect("")
    assert two.connack is not None
    assert two.connack.properties[18] != [assigned]
    three = await client(4).connect("")
    assert three.connack is not None
    assert three.connack.reason == 0
    four = await client(3).connect("", clean=True)
    assert four.connack is not None
    assert four.connack.reason == 2


@pytest.mark.parametrize("given", ["{", "a/b", "a b", "🦆", "}{x", "%41", "x" * 256, "ü" * 128])
async def test_unusual_client_ids_are_accepted(client: Make, name: str, given: str) -> None:
    for level in (3, 4, 5):
        one = await client(level).connect(given)
        assert one.connack is not None
        assert one.connack.reason == 0
        await one.subscribe((f"{name}/x", 1))
        assert await one.publish(f"{name}/x", b"to myself") == 0
        assert (await one.message()).payload == b"to myself"
        await one.disconnect()


async def test_a_client_id_that_is_too_long_is_refused(client: Make) -> None:
    for level, code in ((4, 2), (5, 0x85)):
        one = await client(level).connect("x" * 257)
        assert one.connack is not None
        assert one.connack.reason == code


async def test_session_present_is_right_in_each_combination(client: Make, name: str) -> None:
    async def present(*, clean: bool, level: int = 4, expiry: int = 60) -> bool:
        raw = b"\x11" + expiry.to_bytes(4, "big") if level == 5 else b""
        one = await client(level).connect(name, clean=clean, raw_props=raw)
        assert one.connack is not None
        await one.disconnect()
        return one.connack.session_present

    assert not await present(clean=True)
    assert not await present(clean=False)  # nothing was kept
    assert await present(clean=False)
    assert not await present(clean=True)
    assert not await present(clean=False, level=5)
    assert await present(clean=False, level=5)
    assert await present(clean=False, level=5, expiry=0)  # there was one, and it ends with this connection
    assert not await present(clean=False, level=5)


async def test_letters_of_a_client_that_never_connected_are_no_session(client: Make, name: str, broker: object) -> None:
    await broker.send(name, b"early", topic="cmd/early")  # type: ignore[attr-defined]
    one = await client().connect(name, clean=False)
    assert one.connack is not None
    assert not one.connack.session_present
    got = await one.message()
    assert (got.topic, got.payload, got.qos) == ("cmd/early", b"early", 1)


async def test_data_behind_a_connect_is_handled_after_its_answer(client: Make, name: str) -> None:
    one = await client(5).open()
    early = p.subscribe([(name, 1)], 9, 5) + p.publish(name, b"early", 1, 4, 5)
    one.send(p.connect(name, 5) + early)
    kinds = [(await one.take()).kind for _ in range(3)]
    assert kinds[0] == 2
    assert sorted(kinds[1:]) == [4, 9]
    refused = await client(5).open()
    refused.send(p.connect("x" * 300, 5) + early)
    assert (await refused.take(2)).reason == 0x85
    assert await refused.ended() is None


async def test_a_client_that_is_silent_for_one_and_a_half_keep_alives_is_closed(client: Make, name: str) -> None:
    one = await client(5).connect(name, keep_alive=1)
    last = await one.ended()
    assert last is not None
    assert last.reason == 0x8D
    never = await client(4).connect(f"{name}-0", keep_alive=0)
    assert await never.is_silent()


async def test_any_packet_counts_as_a_sign_of_life(client: Make, name: str) -> None:
    """One that publishes lives on, while one that is silent for as long is closed."""
    one = await client(5).connect(name, keep_alive=1)
    silent = asyncio.create_task((await client(5).connect(f"{name}-2", keep_alive=1)).ended())
    while not silent.done():
        assert await one.publish(name, b"alive") == 0
        await asyncio.wait([silent], timeout=0.05)
    last = silent.result()
    assert last is not None
    assert last.reason == 0x8D
    assert await one.is_silent()


async def test_the_keep_alive_of_the_server_replaces_a_longer_one(client: Make, name: str) -> None:
    one = await client(5).connect(name, keep_alive=65_000)
    assert one.connack is not None
    assert one.connack.properties[19] == [600]


@pytest.mark.parametrize("level", [4, 5])
async def test_a_newer_connection_of_a_client_takes_over(client: Make, name: str, level: int) -> None:
    first = await client(level).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c" if level == 5 else b"")
    await first.subscribe((f"{name}/#", 1))
    second = await client(level).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c" if level == 5 else b"")
    assert second.connack is not None
    assert second.connack.session_present
    last = await first.ended()
    assert (last is None) if level == 4 else (last is not None and last.reason == 0x8E)
    assert await second.publish(f"{name}/x", b"mine") == 0
    assert (await second.message()).payload == b"mine"


async def test_two_devices_with_one_client_id_are_named_once(client: Make, gateway: GatewayProcess, name: str) -> None:
    """They throw each other out without end: a line in ten seconds says so, not one for each time."""
    connected = [await client().connect(name)]
    for _ in range(5):
        connected.append(await client().connect(name))
        await connected[-2].ended()
    said = [line for line in gateway.log().splitlines() if f"'{name}'" in line and "connected elsewhere" in line]
    assert len(said) == 1
    assert "two devices have this client id" in said[0]


@pytest.mark.usefixtures("clients")
async def test_client_ids_are_shortened_in_the_log_by_a_setting(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phone number that throws itself out."""
    monkeypatch.setenv("RSMQ_LOG_NAMES", "short")
    phone = "+821012345678"
    with GatewayProcess(server.url, keys.prefix) as running:
        first = await RawClient(running.port).connect(phone)
        second = await RawClient(running.port).connect(phone)
        await first.ended()
        await until(lambda: "client '+8…" in running.log(), "it is logged")
        await second.disconnect()
        assert phone not in running.log()


async def test_enhanced_authentication_is_refused(client: Make, name: str) -> None:
    one = await client(5).connect(name, raw_props=b"\x15" + p.text("SCRAM-SHA-1"))
    assert one.connack is not None
    assert one.connack.reason == 0x8C
    two = await client(5).connect(name)
    two.send(p.packet(0xF0, b"\x18", b"\0"))
    last = await two.ended()
    assert last is not None
    assert last.reason == 0x82


async def test_a_connection_without_a_connect_is_closed(client: Make) -> None:
    one = await client().open()
    two = await client().open()
    two.send(p.connect("half")[:5])
    assert await one.ended() is None
    assert await two.ended() is None


async def test_a_half_open_connection_is_taken_over(client: Make, name: str) -> None:
    """The client has gone without a word: nothing is read from the first socket any more."""
    first = await client().connect(name, clean=False, keep_alive=0)
    await first.subscribe((f"{name}/#", 1))
    first._writer.transport.pause_reading()  # type: ignore[attr-defined]
    second = await client().connect(name, clean=False)
    assert second.connack is not None
    assert second.connack.session_present
    assert await second.publish(f"{name}/x", b"here") == 0
    assert (await second.message()).payload == b"here"


async def test_a_session_is_resumed_with_few_commands(
    client: Make, server: Server, fleet_prefix: str, name: str
) -> None:
    """Each step of a CONNECT is one script call, so they share their writes with those of other clients."""
    sender = await client().connect(f"{name}-s")
    for _ in range(2):  # the server has all scripts then
        first = await client(5).connect(name, **KEPT)
        await first.subscribe((name, 1))
        await first.disconnect()
    for number in range(50):
        await sender.publish(name, b"%d" % number)
    with server.client() as redis, redis.monitor() as monitor:
        inbox = Keys(fleet_prefix).inbox(name)
        await until(lambda: redis.zcard(inbox) == 50, "all letters are stored")
        redis.echo("begin")
        again = await client(5).connect(name, **KEPT)
        assert (await again.message(ack=False)).payload == b"0"
        redis.echo("end")
        found = list[str]()
        for each in monitor.listen():
            if each["command"] == "ECHO begin":
                found.clear()
            elif each["command"].startswith("ECHO"):
                break
            if each["client_type"] != "lua" and name in each["command"] and fleet_prefix in each["command"]:
                found.append(each["command"])
    calls = [each for each in found if not each.startswith(("SSUBSCRIBE", "SUNSUBSCRIBE"))]
    assert all(each.startswith("EVALSHA") for each in calls), calls
    # take the inbox, note the client, claim, begin, forget the old end, read a page, and one more after a ring
    assert len(calls) <= 7, calls
