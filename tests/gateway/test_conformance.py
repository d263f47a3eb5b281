"""What the standard demands at its edges: each test names the statement of MQTT 5.0."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gateway import packets as p
from tests.gateway.raw_client import RawClient

Make = Callable[..., RawClient]
KEPT_MINUTE = b"\x11\0\0\0\x3c"


async def test_receive_maximum_starts_anew_with_each_connection(client: Make, name: str) -> None:
    """4.9: the quota is no part of the session. Messages of QoS 2 that wait for their PUBREL take no place of new ones,
    and a PUBREL gives none back that it has not taken."""
    one = await client(5).connect(name, clean=False, raw_props=KEPT_MINUTE)
    one.send(b"".join(p.publish(f"{name}/x", b"%d" % n, 2, n, 5) for n in range(1, 21)))
    assert sorted([(await one.take(5)).packet_id for _ in range(20)]) == list(range(1, 21))
    one.abort()
    for first, more in ((1, 11), (11, 21)):
        one = await client(5).connect(name, clean=False, raw_props=KEPT_MINUTE)
        assert one.connack is not None
        assert one.connack.session_present
        released = range(first, more)
        one.send(
            b"".join(p.ack(6, n) for n in released)
            + b"".join(p.publish(f"{name}/x", b"", 1, n, 5) for n in range(101, 121))
        )
        got = [await one.take() for _ in range(30)]
        assert sorted(each.packet_id for each in got if each.kind == 7) == list(released)
        assert [each.packet_id for each in got if each.kind == 4] == list(range(101, 121))
        if first == 1:
            one.abort()
    one.send(b"".join(p.publish(f"{name}/x", b"", 2, n, 5) for n in range(1, 22)))
    last = await one.ended()
    assert last is not None
    assert last.reason == 0x93


async def test_no_packet_is_larger_than_the_client_allows(client: Make, name: str) -> None:
    """[3.1.2-24]: not only messages. A client with too small a maximum is refused, or disconnected, with 0x95."""
    one = await client(5).connect(name, raw_props=b"\x27\0\0\0\x0a")
    assert one.connack is not None
    assert one.connack.reason == 0x95
    tiny = await client(5).open()
    tiny.send(p.connect(name, 5, raw_props=b"\x27\0\0\0\x04"))  # not even that CONNACK is allowed
    assert await tiny.ended() is None
    two = await client(5).connect(name, raw_props=b"\x27\0\0\0\x40")
    assert two.connack is not None
    assert two.connack.reason == 0
    assert await two.subscribe(*((f"{name}/{n}", 0) for n in range(40))) == bytes(40)
    two.send(p.unsubscribe([f"{name}/{n}" for n in range(40)] * 2, 2, 5))
    last = await two.ended()
    assert last is not None
    assert (last.kind, last.reason) == (14, 0x95)


async def test_where_public_suites_expect_something_else(client: Make, name: str) -> None:
    """The table of docs/mqtt-conformance.md, by packets; what is refused has a client of its own."""
    one = await client(5).connect(name)
    assert await one.subscribe((f"{name}/#", 1)) == b"\1"
    assert await one.publish(f"{name}/bell\x07", b"control character", 1) == 0
    assert (await one.message()).payload == b"control character"
    one.send(p.subscribe([("elsewhere", 1)], 9, 5) + p.PING)
    assert {(await one.take()).kind for _ in range(2)} == {9, 13}  # in any order

    for payload in (b"first", b"another with its id"):
        one.send(p.publish(f"{name}/x", payload, 2, 7, 5))
        assert (await one.answer(5)).reason == 0
    assert (await one.message()).payload == b"first"
    for reason in (0, 0x92):
        one.send(p.ack(6, 7))
        assert (await one.take(7)).reason == reason
    assert await one.is_silent()

    wrong = await client(5).connect(f"{name}-2")
    wrong.send(p.publish(f"{name}/x", b"x", 0, level=5, raw_props=b"\x11\0\0\0\1"))  # a session expiry
    last = await wrong.ended()
    assert last is not None
    assert last.reason == 0x81
    old = await client(4).open()
    old.send(p.connect(f"{name}-3", 4, flags=0x03))  # the reserved flag
    assert await old.ended() is None

    kept = [f"{name}/kept/{number}" for number in range(3)]
    for each in kept:
        assert await one.publish(each, b"x", 1, retain=True) == 0
    late = await client(5).connect(f"{name}-4")
    await late.subscribe((f"{name}/kept/+", 1))
    assert sorted([(await late.message()).topic for _ in kept]) == kept  # in any order


async def test_subscribing_again_without_an_identifier_removes_it(client: Make, name: str) -> None:
    """[3.8.4-3], 3.8.2.1.2: the new subscription replaces the old one whole."""
    one = await client(5).connect(name)
    await one.subscribe((name, 1), raw_props=b"\x0b\x07")
    await one.publish(name, b"x")
    assert (await one.message()).properties[11] == [7]
    await one.subscribe((name, 1))
    for qos in (0, 1):
        await one.publish(name, b"x", qos)
        assert 11 not in (await one.message()).properties


async def test_a_wrong_connect_of_version_5_gets_its_reason(client: Make, name: str) -> None:
    """4.13.1: the server may say what is wrong before it closes. Version 3 has no code for it."""
    for level, raw, code in (
        (5, p.connect(name, 5, raw_props=b"\x21\0\0"), 0x82), (5, p.connect(name, 5, raw_props=b"\x0b\1"), 0x81),
        (5, p.connect(name, 5, will=("a/#", b"x", 0, False)), 0x81), (5, p.connect(f"{name}\0", 5), 0x81),
        (4, p.connect(f"{name}\0", 4), None), (5, p.connect(name, 5, flags=0x03), 0x81),
        (5, p.connect(name, 5, will=("/".join("x" * 300), b"x", 0, False)), 0x90),
    ):  # fmt: skip
        one = await client(level).open()
        one.send(raw)
        last = await one.ended()
        assert (None if last is None else (last.kind, last.reason)) == (None if code is None else (2, code)), raw


async def test_what_follows_a_request_for_subscriptions_meets_it(client: Make, name: str) -> None:
    """3.8.4, 3.10.4: a client need not wait for SUBACK or UNSUBACK. All comes in one write."""
    one = await client(5).connect(name)
    for qos in (0, 1):
        one.send(p.subscribe([(name, 1)], 1, 5) + p.publish(name, b"%d" % qos, qos, 2, 5))
        got = [await one.take() for _ in range(2 + qos)]
        assert got[0].kind == 9
        assert [each.payload for each in got if each.kind == 3] == [b"%d" % qos]
        one.send(p.unsubscribe([name], 3, 5) + p.publish(name, b"late", qos, 4, 5))
        assert (await one.take(11)).reasons == b"\0"
        if qos:
            assert (await one.take(4)).reason == 0
        assert await one.is_silent()


@pytest.mark.parametrize("level", [4, 5])
async def test_a_message_that_came_before_a_subscription_does_not_meet_it(client: Make, name: str, level: int) -> None:
    """[3.3.1-5], [3.3.1-8]: a retained one comes once, by the subscription; any other not at all. Whether the client
    waits for its PUBACK, or sends both together."""
    one = await client(level).connect(name)
    for number in range(24):
        topic, qos, retain, waits = f"{name}/{number}", 1 + number % 2, number % 4 > 1, number % 8 > 3
        packets = [p.publish(topic, b"x", qos, 7, level, retain=retain), p.subscribe([(topic, 2)], 8, level)]
        if waits:
            one.send(packets[0])
            assert (await one.take(3 + qos)).packet_id == 7
            one.send(packets[1])
        else:
            one.send(b"".join(packets))
            assert (await one.take(3 + qos)).packet_id == 7
        assert (await one.take(9)).reasons == b"\2"
        one.send(p.publish(f"{name}/{number}", b"after", qos, 9, level))
        assert (await one.answer(3 + qos)).packet_id == 9
        got = [await one.message() for _ in range(1 + retain)]
        assert sorted((each.payload, each.retain) for each in got) == [(b"after", False)] + [(b"x", True)] * retain
        for each in got:
            if each.qos == 2:
                one.send(p.ack(5, each.packet_id))
                await one.answer(6)
                one.send(p.ack(7, each.packet_id))
        if qos == 2:
            one.send(p.ack(6, 7) + p.ack(6, 9))
            assert [(await one.answer(7)).packet_id for _ in range(2)] == [7, 9]
    assert await one.is_silent()


async def test_what_a_client_has_sent_before_it_leaves_is_acted_on(client: Make, name: str) -> None:
    """[3.1.4-5], [3.14.4-3]: it sends everything in one write, and waits for no answer. Its DISCONNECT counts, so its
    will is not published."""
    watch = await client(5).connect(f"{name}watch")
    await watch.subscribe((f"{name}/#", 1))
    sent = (
        p.connect(name, 4, clean=False, will=(f"{name}/will", b"", 1, False)) + p.subscribe([("elsewhere", 1)])
        + b"".join(p.publish(f"{name}/x", b"%d" % n, 1, n + 1) for n in range(30))
        + p.publish(f"{name}/x", b"last") + p.DISCONNECT
    )  # fmt: skip
    one = await client(4).open()
    one.send(sent)
    one.close()
    got = [await watch.message() for _ in range(31)]
    assert [each.payload for each in got if each.qos] == [b"%d" % n for n in range(30)]
    again = await client(4).connect(name, clean=False)  # a DISCONNECT that was not seen publishes the will now
    assert again.connack is not None
    assert again.connack.session_present
    await again.publish("elsewhere", b"back")
    assert (await again.message()).payload == b"back"
    assert await watch.is_silent()


async def test_a_client_that_closes_its_side_of_the_connection_gets_the_answers_that_are_due(
    client: Make, name: str
) -> None:
    """And then the end of the connection, which is not a goodbye: its will is published."""
    watch = await client(5).connect(f"{name}watch")
    await watch.subscribe((f"{name}/#", 1))
    one = await client(4).open()
    one.send(
        p.connect(name, 4, will=(f"{name}/will", b"", 1, False)) + p.subscribe([("elsewhere", 1)], 40)
        + b"".join(p.publish(f"{name}/x", b"", 1, n + 1) for n in range(30))
        + p.publish(f"{name}/x", b"", 2, 50) + p.ack(6, 50)
    )  # fmt: skip
    one._writer.write_eof()
    got = [await one.take() for _ in range(34)]
    assert [got[0].kind, got[1].kind] == [2, 9]
    assert [each.packet_id for each in got if each.kind == 4] == list(range(1, 31))
    assert [each.packet_id for each in got if each.kind in (5, 7)] == [50, 50]
    assert await one.ended() is None
    assert [(await watch.message()).topic for _ in range(32)] == [f"{name}/x"] * 31 + [f"{name}/will"]
