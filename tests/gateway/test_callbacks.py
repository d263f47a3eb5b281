"""Callbacks of an application that raise errors: each costs the client that it was asked about, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rsmq import Broker
from rsmq.errors import ConfigError
from rsmq.gateway import Gateway
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server, wait_until

pytestmark = pytest.mark.usefixtures("clients")

KEPT = b"\x11\0\0\0\x3c"
"""The property Session Expiry Interval: a minute."""
FAILS = [["write", "f/publish"], ["read", "f/filter"], ["read", "f/deliver/x"], ["write", "f/will"]]


@pytest.fixture(scope="module")
def faulty(server: Server, fleet_prefix: str) -> Iterator[GatewayProcess]:
    """Its callbacks raise errors for these rights. At its end nothing in its log may be a traceback."""
    with GatewayProcess(server.url, fleet_prefix, fails=FAILS) as running:
        yield running


async def connect(gateway: GatewayProcess, client: str, level: int = 5, **options: object) -> RawClient:
    return await RawClient(gateway.port, level).connect(client, **{"keep_alive": 0, **options})


@pytest.mark.parametrize(("level", "code"), [(4, 3), (5, 0x88)])
async def test_a_client_that_cannot_be_checked_is_told_to_come_again(
    faulty: GatewayProcess, name: str, level: int, code: int
) -> None:
    """At once: the database of the application may be back then."""
    one = await connect(faulty, name, level, username="broken", password=b"x")
    assert one.connack is not None
    assert one.connack.reason == code
    assert "@gateway.authenticate has failed" in faulty.log()
    assert "ConnectionError: the database is away" in faulty.log()


@pytest.mark.parametrize("request_", [p.publish("f/publish", b"x", 1, 1, 5), p.subscribe([("f/filter", 1)], 1, 5)])
async def test_what_cannot_be_allowed_or_refused_ends_the_connection_unacknowledged(
    faulty: GatewayProcess, name: str, request_: bytes
) -> None:
    one = await connect(faulty, name)
    one.send(request_)
    last = await one.ended()
    assert last is not None
    assert (last.kind, last.reason) == (14, 0x80)


async def test_a_message_that_one_client_may_not_read_for_an_error_reaches_the_others(
    faulty: GatewayProcess, name: str
) -> None:
    """Of both kinds: one that is passed on, and one that waits in an inbox. It waits there for the client."""
    bad = [await connect(faulty, f"{name}-{number}", clean=False, raw_props=KEPT) for number in range(3)]
    good = await connect(faulty, f"good-{name}")
    for each in (*bad, good):
        assert await each.subscribe(("f/deliver/#", 1)) == b"\1"
    sender = await connect(faulty, f"good-{name}-s")
    await sender.publish("f/deliver/x", b"0", 0)
    assert (await good.message()).payload == b"0"
    for each in bad:
        last = await each.ended()
        assert last is not None
        assert last.reason == 0x80
    await sender.publish("f/deliver/x", b"1", 1)
    assert (await good.message()).payload == b"1"
    again = await connect(faulty, f"{name}-0", clean=False, raw_props=KEPT)
    last = await again.ended()
    assert last is not None
    assert (last.kind, last.reason) == (14, 0x80)


async def test_a_will_whose_rights_cannot_be_found_out_ends_no_gateway(faulty: GatewayProcess, name: str) -> None:
    """It would be met again by each gateway that starts. It is not published, and its client may come again."""
    one = await connect(faulty, name, will=("f/will", b"x", 1, False))
    one.abort()
    said = "wills are not published: that of client"
    await asyncio.to_thread(wait_until, lambda: said in faulty.log(), "the will was due")
    assert faulty.is_running
    again = await connect(faulty, name)
    assert again.connack is not None
    assert again.connack.reason == 0
    assert await again.publish("f/other", b"x", 1) == 0


async def test_a_callback_about_rights_that_is_async_is_refused() -> None:
    """It returns a coroutine, which is true also where its answer would be no."""
    gateway = Gateway(Broker("redis://localhost:1"))

    async def may(_client: str, _user: str | None, _access: str, _topic: str) -> bool:
        return False

    with pytest.raises(ConfigError, match="may is async, and would allow everything: write def, not async def"):
        gateway.authorize(may)  # type: ignore[arg-type]
