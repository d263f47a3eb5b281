"""A gateway whose broker has codecs: topics hold ciphertext, and MQTT clients get what was published."""

from __future__ import annotations

import anyio

from rsmq import Broker, Settings
from rsmq.codecs import Encrypt, Keyring
from rsmq.gateway import Gateway
from rsmq.gateway.options import GatewayOptions
from tests.gateway.raw_client import RawClient


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
