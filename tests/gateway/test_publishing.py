"""What clients publish, and what becomes of it: traps 32 to 38 and 55, QoS 2 in both directions, handlers."""

from __future__ import annotations

from collections.abc import Callable

from rsmq import Broker, Message
from rsmq.model.settings import Settings
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient

Make = Callable[..., RawClient]


async def entries(broker: Broker, topic: str = "mqtt") -> list[bytes]:
    """The payloads in a topic, of all partitions."""
    found = list[bytes]()
    for partition in range(8):
        rows = await broker.client.execute_command("XRANGE", broker.keys.stream(topic, partition), "-", "+")
        found += [dict(zip(fields[::2], fields[1::2], strict=True))[b"data"] for _, fields in rows]
    return found


async def test_a_handler_takes_what_a_client_publishes_and_answers(
    client: Make, name: str, gateway: GatewayProcess, server_url: str, fleet_prefix: str
) -> None:
    """Ingest by a route, also of QoS 0, and `broker.send` back to the client, which has subscribed to nothing."""
    worker = Broker(Settings(url=server_url, prefix=fleet_prefix))

    @worker.handler("ingest", group="answers")
    async def answer(data: bytes, message: Message) -> None:
        told = f"{data.decode()} {message.headers['mqtt-topic']} {message.headers['mqtt-qos']} {message.key}"
        await worker.send(message.headers["mqtt-client"], told, topic="cmd/answer")

    one = await client().connect(name)
    async with worker.running():
        for qos in (0, 1, 2):
            await one.publish(f"ingest/{name}", b"%d" % qos, qos, qos + 1) if qos < 2 else one.send(
                p.publish(f"ingest/{name}", b"2", 2, 3)
            )
            got = await one.take()
            while got.kind != 3:  # PUBREC may come first
                one.send(p.ack(6, 3)) if got.kind == 5 else None
                got = await one.take()
            one.send(p.ack(4, got.packet_id))
            assert got.topic == "cmd/answer"
            assert got.payload == f"{qos} ingest/{name} {qos} {name}".encode()


async def test_qos_2_is_stored_once_although_it_is_published_again(client: Make, name: str, broker: Broker) -> None:
    raw = b"\x11\0\0\0\x3c"
    one = await client(5).connect(name, clean=False, raw_props=raw)
    payload = f"once {name}".encode()
    one.send(p.publish(name, payload, 2, 7, 5))
    assert (await one.take(5)).packet_id == 7
    one.send(p.publish(name, payload, 2, 7, 5, dup=True))
    assert (await one.take(5)).packet_id == 7
    one.abort()
    two = await client(5).connect(name, clean=False, raw_props=raw)
    two.send(p.publish(name, payload, 2, 7, 5, dup=True))
    assert (await two.take(5)).reason == 0
    assert (await entries(broker)).count(payload) == 1
    two.send(p.ack(6, 7))
    assert (await two.take(7)).reason == 0


async def test_a_packet_id_may_be_used_again_after_its_handshake(client: Make, name: str, broker: Broker) -> None:
    one = await client(5).connect(name)
    for number in range(3):
        assert await one.publish(name, f"{name}-{number}".encode(), 2, 5) == 0
    assert await one.publish("denied/write", b"x", 2, 5) == 0x87
    assert await one.publish(name, f"{name}-3".encode(), 2, 5) == 0
    found = [each for each in await entries(broker) if each.startswith(name.encode() + b"-")]
    assert found == [f"{name}-{number}".encode() for number in range(4)]


async def test_a_release_of_an_unknown_message_is_answered(client: Make, name: str) -> None:
    five = await client(5).connect(name)
    five.send(p.ack(6, 99))
    assert (await five.take(7)).reason == 0x92
    four = await client(4).connect(f"{name}-4")
    four.send(p.ack(6, 99))
    assert (await four.take(7)).packet_id == 99


async def test_a_publish_without_rights_is_answered_by_version(client: Make, name: str, broker: Broker) -> None:
    five = await client(5).connect(name)
    assert await five.publish("denied/write", b"secret", 1, 2) == 0x87
    four = await client(4).connect(f"{name}-4")
    assert await four.publish("denied/write", b"secret", 1, 2) == 0
    for topic in ("$SYS/x", "/".join("x" * 300)):
        assert await five.publish(topic, b"secret", 1, 3) >= 0x80
    assert b"secret" not in await entries(broker)


async def test_dup_of_the_publisher_is_not_passed_on(client: Make, name: str) -> None:
    one = await client().connect(name)
    await one.subscribe((name, 1))
    one.send(p.publish(name, b"again", 1, 4, dup=True))
    got = [await one.take(), await one.take()]
    (message,) = [each for each in got if each.kind == 3]
    assert not message.dup


async def test_properties_reach_receivers_unchanged_and_in_order(client: Make, name: str) -> None:
    raw = (
        b"\x26" + p.text("b") + p.text("1") + b"\x01\1" + b"\x03" + p.text("text/x") + b"\x08" + p.text("re/ply")
        + b"\x26" + p.text("a") + p.text("2") + b"\x09" + p.text(b"\0\xff") + b"\x26" + p.text("b") + p.text("3")
    )  # fmt: skip
    five, four = await client(5).connect(name), await client(4).connect(f"{name}-4")
    for qos in (0, 1):
        topic = f"{name}/{qos}"
        await five.subscribe((topic, 1))
        await four.subscribe((topic, 1))
        five.send(p.publish(topic, b"x", qos, 5, 5, raw_props=raw))
        got = await five.take()
        got = got if got.kind == 3 else await five.take()
        assert got.properties == {
            0x26: [(b"b", b"1"), (b"a", b"2"), (b"b", b"3")], 1: [1], 3: [b"text/x"], 8: [b"re/ply"], 9: [b"\0\xff"],
        }  # fmt: skip
        assert (await four.message()).payload == b"x"
        if qos:
            five.send(p.ack(4, got.packet_id))


async def test_an_empty_payload_is_a_message(client: Make, name: str) -> None:
    one, two = await client(4).connect(name), await client(4).connect(f"{name}-2")
    await two.subscribe((name, 1))
    assert await one.publish(name, b"") == 0
    assert (await two.message()).payload == b""


async def test_a_payload_above_the_limit_ends_the_connection_or_is_refused(client: Make, name: str) -> None:
    five = await client(5).connect(name)
    assert five.connack is not None
    (largest,) = five.connack.properties[39]
    assert await five.publish(name, bytes(200_000)) == 0
    assert await five.publish(name, bytes(largest - 100), 1, 2) == 0x97
    five.send(p.publish(name, bytes(largest + 1), 1, 3, 5)[:1000])
    last = await five.ended()
    assert last is not None
    assert last.reason == 0x95


async def test_a_payload_above_the_limit_is_refused_and_those_that_came_with_it_are_not(
    client: Make, name: str
) -> None:
    five = await client(5).connect(name)
    assert five.connack is not None
    (largest,) = five.connack.properties[39]
    sizes = {1: largest - 100, 2: 10, 3: 10}
    five.send(b"".join(p.publish(name, bytes(size), 1, packet_id, 5) for packet_id, size in sizes.items()))
    acks = [await five.take(4) for _ in sizes]
    assert [(each.packet_id, each.reason) for each in acks] == [(1, 0x97), (2, 0), (3, 0)]


async def test_messages_of_a_client_reach_each_subscriber_in_order(client: Make, name: str) -> None:
    """500 messages with 20 in flight, to a persistent session and to a clean one."""
    kept = await client(5).connect(f"{name}-kept", clean=False, raw_props=b"\x11\0\0\0\x3c")
    clean = await client(4).connect(f"{name}-clean")
    sender = await client(4).connect(name)
    for each in (kept, clean):
        await each.subscribe((f"{name}/#", 1))
    for start in range(0, 500, 20):
        sender.send(b"".join(p.publish(f"{name}/{n % 3}", b"%d" % n, 1, n + 1) for n in range(start, start + 20)))
        acks = [await sender.take(4) for _ in range(20)]
        assert [each.packet_id for each in acks] == list(range(start + 1, start + 21))
    for each in (kept, clean):
        assert [(await each.message()).payload for _ in range(500)] == [b"%d" % n for n in range(500)]
