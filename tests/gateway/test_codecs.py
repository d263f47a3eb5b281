"""A gateway whose broker has codecs: topics hold ciphertext, and MQTT clients get what was published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import anyio
import paho.mqtt.client as paho

from rsmq import Broker, Settings
from rsmq.cli.gateway_metrics import Durations, read
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.gateway import Gateway
from rsmq.gateway.options import GatewayOptions
from rsmq.inspector.doctor.mqtt import check_held, mqtt_facts
from rsmq.inspector.letter_keys import letter_keys, will_keys
from rsmq.persistence.retained_messages import some_retained
from tests.gateway.paho_client import leave
from tests.gateway.raw_client import RawClient
from tests.patience import until

KEYS = {name: name.encode() * 16 for name in ("k1", "k2")}
SECRET = b"4111-1111"
"""In each payload: nothing in the server may have it."""


def made(url: str, prefix: str, *names: str, **settings: Any) -> Broker:
    """A broker with these keys, the first of which it writes with."""
    codecs = [Zstd(above="200B"), Encrypt(Keyring({name: KEYS[name] for name in names}))] if names else []
    return Broker(Settings(url=url, prefix=prefix, preflight="warn", **settings), codecs=codecs)


@asynccontextmanager
async def running(broker: Broker, plain: str = "") -> AsyncIterator[Gateway]:
    """A gateway of a broker, which is connected, too."""
    gateway = Gateway(broker, listen=["mqtt://127.0.0.1:0"], options=GatewayOptions(anonymous=True))
    if plain:
        gateway.route(f"{plain}/#", topic=plain, plain=True)
    async with broker, anyio.create_task_group() as tasks:
        await tasks.start(gateway.run)
        yield gateway
        gateway.stop()


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[bytearray]:
    """Every command that the server gets, those inside of scripts too, as its MONITOR shows it."""
    seen = bytearray()
    reader, writer = await asyncio.open_unix_connection(urlsplit(url).path)
    writer.write(b"MONITOR\r\n")
    assert await reader.readline() == b"+OK\r\n"

    async def collect() -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect)
        yield seen
        tasks.cancel_scope.cancel()
    writer.close()


async def gone(gateway: Gateway, client: str) -> None:
    """Wait until a client is not connected any more."""
    context = gateway.context
    assert context is not None
    await until(lambda: client not in context.clients.connections, f"{client} has gone")


async def test_a_message_through_a_topic_is_encrypted_there_and_arrives(
    server_url: str, fleet_prefix: str, clients: object
) -> None:
    """From an MQTT client and from a broker, to a client that subscribes."""
    codecs = [Encrypt(Keyring({"k1": b"1" * 32}), required=True)]
    broker = Broker(Settings(url=server_url, prefix=fleet_prefix, preflight="warn"), codecs=codecs)
    options = GatewayOptions(anonymous=True)
    gateway = Gateway(broker, listen=["mqtt://127.0.0.1:0"], options=options)
    async with broker, anyio.create_task_group() as tasks:
        await tasks.start(gateway.run)
        reads = await RawClient(gateway.ports[0]).connect("reads")
        await reads.subscribe(("orders/#", 1))
        writes = await RawClient(gateway.ports[0]).connect("writes")
        await writes.publish("orders/1", b'{"card":"4111"}')
        assert (await reads.message()).payload == b'{"card":"4111"}'
        entries = [
            fields
            for name in await broker.topics.names()
            for number in (await broker.topics.existing(name)).numbers
            for _, fields in await broker.client.execute_command("XRANGE", broker.keys.stream(name, number), "-", "+")
        ]
        assert entries
        for fields in entries:
            assert dict(zip(fields[::2], fields[1::2], strict=True))[b"enc"] == b"a256gcm=k1"
            assert b"4111" not in b"".join(fields)
        for each in (reads, writes):
            each.abort()
        gateway.stop()


async def test_letters_retained_messages_and_wills_are_encrypted_in_the_server_and_arrive(
    server_url: str, prefix: str, clients: object
) -> None:
    """Those of a client that is away, of one that subscribes later, of one that has died, and of QoS 0 between two
    gateways. A letter of another broker, too. On a plain route they lie there as they were published."""
    broker, payloads = made(server_url, prefix, "k1"), [SECRET + b" short", SECRET * 100]
    async with (
        watched(server_url) as seen,
        running(broker, plain="open") as gateway,
        running(made(server_url, prefix, "k2", "k1"), plain="open") as other,
    ):
        (port,), (second,) = gateway.ports, other.ports
        away = await RawClient(port).connect("away", clean=False)
        await away.subscribe(("cards/#", 2), ("open/#", 1))
        away.abort()
        await gone(gateway, "away")
        writes = await RawClient(port).connect("writes")
        for number, payload in enumerate(payloads, 1):
            await writes.publish("cards/1", payload, packet_id=number, retain=True)
        dies = await RawClient(port).connect("dies", will=("cards/dead", SECRET + b" will", 1, False))
        counted = await letter_keys(broker.client, broker.keys)
        assert (counted["retained"], await will_keys(broker.client, broker.keys)) == ({"k1": 1}, {"k1": 1})
        dies.abort()
        await until(lambda: gateway.router is not None and gateway.router.letters + routed(other) >= 3, "it is routed")
        async with made(server_url, prefix, "k1") as sender:
            await sender.send("away", {"card": SECRET.decode()}, topic="cards/2")
        assert (await letter_keys(broker.client, broker.keys))["letters"] == {"k1": 4}
        live = await RawClient(second).connect("live")
        await live.subscribe(("live", 0))
        await writes.publish("live", SECRET + b" live", qos=0)
        assert (await live.message()).payload == SECRET + b" live"
        assert SECRET not in seen
        await writes.publish("open/1", b"for all to see")
        back = await RawClient(second).connect("away", clean=False)
        found = [(await back.message()).payload for _ in range(5)]
        assert found == [*payloads, SECRET + b" will", b'{"card":"4111-1111"}', b"for all to see"]
        for qos in (0, 1):
            late = await RawClient(port).connect(f"late{qos}")
            await late.subscribe(("cards/#", qos))
            assert (await late.message()).payload == payloads[1]
        assert SECRET not in seen
        assert b"for all to see" in seen
        shown, _ = await some_retained(broker.client, broker.keys, "cards", 10, 100)
        assert [(each.sealed, SECRET in each.data) for each in shown] == [("encrypted (k1)", False)]
        shown, _ = await some_retained(broker.client, broker.keys, "cards", 10, 100, broker.encoding)
        assert [(each.sealed, each.data) for each in shown] == [("", payloads[1])]


def routed(gateway: Gateway) -> int:
    """The letters that a gateway has routed."""
    return 0 if gateway.router is None else gateway.router.letters


async def test_a_gateway_without_the_key_holds_a_letter_and_one_with_it_delivers_all_in_order(
    server_url: str, prefix: str, clients: object
) -> None:
    """What is behind it waits, too; the connection goes on; the doctor and a metric name the key. When it is gone,
    those behind it come."""
    both = made(server_url, prefix, "k2", "k1")
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id="meter", clean_session=False)
    got = list[bytes]()
    client.on_message = lambda _client, _about, message: got.append(message.payload)
    async with made(server_url, prefix, "k1", inbox_poll="PT0.2S") as broker:
        async with running(broker) as gateway:
            client.connect("127.0.0.1", gateway.ports[0])
            client.loop_start()
            await until(client.is_connected, "it is connected")
            async with both:
                await broker.send("meter", "one")
                await both.send("meter", "two")
                await broker.send("meter", "three")
                counts = gateway.context.counts if gateway.context is not None else None
                assert counts is not None
                await until(lambda: counts.held == {"key k2": 1}, "the gateway holds it")
                await until(lambda: got == [b"one"], "what is before it has come")
                samples = [(each.metric.name, each.labels) for each in read(gateway, Durations())]
                assert ("rsmq_mqtt_waiting_for_key_clients", ("key k2",)) in samples
                await gateway._tell_about(gateway.context, broker._connection)  # type: ignore[arg-type]
                facts = await mqtt_facts(broker.client, broker.keys)
                assert facts is not None
                (line,) = check_held(facts)
                assert "letters of 1 client of gateway" in line
                assert "need the key k2" in line
                assert client.publish("alive", b"x", qos=1).rc == 0
                await until(lambda: not client._out_messages, "what it publishes is confirmed")
                assert got == [b"one"]
            leave(client)
            await gone(gateway, "meter")
            assert counts.held == {}
        async with running(both) as gateway:
            client.connect("127.0.0.1", gateway.ports[0])
            client.loop_start()
            await until(lambda: len(got) == 3, "the gateway with the key delivers them")
            assert got == [b"one", b"two", b"three"]
            leave(client)
            await gone(gateway, "meter")
        async with running(broker) as gateway:
            async with both:
                await both.send("meter", "lost", expires=timedelta(milliseconds=300))
            await broker.send("meter", "after")
            client.connect("127.0.0.1", gateway.ports[0])
            client.loop_start()
            await until(lambda: got[3:] == [b"after"], "it goes on behind the expired one")
            assert gateway.context is not None
            assert gateway.context.counts.held == {}
            leave(client)
