"""A gateway among records that another client has spoiled: its clients connect, subscribe, publish and receive."""

from __future__ import annotations

from typing import Final

import pytest

from rsmq import Broker
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.robustness.records import spoilings
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

KINDS: Final = ("mqtt", "retained", "gateways", "gateway_clients", "gateway_about", "session", "will", "received")
"""What gateways share."""


async def spoil(broker: Broker) -> None:
    """Spoil all of these in every way."""
    for kind in KINDS:
        for commands in spoilings(broker.keys, kind, "1-1"):
            for command in commands:
                await broker.client.execute_command(*command)


async def serves(gateway: GatewayProcess, name: str, *, is_clean: bool) -> None:
    """A client is served: it has subscribed, and gets a retained message and a new one."""
    reader = await RawClient(gateway.port, 4).connect("phone", clean=is_clean)
    await reader.subscribe((f"{name}/#", 1))
    writer = await RawClient(gateway.port, 4).connect(f"w{name}", will=(f"{name}/gone", b"gone", 1, False))
    await writer.publish(f"{name}/new", b"new", qos=1)
    await comes(reader, f"{name}/new")
    writer.abort()
    await comes(reader, f"{name}/gone")
    everything = await RawClient(gateway.port, 4).connect(f"a{name}")
    await everything.subscribe(("#", 0))
    await everything.publish(f"{name}/last", b"last", qos=1, retain=True)
    await comes(everything, f"{name}/last")


async def comes(reader: RawClient, topic: str) -> None:
    """A message by this topic name, perhaps behind others."""
    while (await reader.message()).topic != topic:
        pass


async def test_gateway_goes_on_beside_spoiled_records(server: Server, broker: Broker, fleet_prefix: str) -> None:
    """It starts among them, and they are spoiled again while it runs; a session of words begins anew."""
    await spoil(broker)
    with GatewayProcess(server.url, fleet_prefix) as gateway:
        await serves(gateway, "first", is_clean=False)
        await spoil(broker)
        await serves(gateway, "second", is_clean=False)
        await serves(gateway, "third", is_clean=True)
        assert "Traceback" not in gateway.log()


async def test_gateway_goes_on_after_an_empty_message_to_all_gateways(
    server: Server, broker: Broker, fleet_prefix: str
) -> None:
    """Of another client; and on a cluster, where it is asked for like this, it may come on the channel beside it."""
    channel = broker.keys.broadcast
    with GatewayProcess(server.url, fleet_prefix) as gateway:
        await until(lambda: broker.client.execute_command("SPUBLISH", channel, ""), "the gateway hears it")
        await serves(gateway, "first", is_clean=True)
        assert "Traceback" not in gateway.log()
