"""The server's clock is set back while a gateway runs."""

from __future__ import annotations

from rsmq import Broker
from rsmq.gateway.fleet.retained import Retained
from rsmq.model.settings import Settings
from rsmq.persistence.letter import read_mqtt
from tests.chaos.system_faults import FaultyServer
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until

HOUR = 3600


async def test_retained_message_after_the_servers_clock_was_set_back_replaces_the_one_before() -> None:
    """One of QoS 0 has no other stamp than the clock. And an operator can remove what is kept."""
    with FaultyServer() as server, GatewayProcess(server.url, "g") as gateway:
        async with Broker(Settings(url=server.url, prefix="g", preflight="warn")) as broker:
            retained = Retained(broker.client, broker.keys, None, 0)

            async def kept() -> bytes:
                envelope = await retained.find_one("name")
                return read_mqtt(envelope).data if envelope else b""

            async def beat_ms() -> int:
                rows = await broker.client.execute_command("ZRANGE", broker.keys.gateways, 0, 0, "WITHSCORES")
                return int(rows[1])

            async def has(payload: bytes) -> bool:
                return await kept() == payload

            client = await RawClient(gateway.port).connect("client")
            await client.publish("name", b"before", 0, retain=True)
            await until(lambda: has(b"before"), "the first one is kept")
            first = await beat_ms()

            async def knows_the_clock() -> bool:
                return await beat_ms() < first - HOUR * 900

            server.faults.step_clock(-HOUR)
            await until(knows_the_clock, "the gateway knows the clock")
            await client.publish("name", b"after", 0, retain=True)
            await until(lambda: has(b"after"), "the second one is kept")
            assert await retained.purge("name") == 1
            assert not await kept()
            client.abort()
