"""Limits of what a client sends, and of how many come: each has a reason code, a counter and a line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest

from rsmq.errors import ConfigError
from rsmq.gateway.connections.limits import Arrivals, TokenBucket
from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.packet import RefusedPacket
from tests.gateway import packets as p
from tests.gateway.paho_client import leave
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.gateway.test_auth import hashed
from tests.gateway.test_interoperability import Client
from tests.servers import Server

Make = Callable[..., RawClient]
KEPT_MINUTE = b"\x11\0\0\0\x3c"


@pytest.fixture(scope="module")
def fleet_prefix() -> str:
    """Its own, because its sessions are counted."""
    return "gateway-rates"


@pytest.fixture(scope="module")
def gateway(server: Server, fleet_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with every limit low enough to be reached."""
    path = tmp_path_factory.mktemp("rates") / "passwords"
    path.write_text(f"ada:{hashed(b'secret')}\n")
    with GatewayProcess(
        server.url, fleet_prefix, anonymous=True, password_file=str(path), most_bytes=20_000, most_messages=30,
        most_packet_bytes=8_000, most_topic_bytes=20, most_levels=4, most_subscriptions=2, most_per_user=2,
        most_sessions=12,
    ) as running:  # fmt: skip
        yield running


async def last_of(one: RawClient) -> int | None:
    """The reason code of the DISCONNECT, or None if the connection has ended without one."""
    last = await one.ended()
    return None if last is None or last.kind != 14 else last.reason


@pytest.mark.parametrize("level", [4, 5])
async def test_a_client_that_sends_too_much_a_second_is_disconnected(client: Make, name: str, level: int) -> None:
    """Bytes, messages, and a packet above the limit, which version 5 announces. Pings count as bytes only."""
    codes = list[int | None]()
    for data in (
        p.publish(name, bytes(5_000), 0, level=level) * 8,
        p.publish(name, b"", 0, level=level) * 31,
        p.publish(name, bytes(8_000), 0, level=level),
    ):
        one = await client(level).connect(name)
        assert one.connack is not None
        assert one.connack.properties.get(39) == ([8_000] if level == 5 else None)
        one.send(p.PING * 100)
        for _ in range(100):
            await one.take(13)
        one.send(data)
        codes.append(await last_of(one))
    assert codes == ([0x96, 0x96, 0x95] if level == 5 else [None] * 3)


async def test_messages_that_are_held_back_count_when_they_are_read(client: Make, name: str) -> None:
    """Version 3 may send more than Receive Maximum: what waits is counted, too."""
    one = await client().connect(name)
    one.send(b"".join(p.publish(name, b"", 1, n) for n in range(1, 60)))
    assert await last_of(one) is None
    assert await client().connect(name)


async def test_a_client_that_goes_on_sending_gets_the_reason_all_the_same(client: Make, name: str) -> None:
    """What it has sent, and is not read any more, does not reset its connection before it has read the reason."""
    one = await client(5).connect(name)
    for _ in range(40):
        one.send(p.publish(name, bytes(7_000), 0, level=5) * 20)
    assert await last_of(one) == 0x96


async def test_refusals_are_logged_once_in_ten_seconds(client: Make, gateway: GatewayProcess, name: str) -> None:
    """A client can make no log line for each of its packets."""
    for _ in range(10):
        one = await client(5).connect(name)
        one.send(p.publish(name, b"", 0, level=5) * 31)
        assert await last_of(one) == 0x96
    assert 1 <= gateway.log().count("clients are refused, most_messages: client ") < 10


async def test_what_is_refused_is_logged_with_its_client(client: Make, gateway: GatewayProcess, name: str) -> None:
    """A subscription and a message are answered by a code, which few clients show: the log says which it was."""
    one = await client(5).connect(name)
    assert await one.subscribe(("a/b/c/d/e", 0)) == b"\x8f"
    assert await one.publish("a/b/c/d/e", b"x") == 0x90
    for said in ("subscriptions are refused, topic_filter_invalid", "messages are refused, topic_name_invalid"):
        assert f"{said}: client '" in gateway.log()


@pytest.mark.parametrize("level", [4, 5])
async def test_topic_names_and_filters_have_a_length_and_levels(client: Make, name: str, level: int) -> None:
    """Bytes count, not characters. Version 3 has no code for a topic name, so its connection ends."""
    one = await client(level).connect(name)
    filters = [("a/b/c/d", 0), ("a/b/c/d/e", 0), ("é" * 11, 0), ("é" * 10, 0), ("x", 0)]
    codes = await one.subscribe(*filters)
    assert codes == (b"\0\x8f\x8f\0\x97" if level == 5 else b"\0\x80\x80\0\x80")
    for topic in ("a/b/c/d/e", "é" * 11):
        if level == 5:
            assert await one.publish(topic, b"x") == 0x90
        else:
            one.send(p.publish(topic, b"x", 1))
            assert await one.ended() is None
            one = await client(level).connect(name)
    assert await one.publish("é" * 10, b"x") == 0


async def test_a_user_has_a_limit_of_connections_and_may_take_its_own_over(client: Make, name: str) -> None:
    """Others are not concerned. A connection that ends, or is taken over, makes room."""
    given = {"username": "ada", "password": b"secret", "keep_alive": 0}
    made = [await client(5).connect(f"{name}-{n}", **given) for n in (0, 1, 0, 2)]
    assert [each.connack.reason for each in made if each.connack] == [0, 0, 0, 0x97]
    assert (await made[0].ended()) is not None  # taken over
    other = await client(4).connect(f"{name}-3", **given)
    assert other.connack is not None
    assert other.connack.reason == 3
    anonymous = await client(5).connect(f"{name}-4")
    assert anonymous.connack is not None
    assert anonymous.connack.reason == 0
    await made[1].disconnect()
    again = await client(5).connect(f"{name}-5", **given)
    assert again.connack is not None
    assert again.connack.reason == 0


def test_a_real_client_sees_why_it_cannot_connect_or_stay(gateway: GatewayProcess, name: str) -> None:
    """paho gets the reason of the CONNACK and of the DISCONNECT."""
    made = [Client(gateway.port, f"{name}-{n}", paho.MQTTv5) for n in range(3)]
    seen = list[str]()
    made[0].inner.on_disconnect = lambda _c, _d, _flags, reason, _p: (seen.append(str(reason)), made[0].left.set())
    try:
        for each in made:
            each.inner.username_pw_set("ada", "secret")
        assert [str(each.connect()[1]) for each in made] == ["Success", "Success", "Quota exceeded"]
        for _ in range(40):
            made[0].inner.publish("x", b"")
        assert made[0].left.wait(30)
        assert seen == ["Message rate too high"]
    finally:
        for each in made:
            leave(each.inner)


async def test_the_fleet_has_a_limit_of_sessions_and_those_that_exist_go_on(
    client: Make, name: str, server: Server, fleet_prefix: str
) -> None:
    """A session that is kept counts, whether its client is connected or not, and one that ends makes room."""
    made, refused = list[RawClient](), 0
    while not refused:
        one = await client(5).connect(f"{name}-{len(made)}", clean=False, raw_props=KEPT_MINUTE)
        assert one.connack is not None
        refused = one.connack.reason
        made.append(one)
    assert refused == 0x97
    assert 1 < len(made) <= 13
    await made[0].disconnect()
    again = await client(5).connect(f"{name}-0", clean=False, raw_props=KEPT_MINUTE)
    assert again.connack is not None
    assert (again.connack.reason, again.connack.session_present) == (0, True)
    again.send(p.packet(0xE0, b"\0", p.props(5, b"\x11\0\0\0\0")))  # its session ends now
    await again.ended()
    while True:  # until the gateway has counted again
        one = await client(5).connect(f"{name}-new", clean=False, raw_props=KEPT_MINUTE)
        assert one.connack is not None
        if one.connack.reason == 0:
            break
    for each in (*made[1:], one):
        each.send(p.packet(0xE0, b"\0", p.props(5, b"\x11\0\0\0\0")))
        await each.ended()


async def test_a_session_that_goes_on_leaves_no_older_end_behind(
    client: Make, name: str, server: Server, fleet_prefix: str
) -> None:
    """A client that comes and goes all the time has one entry among the sessions that expire, not one each time."""
    for _ in range(5):
        one = await client(5).connect(name, clean=False, raw_props=KEPT_MINUTE)
        await one.disconnect()
    one = await client(5).connect(name)  # the end of the one before is stored
    with server.client() as redis:
        found = [
            member
            for key in redis.scan_iter(f"{fleet_prefix}:*:sessions")
            for member in redis.zrange(key, 0, -1)
            if member.endswith(f":{name}".encode())
        ]
    assert len(found) <= 1


async def test_connects_above_the_limit_wait_and_are_refused_if_they_would_wait_long(
    server: Server, fleet_prefix: str, name: str
) -> None:
    """Four a second: four at once, four more in the second that is half of the time for a CONNECT.

    On a busy machine the time for a CONNECT may be over before it is read: 0x89, or closed.
    """
    with GatewayProcess(server.url, f"{fleet_prefix}-c", most_connects=4, connect_timeout=2) as gateway:
        made = [RawClient(gateway.port, 4 + n % 2) for n in range(40)]
        await asyncio.gather(
            *(each.connect(f"{name}-{n}") for n, each in enumerate(made)), return_exceptions=True
        )  # fmt: skip
        codes = [each.connack.reason for each in made if each.connack is not None]
        assert {0, 3, 0x9F} <= set(codes) <= {0, 3, 0x9F, 0x89}
        assert codes.count(0) < 30
        for each in made:
            each.abort()
        assert "clients are refused, most_connects: " in gateway.log()


# -- the decisions -----------------------------------------------------------------------------------------------------


def test_a_rate_allows_bursts_of_a_second() -> None:
    rate = TokenBucket(10)
    assert [rate.allows(packets, now) for packets, now in ((10, 100.0), (1, 100.0), (1, 100.2), (8, 101.0))] == [
        True, False, True, True
    ]  # fmt: skip


def test_arrivals_are_spread_over_time() -> None:
    """Two a second: two at once, then one each half second, and none that would wait for more than a second."""
    arrivals = Arrivals(2, 1.0)
    assert [arrivals.wait(10.0) for _ in range(4)] == [0.0, 0.0, 0.5, 1.0]
    with pytest.raises(RefusedPacket):
        arrivals.wait(10.0)
    assert arrivals.wait(10.5) == 1.0
    assert arrivals.wait(20.0) == 0.0
    assert Arrivals(0, 1.0).wait(10.0) == 0.0


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("window", 0, "use a number from 1 to 32767"),
        ("window", "9", "use a number from"),
        ("most_levels", True, "use a number from"),
        ("most_bytes", -1, "use a number from 0"),
        ("receive_maximum", 65_536, "use a number from"),
        ("lease", timedelta(0), "use a longer time"),
        ("keep_alive", timedelta(seconds=-1), "use a timedelta that is not negative"),
        ("sys_interval", 10, "use a timedelta"),
        ("origins", "https://shop.example", "use several texts"),
        ("proxies", None, "use several texts"),
        ("certificate_user", "dn", "use 'cn' or 'san'"),
        ("anonymous", "no", "use True or False"),
    ],
)
def test_an_option_with_a_wrong_value_is_refused(name: str, value: Any, why: str) -> None:
    """The error names the option, and says what to write."""
    with pytest.raises(ConfigError, match=f"{name} is .*{why}"):
        GatewayOptions(**{name: value})


def test_the_page_has_every_limit() -> None:
    page = Path(__file__, "../../../docs/mqtt.md").resolve().read_text("utf-8")
    for each in fields(GatewayOptions):
        if type(each.default) is int:
            assert f"`{each.name}`" in page, each.name
