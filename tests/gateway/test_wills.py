"""Wills: traps 63 to 66, against one running gateway, and with gateways that are killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rsmq.gateway.fleet.suspects import BEAT, CONFIRMED, NOTICED, SILENT_MS, YOUNG, Renewal, Suspects
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

Make = Callable[..., RawClient]


def expiry(seconds: int) -> bytes:
    """The property Session Expiry Interval."""
    return b"\x11" + seconds.to_bytes(4, "big")


def delay(seconds: int) -> bytes:
    """The property Will Delay Interval."""
    return b"\x18" + seconds.to_bytes(4, "big")


async def test_a_will_is_published_unless_the_client_says_goodbye(client: Make, name: str) -> None:
    watcher = await client(5).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/#", 2))

    async def begin(how: str, **options: Any) -> RawClient:
        return await client(5).connect(f"{name}-{how}", will=(f"{name}/{how}", b"gone", 1, False), **options)

    (await begin("0x04")).send(p.packet(0xE0, b"\x04"))
    (await begin("0x00")).send(p.packet(0xE0, b"\x00"))
    (await begin("goodbye")).send(p.DISCONNECT)
    (await begin("error")).send(p.ack(9, 1))
    (await begin("closed")).close()
    (await begin("reset")).abort()
    await begin("takeover")
    await begin("takeover")
    await begin("silent", keep_alive=1)
    three = await client(3).connect(f"{name}-3", will=(f"{name}/3", b"gone", 0, False))
    three.close()
    got = {(await watcher.message()).topic.partition("/")[2] for _ in range(7)}
    assert got == {"0x04", "error", "closed", "reset", "takeover", "silent", "3"}
    assert await watcher.is_silent()


async def test_a_will_waits_for_its_delay_unless_the_session_ends_first(client: Make, name: str) -> None:
    watcher = await client(5).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/#", 1))

    async def leave(how: str, seconds: int, kept: int, *, clean: bool = True) -> None:
        one = await client(5).connect(
            f"{name}-{how}", clean=clean, will=(f"{name}/{how}", b"gone", 1, False), will_props=delay(seconds),
            raw_props=expiry(kept),
        )  # fmt: skip
        one.close()

    await leave("both 0", 0, 0)
    assert (await watcher.message()).topic == f"{name}/both 0"
    await leave("no session", 100, 0)
    assert (await watcher.message()).topic == f"{name}/no session"
    await leave("clean start", 100, 100)
    clean = await client(5).connect(f"{name}-clean start", clean=True)
    assert (await watcher.message()).topic == f"{name}/clean start"
    assert await clean.is_silent()

    await leave("back in time", 1, 100)
    back = await client(5).connect(f"{name}-back in time", clean=False, raw_props=expiry(100))
    assert back.connack is not None
    assert back.connack.session_present
    await leave("short session", 100, 1)
    await leave("short delay", 2, 100)
    got = [(await watcher.message()).topic for _ in range(2)]  # later than the will of the one that came back
    assert got == [f"{name}/short session", f"{name}/short delay"]
    assert await watcher.is_silent()


async def test_a_session_that_is_taken_over_drops_a_will_with_a_delay(client: Make, name: str) -> None:
    """The new connection begins before the delay has passed."""
    watcher = await client(5).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/#", 1))
    for seconds in (1, 0):
        will = {"will": (f"{name}/{seconds}", b"gone", 1, False), "will_props": delay(seconds)}
        first = await client(5).connect(name, clean=False, raw_props=expiry(60), **will)
        second = await client(5).connect(name, clean=False, raw_props=expiry(60))
        await first.ended()
        await second.disconnect()
    assert (await watcher.message()).topic == f"{name}/0"
    one = await client(5).connect(
        f"{name}-2", clean=False, raw_props=expiry(60), will=(f"{name}/later", b"x", 1, False), will_props=delay(2)
    )
    one.close()
    assert (await watcher.message()).topic == f"{name}/later"  # the dropped one would have come before
    assert await watcher.is_silent()


async def test_a_will_has_its_properties_and_needs_rights_when_it_fires(client: Make, name: str) -> None:
    watcher = await client(5).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/#", 2), ("denied/#", 2))
    properties = (
        b"\x01\1\x03" + p.text("text/x") + b"\x08" + p.text("answer/to") + b"\x09" + p.text(b"\0\1")
        + b"\x26" + p.text("a") + p.text("b") + b"\x26" + p.text("a") + p.text("c") + b"\x02\0\0\0\x64"
    )  # fmt: skip
    will = (f"{name}/x", "größe".encode(), 2, True)
    (await client(5).connect(name, will=will, will_props=properties)).close()
    got = await watcher.take(3)
    assert (got.qos, got.retain, got.payload) == (2, False, "größe".encode())
    assert got.properties[1] == [1]
    assert got.properties[3] == [b"text/x"]
    assert got.properties[8] == [b"answer/to"]
    assert got.properties[9] == [b"\0\1"]
    assert got.properties[38] == [(b"a", b"b"), (b"a", b"c")]
    assert 0 < got.properties[2][0] <= 100
    watcher.send(p.ack(5, got.packet_id))
    assert (await watcher.take(6)).packet_id == got.packet_id
    watcher.send(p.ack(7, got.packet_id))
    late = await client(5).connect(f"{name}-l")
    await late.subscribe((f"{name}/+", 1))
    retained = await late.message()
    assert (retained.retain, retained.payload) == (True, "größe".encode())
    (await client(5).connect(name, will=("denied/write", b"x", 1, False))).close()
    (await client(5).connect(name, will=(f"{name}/y", b"last", 0, False))).close()
    assert (await watcher.message()).payload == b"last"
    assert await watcher.is_silent()


async def test_wills_of_a_killed_gateway_are_published_once(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    """By a survivor; the sessions of its clients are there for them at once. One has come back and keeps its will."""
    watcher = await client(5).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/#", 1))
    with GatewayProcess(server.url, fleet_prefix, routes={"ingest/#": "ingest"}) as dying:
        wills = [
            client(5, dying.port).connect(
                f"{name}-{number}", clean=False, raw_props=expiry(60), will=(f"{name}/{number}", b"gone", 1, False),
                will_props=delay(number % 2),
            )
            for number in range(40)
        ]  # fmt: skip
        for each in await asyncio.gather(*wills):
            await each.subscribe((f"mine/{name}", 1))
        dying.kill()
        back = await client(5).connect(f"{name}-1", clean=False, raw_props=expiry(60))
        assert back.connack is not None
        assert back.connack.session_present
        assert await back.publish(f"mine/{name}", b"here") == 0
        assert (await back.message()).payload == b"here"
    got = [int((await watcher.message()).topic.rpartition("/")[2]) for _ in range(39)]
    assert sorted(got) == [number for number in range(40) if number != 1]
    assert await watcher.is_silent()


async def test_a_will_that_cannot_be_stored_is_tried_again(fleet_prefix: str, name: str) -> None:
    """The server is away when the connection ends."""
    with Server(aof=True, tcp=True) as server, GatewayProcess(server.url, fleet_prefix) as gateway:
        watcher = await RawClient(gateway.port, 5).connect(f"{name}-w", keep_alive=0)
        await watcher.subscribe((f"{name}/#", 1))
        one = await RawClient(gateway.port, 5).connect(name, will=(f"{name}/x", b"gone", 1, False))
        server.stop()
        one.close()
        server.start()
        assert (await watcher.message()).payload == b"gone"
        watcher.abort()


async def test_a_gateway_that_has_just_started_publishes_the_wills_of_one_that_was_killed(
    server: Server, fleet_prefix: str, clients: object, name: str
) -> None:
    """It need not wait for its lease, which is longer here than any test waits: it has seen the other one alive, or the
    server was there all the time."""
    prefix = f"{fleet_prefix}-{name}"
    with GatewayProcess(server.url, prefix, lease=600) as young:
        with GatewayProcess(server.url, prefix, lease=600) as dying:
            await RawClient(dying.port, 5).connect("a", will=("wills/a", b"gone", 1, True))
            dying.kill()
        watcher = await RawClient(young.port, 5).connect("w", keep_alive=0)
        await watcher.subscribe(("wills/a", 1))
        assert (await watcher.message()).payload == b"gone"
        await RawClient(young.port, 5).connect("b", will=("wills/b", b"gone, too", 1, True))
        young.kill()
    with GatewayProcess(server.url, prefix, lease=600) as younger:
        watcher = await RawClient(younger.port, 5).connect("w", keep_alive=0)
        await watcher.subscribe(("wills/b", 1))
        assert (await watcher.message()).payload == b"gone, too"


async def test_a_gateway_that_starts_after_a_restart_of_the_server_sends_no_wills(
    fleet_prefix: str, clients: object
) -> None:
    """The connections of all others were closed by the restart, and they may come back slowly."""
    with Server(aof=True, tcp=True) as server, GatewayProcess(server.url, fleet_prefix, lease=60) as slow:
        one = await RawClient(slow.port, 5).connect("one", keep_alive=0, will=("will", b"gone", 1, False))
        slow.signal(signal.SIGSTOP)
        server.stop()
        server.start()
        with GatewayProcess(server.url, fleet_prefix, lease=60) as other:
            watcher = await RawClient(other.port, 5).connect("w", keep_alive=0)
            await watcher.subscribe(("will", 1))
            with server.client() as redis:
                renewals = set[float]()
                while len(renewals) <= YOUNG / BEAT + 2 * CONFIRMED:
                    renewals.add(redis.zrange(f"{fleet_prefix}:{{%mqtt}}:gateways", -1, -1, withscores=True)[0][1])
            slow.signal(signal.SIGCONT)
            assert await one.is_silent()
            assert await watcher.is_silent()


@pytest.mark.parametrize("renewed", [0.0, 0.1, BEAT - 0.01])
def test_the_death_of_a_gateway_is_noticed_long_before_three_seconds(renewed: float) -> None:
    """By the settings alone. It dies so long after its last renewal, at any moment between two beats of the other."""
    for phase in range(25):
        suspects, beat = Suspects(6, -10.0), phase / 100
        while not suspects.beaten(Renewal({}, ["g1"] if beat > SILENT_MS / 1000 - renewed else []), beat):
            beat += BEAT
        assert beat <= NOTICED - renewed + 1e-9
    assert NOTICED < 3 / 2  # half of the time is for ending its connections
    assert SILENT_MS / 1000 > 2 * BEAT  # one renewal may be late


def test_no_gateway_is_dead_while_the_others_come_back_after_an_outage() -> None:
    suspects, silent = Suspects(6, 0.0), Renewal({"g1": 1000}, ["g1"])
    assert not suspects.beaten(silent, 5.9)
    assert suspects.beaten(silent, 6.1) == ["g1"]
    suspects.interrupted(7.0)
    assert [suspects.beaten(silent, at) for at in (7.1, 12.9, 13.1)] == [[], [], ["g1"]]
    assert [suspects.beaten(Renewal({}, found), 14.0) for found in ([], ["g1"], ["g1"])] == [[], [], ["g1"]]


def test_a_gateway_that_has_come_back_after_an_outage_may_be_declared_dead_at_once() -> None:
    suspects = Suspects(6, 0.0)
    for at, until, silent in ((0.3, 1000, []), (0.5, 1000, ["g1"]), (0.8, 1000, ["g1"]), (1.0, 1250, [])):
        assert not suspects.beaten(Renewal({"g1": until}, silent), at)
    assert [suspects.beaten(Renewal({"g1": 1250}, ["g1"]), at) for at in (1.6, 1.9)] == [[], ["g1"]]
    suspects.interrupted(2.0)
    assert not any(suspects.beaten(Renewal({"g1": 1250}, ["g1"]), at) for at in (2.1, 2.4, 2.7, 7.9))


def test_only_a_gateway_that_has_just_started_asks_whether_the_server_was_there_all_the_time() -> None:
    silent = Renewal({"g1": 1000}, ["g1"])
    suspects = Suspects(6, 0.0)
    assert [(suspects.beaten(silent, at), suspects.unseen(at)) for at in (0.3, 0.6, YOUNG)] == [
        ([], []), ([], []), ([], ["g1"])
    ]  # fmt: skip
    suspects.vouch("g1")
    assert suspects.beaten(silent, YOUNG + 0.1) == ["g1"]
    suspects.interrupted(2.0)
    assert [(suspects.beaten(silent, at), suspects.unseen(at)) for at in (2.3, 2.6, 3.3)] == [([], [])] * 3
