"""What is bounded, and what happens at the bounds: traps 28, 39, 49, 72 to 75."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from rsmq import Broker
from tests.gateway import packets as p
from tests.gateway.process import ROOT, GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

Make = Callable[..., RawClient]
KEPT = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}


async def test_topic_aliases_of_the_server_stay_below_the_clients_maximum(client: Make, name: str) -> None:
    """At each QoS; a message that is skipped sets none; a new connection begins without any."""
    sender = await client(5).connect(f"{name}-s")
    maximum = b"\x22\0\2\x27\0\0\1\0"
    one = await client(5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c" + maximum)
    await one.subscribe((f"{name}/#", 2))
    await sender.publish(f"{name}/0", bytes(300))  # larger than the client allows
    seen = list[tuple[str, int]]()
    for topic, qos in (("1", 0), ("1", 1), ("2", 2), ("3", 1), ("2", 0), ("1", 1)):
        await sender.publish(f"{name}/{topic}", b"x", qos)
        got = await one.message()
        seen.append((got.topic, got.properties.get(35, [0])[0]))
        if got.qos == 2:
            one.send(p.ack(5, got.packet_id))
            one.send(p.ack(7, (await one.take(6)).packet_id))
    assert seen == [(f"{name}/1", 1), ("", 1), (f"{name}/2", 2), (f"{name}/3", 0), ("", 2), ("", 1)]
    await one.disconnect()
    again = await client(5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c\x22\0\1")
    await sender.publish(f"{name}/2", b"x")
    got = await again.message()
    assert (got.topic, got.properties[35]) == (f"{name}/2", [1])
    none = await client(5).connect(f"{name}-none")
    await none.subscribe((f"{name}/#", 0))
    for _ in range(2):
        await sender.publish(f"{name}/2", b"x")
        assert 35 not in (await none.message()).properties


async def test_without_problem_information_no_answer_has_a_reason_or_user_property(client: Make, name: str) -> None:
    one = await client(5).connect(name, raw_props=b"\x17\0")
    assert one.connack is not None
    found = [one.connack]
    one.send(p.subscribe([(name, 1), ("denied/read", 1)], 1, 5) + p.unsubscribe([name, "none"], 2, 5))
    found += [await one.take(9), await one.take(11)]
    one.send(p.publish("denied/write", b"x", 1, 3, 5))
    found.append(await one.take(4))
    one.send(p.packet(0x00))
    last = await one.ended()
    assert last is not None
    assert not any(key in each.properties for each in (*found, last) for key in (31, 38))


async def test_a_packet_id_that_is_out_is_not_given_again_after_65535_messages(
    client: Make, name: str, broker: Broker
) -> None:
    """The counter of the inbox is set close to its next round, instead of sending so many."""
    one = await client().connect(name, clean=False)
    await broker.send(name, b"held", topic="t")
    held = await one.take(3)
    assert held.packet_id == 1
    await broker.client.execute_command("HSET", broker.keys.session(name), "seq", 65_533)
    await broker.send_many([(name, b"%d" % number) for number in range(6)], topic="t")
    got = [await one.take(3) for _ in range(6)]
    assert [each.payload for each in got] == [b"%d" % number for number in range(6)]
    assert [each.packet_id for each in got] == [65_534, 65_535, 2, 3, 4, 5]
    one.send(b"".join(p.ack(4, each.packet_id) for each in (*got, held)))
    await one.disconnect()
    again = await client().connect(name, clean=False)
    assert await again.is_silent()


async def test_many_clients_may_connect_at_once(client: Make, name: str) -> None:
    """As after the death of another gateway: every one of them is connected in the end.

    On a busy machine some take longer than the two seconds that this gateway gives them, and try again.
    """

    async def arrive(number: int) -> RawClient:
        while True:
            one = client(4 + number % 2)
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                await one.connect(f"{name}-{number}")
                assert one.connack is not None
                if one.connack.reason == 0:
                    return one

    connected = await asyncio.gather(*map(arrive, range(400)))
    await asyncio.gather(*(each.disconnect() for each in connected))


async def test_a_client_that_does_not_read_harms_no_other_and_finds_its_messages_later(client: Make, name: str) -> None:
    """More than the buffers of its socket hold: the rest waits in its inbox, in order."""
    slow, fast = await client().connect(name, clean=False), await client().connect(f"{name}-f")
    for each in (slow, fast):
        await each.subscribe((name, 1))
    slow._writer.transport.pause_reading()  # type: ignore[attr-defined]
    sender = await client().connect(f"{name}-s")
    for number in range(200):
        await sender.publish(name, b"%d " % number + bytes(50_000))
        assert (await fast.message()).payload.split(b" ")[0] == b"%d" % number
    slow._writer.transport.resume_reading()  # type: ignore[attr-defined]
    for number in range(200):
        assert (await slow.message()).payload.split(b" ")[0] == b"%d" % number


async def test_a_full_server_holds_back_acknowledgements_until_it_has_room(fleet_prefix: str, name: str) -> None:
    with Server(tcp=True) as server, GatewayProcess(server.url, fleet_prefix) as gateway:
        one = await RawClient(gateway.port, 5).connect(name, keep_alive=0)
        assert await one.publish("x", b"before") == 0
        with server.client() as admin:
            admin.config_set("maxmemory", 1)
            one.send(p.publish("x", b"full", 1, 2, 5))
            assert await one.is_silent()
            admin.config_set("maxmemory", 0)
        got = await one.take(4)
        assert (got.packet_id, got.reason) == (2, 0)
        assert await one.publish("x", b"after") == 0
        one.abort()


def test_the_gateway_reads_no_clock_that_can_jump() -> None:
    """Deadlines count on the monotonic clock; due times are the server's."""
    for path in sorted(Path(ROOT, "rsmq", "gateway").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = (node.value.id, node.attr)
                assert used not in {("time", "time"), ("datetime", "now"), ("datetime", "utcnow")}, path
