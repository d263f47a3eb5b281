"""Subscribers that are slower than their publishers: who waits, what is dropped, and what is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from rsmq.gateway.connections.pressure import HOLD, LAG_MS, Pressure
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.router import MqttRouter
from rsmq.model.keys import Keys
from rsmq.persistence.mqtt_clients import MqttClient, MqttClients
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.script_batcher import ScriptBatcher
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

LIMIT = 30
"""Letters of an inbox."""
COUNT = 150
KEPT = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}


@pytest.fixture(scope="module")
def gateway(server: Server, fleet_prefix: str) -> Iterator[GatewayProcess]:
    """A gateway with small inboxes, which waits long for a client that takes nothing."""
    settings = {"inbox_limit": LIMIT}
    with GatewayProcess(server.url, fleet_prefix, settings=settings, full_inbox_wait=60) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(server: Server, fleet_prefix: str) -> Iterator[GatewayProcess]:
    """One that waits for half a second, with keys of its own."""
    settings = {"inbox_limit": LIMIT}
    with GatewayProcess(server.url, f"{fleet_prefix}i", settings=settings, full_inbox_wait=0.5) as running:
        yield running


@pytest.fixture
async def redis_client(connector: Connector, no_task_left: None) -> AsyncIterator[Client]:
    """A client of the server: in this folder `client` makes those of MQTT."""
    async with connector.connected() as connected:
        yield connected


async def publish_all(sender: RawClient, topic: str, count: int = COUNT) -> None:
    """So many messages of QoS 1 at once."""
    for number in range(1, count + 1):
        sender.send(p.publish(topic, b"%d" % number, 1, number))


async def acknowledged(sender: RawClient, count: int = COUNT) -> list[int]:
    """The packet ids of so many PUBACKs."""
    return [(await sender.take(4)).packet_id for _ in range(count)]


async def find(gateway: GatewayProcess, client: Client, prefix: str, name: str) -> MqttClient:
    found = await MqttClients(client, Keys(prefix)).find(name)
    assert found is not None
    return found


async def test_a_slow_subscriber_slows_its_publishers_and_loses_nothing(gateway: GatewayProcess, name: str) -> None:
    """The publisher waits for its PUBACKs, is not read any further, and its keep-alive does not run meanwhile."""
    reader, silent = await RawClient(gateway.port, 5).connect(name, **KEPT), RawClient(gateway.port)
    await reader.subscribe((name, 1))
    sender = await RawClient(gateway.port).connect(f"{name}-s", keep_alive=1)
    await publish_all(sender, name)
    await until(lambda: "publishers are slowed down" in gateway.log(), "a router that lags is noticed")
    await publish_all(sender, name, 25)  # the gateway reads twenty of them, and holds back their acknowledgements
    await silent.connect(f"{name}-silent", keep_alive=1)
    await silent.ended()  # the gateway has looked at keep-alives meanwhile
    assert f"publishers wait: the inbox of '{name}' is full" in gateway.log()
    assert f"client '{name}-s'" not in gateway.log()
    for count in (COUNT, 25):
        got = [int((await reader.message()).payload) for _ in range(count)]
        assert got == list(range(1, count + 1))
        assert await acknowledged(sender, count) == got


async def test_a_reader_that_acknowledges_at_once_gets_every_burst_whole(gateway: GatewayProcess, name: str) -> None:
    """Bursts of several publishers, larger than its inbox, which they find empty at each try."""
    reader = await RawClient(gateway.port).connect(name)
    senders = [await RawClient(gateway.port).connect(f"{name}-{number}") for number in range(5)]
    await reader.subscribe((f"{name}/+", 1))
    for _ in range(4):
        for number, each in enumerate(senders):
            await publish_all(each, f"{name}/{number}")
        got: dict[str, list[int]] = {}
        for _ in range(COUNT * len(senders)):
            letter = await reader.message()
            got.setdefault(letter.topic, []).append(int(letter.payload))
        assert got == {f"{name}/{number}": list(range(1, COUNT + 1)) for number in range(len(senders))}
        for each in senders:
            await acknowledged(each)
    assert f"letters are dropped: the inbox of '{name}'" not in gateway.log()


async def test_a_subscriber_that_takes_nothing_loses_its_oldest_letters_and_no_other_does(
    impatient: GatewayProcess, redis_client: Client, fleet_prefix: str, name: str
) -> None:
    stuck, other = [await RawClient(impatient.port, 5).connect(f"{name}-{n}", **KEPT) for n in range(2)]
    for each in (stuck, other):
        await each.subscribe((name, 1))
    sender = await RawClient(impatient.port, 5).connect(f"{name}-s")
    for first in range(1, COUNT, 15):
        for number in range(first, first + 15):
            sender.send(p.publish(name, b"%d" % number, 1, number, 5))
        assert [int((await other.message()).payload) for _ in range(15)] == list(range(first, first + 15))
        await acknowledged(sender, 15)
    found = await find(impatient, redis_client, f"{fleet_prefix}i", f"{name}-0")
    assert (found.waiting, found.dropped) == (LIMIT, COUNT - LIMIT)
    assert (await find(impatient, redis_client, f"{fleet_prefix}i", f"{name}-1")).dropped == 0
    assert f"letters are dropped: the inbox of '{name}-0' is full" in impatient.log()


async def test_a_full_inbox_of_an_absent_client_drops_its_oldest_letters_and_counts_them(
    gateway: GatewayProcess, redis_client: Client, fleet_prefix: str, name: str
) -> None:
    reader = await RawClient(gateway.port, 5).connect(name, **KEPT)
    await reader.subscribe((name, 1))
    await reader.disconnect()
    sender = await RawClient(gateway.port).connect(f"{name}-s")
    await publish_all(sender, name)
    await acknowledged(sender)
    clients = MqttClients(redis_client, Keys(fleet_prefix))

    async def is_counted() -> bool:
        return sum(each.counts.get("dropped", 0) for each in await clients.gateways()) == COUNT - LIMIT

    await until(is_counted, "the gateway has told what it has dropped")
    found = await find(gateway, redis_client, fleet_prefix, name)
    assert (found.waiting, found.dropped) == (LIMIT, COUNT - LIMIT)
    again = await RawClient(gateway.port, 5).connect(name, **KEPT)
    assert int((await again.message()).payload) == COUNT - LIMIT + 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_acknowledgements_wait_while_the_router_of_their_partition_lags(redis_client: Client, keys: Keys) -> None:
    told, confirmed, clock = list[list[str]](), list[str](), Clock()
    router = MqttRouter(Registry(redis_client, keys, ScriptBatcher(redis_client)), None, None, None, lambda: 0)  # type: ignore[arg-type]
    pressure = Pressure(router, lambda names: told.append(list(names)), clock)
    router.under_way = {"mqtt.1": 5_000, "mqtt.2": 5_500}
    pressure.turn(5_000 + LAG_MS)
    assert (pressure.is_on, told) == (False, [])
    pressure.turn(5_001 + LAG_MS)
    assert (pressure.is_on, told) == (True, [["mqtt.1"]])
    for number in (1, 2):
        pressure.after(f"mqtt.{number}", lambda number=number: confirmed.append(f"mqtt.{number}"))
    assert (confirmed, pressure.held) == (["mqtt.2"], 1)
    pressure.hold(["mqtt.3"])  # another gateway's router lags
    router.under_way = {"mqtt.2": 6_000}
    clock.now += HOLD
    pressure.turn(6_100)
    assert (confirmed, pressure.held, pressure.is_on) == (["mqtt.2", "mqtt.1"], 0, False)
