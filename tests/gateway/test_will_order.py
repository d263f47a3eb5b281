"""All that happens under one client id is one sequence: the will of the old connection comes before what the new one
publishes, for those who watch and for those who subscribe later, whichever gateways and QoS."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rsmq import Broker
from rsmq.gateway.fleet.scripts import BEGIN_MQTT_SESSION, TAKE_WILL
from rsmq.gateway.fleet.wills import token_of
from rsmq.model.mqtt_subscription import SHARDS
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

MANY = 40
KEPT = b"\x11\0\0\0\x3c"
"""The property Session Expiry Interval: a minute."""


@pytest.fixture(scope="module")
def fleet(server: Server, fleet_prefix: str) -> Iterator[list[GatewayProcess]]:
    """Two gateways."""
    with ExitStack() as stack:
        yield [stack.enter_context(GatewayProcess(server.url, fleet_prefix)) for _ in range(2)]


def delay(seconds: int) -> bytes:
    """The property Will Delay Interval."""
    return b"\x18" + seconds.to_bytes(4, "big")


class Devices:
    """Devices that say `online` when they have connected, and whose will says `offline`."""

    def __init__(self, name: str, will_qos: int, birth_qos: int, count: int = MANY, **options: Any) -> None:
        self._name, self._will_qos, self._birth_qos, self._options = name, will_qos, birth_qos, options
        self.names = [f"{name}-{number}" for number in range(count)]

    def topic(self, device: str) -> str:
        return f"{self._name}/{device}/LWT"

    async def connect(self, device: str, port: int, *, has_will: bool = True, clean: bool = False) -> RawClient:
        will = {"will": (self.topic(device), b"offline", self._will_qos, True), **self._options} if has_will else {}
        one = await RawClient(port, 5).connect(device, clean=clean, raw_props=KEPT, keep_alive=0, **will)
        assert one.connack is not None
        assert one.connack.reason == 0, one.connack
        await one.publish(self.topic(device), b"online", self._birth_qos, retain=True)
        return one

    async def connect_all(self, *ports: int, **options: Any) -> list[RawClient]:
        """All at once, on these ports by turns."""
        found = (self.connect(each, ports[n % len(ports)], **options) for n, each in enumerate(self.names))
        return list(await asyncio.gather(*found))

    async def watch(self, port: int, qos: int) -> RawClient:
        watcher = await RawClient(port, 5).connect(f"{self._name}-watcher-{port}-{qos}", keep_alive=0)
        await watcher.subscribe((f"{self._name}/+/LWT", qos))
        return watcher

    async def seen(self, watcher: RawClient) -> dict[str, list[bytes]]:
        """What a watcher has got of each, before their last words."""
        found, ends = defaultdict[str, list[bytes]](list), 0
        while ends < len(self.names):
            got = await watcher.message()
            ends += got.payload == b"end"
            if got.payload != b"end":
                found[got.topic].append(got.payload)
        return found

    async def say_the_end(self, devices: list[RawClient]) -> None:
        for device, one in zip(self.names, devices, strict=True):
            await one.publish(self.topic(device), b"end", max(self._birth_qos, 1))

    async def retained(self, port: int) -> dict[str, bytes]:
        """What a new subscriber gets."""
        late = await RawClient(port, 5).connect(f"{self._name}-late", keep_alive=0)
        await late.subscribe((f"{self._name}/+/LWT", 1))
        found = [await late.message() for _ in self.names]
        return {each.topic: each.payload for each in found}


async def all_is_published(broker: Broker) -> None:
    """Wait until no will is under way."""
    call, keys = broker.client.execute_command, broker.keys

    async def is_so() -> bool:
        return not any([await call("ZCARD", keys.mqtt(shard, "wills")) for shard in range(SHARDS)])

    await until(is_so, "no will is under way")


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("has_will", [True, False])
@pytest.mark.parametrize(("will_qos", "birth_qos"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (1, 2)])
async def test_wills_of_half_open_connections_come_before_the_births_of_new_ones(
    fleet: list[GatewayProcess], name: str, will_qos: int, birth_qos: int, has_will: bool, clean: bool
) -> None:
    """The devices come back at both gateways, which hold their old connections."""
    devices = Devices(name, will_qos, birth_qos)
    watchers = [await devices.watch(each.port, qos) for each in fleet for qos in (0, 1)]
    old = await devices.connect_all(fleet[0].port)
    for each in watchers:
        assert {(await each.message()).payload for _ in devices.names} == {b"online"}
    new = await devices.connect_all(fleet[0].port, fleet[1].port, has_will=has_will, clean=clean)
    for each in old:
        await each.ended()
    await devices.say_the_end(new)
    for each in watchers:
        seen = await devices.seen(each)
        assert {tuple(found) for found in seen.values()} == {(b"offline", b"online")}
    assert set((await devices.retained(fleet[1].port)).values()) == {b"online"}


async def test_two_hundred_devices_come_back_after_a_power_cut_and_are_online(
    fleet: list[GatewayProcess], name: str
) -> None:
    """At once, at both gateways."""
    devices = Devices(name, 1, 1, count=200)
    watcher = await devices.watch(fleet[1].port, 1)
    await devices.connect_all(fleet[0].port)
    await devices.say_the_end(await devices.connect_all(fleet[0].port, fleet[1].port))
    assert {tuple(found) for found in (await devices.seen(watcher)).values()} == {(b"online", b"offline", b"online")}
    assert set((await devices.retained(fleet[0].port)).values()) == {b"online"}


def check(seen: dict[str, list[bytes]]) -> None:
    """One will at most, and never last."""
    for topic, found in seen.items():
        assert found in ([b"online", b"online"], [b"online", b"offline", b"online"]), (topic, found)


@pytest.mark.parametrize("will_qos", [0, 1])
async def test_wills_whose_delay_ends_when_their_clients_come_back_do_not_come_behind_them(
    fleet: list[GatewayProcess], broker: Broker, name: str, will_qos: int
) -> None:
    """They are published, or dropped, but not afterwards: some gateway may be about to publish them."""
    devices = Devices(name, will_qos, 1, will_props=delay(1))
    watcher = await devices.watch(fleet[0].port, 1)
    for each in await devices.connect_all(fleet[0].port):
        each.abort()
    chance = random.Random(7)

    async def come_back(device: str) -> RawClient:
        await asyncio.sleep(chance.uniform(0.5, 2.2))  # a delay of one second, and gateways look once a second
        return await devices.connect(device, fleet[chance.randrange(2)].port)

    new = await asyncio.gather(*map(come_back, devices.names))
    await all_is_published(broker)
    await devices.say_the_end(new)
    check(await devices.seen(watcher))
    assert b"offline" not in (await devices.retained(fleet[0].port)).values()


@pytest.mark.parametrize("how", ["killed", "asleep"])
@pytest.mark.parametrize("will_qos", [0, 1])
async def test_wills_of_a_gateway_that_is_gone_do_not_come_behind_the_births_at_another_one(
    fleet: list[GatewayProcess], server: Server, fleet_prefix: str, broker: Broker, name: str, how: str, will_qos: int
) -> None:
    """It is killed; or it sleeps while it publishes them, and goes on when their clients are at another one."""
    chance = random.Random(will_qos)
    for turn in range(3):
        devices = Devices(f"{name}-{turn}", will_qos, 1)
        watcher = await devices.watch(fleet[0].port, 1)
        with GatewayProcess(server.url, fleet_prefix) as gone:
            old = await devices.connect_all(gone.port)
            for each in old:
                each.abort()
            await asyncio.sleep(chance.choice([0, 0.002, 0.005, 0.01, 0.03]))  # in the middle of it
            if how == "killed":
                gone.kill()
            else:
                gone.signal(signal.SIGSTOP)
            new = await devices.connect_all(fleet[0].port, fleet[1].port)
            if how == "asleep":
                gone.signal(signal.SIGCONT)
        await all_is_published(broker)
        await devices.say_the_end(new)
        check(await devices.seen(watcher))
        assert b"offline" not in (await devices.retained(fleet[1].port)).values()


async def test_a_will_that_cannot_be_stored_refuses_the_connection_that_would_overtake_it(
    fleet_prefix: str, name: str
) -> None:
    """The server does not take it; the client comes again, and then finds everything in order."""
    with Server(tcp=True) as server, GatewayProcess(
        server.url, fleet_prefix, settings={"unavailable_timeout": "1s", "preflight": "warn"}
    ) as gateway, server.client() as plain:  # fmt: skip
        watcher = await RawClient(gateway.port, 5).connect(f"{name}-w", keep_alive=0)
        await watcher.subscribe((name, 1))
        will = {"will": (name, b"offline", 1, True), "keep_alive": 0}
        await RawClient(gateway.port, 5).connect(name, **will)
        partition = next(each for each in plain.scan_iter(f"{fleet_prefix}:{{mqtt.*}}", _type="stream"))
        streams = [partition.decode().rpartition(".")[0] + f".{n}}}" for n in range(64)]
        found = [each for each in streams if plain.exists(each)]
        for each in found:
            plain.rename(each, f"{each}-away")
            plain.set(each, "no stream")
        refused = await RawClient(gateway.port, 5).open()
        refused.send(p.connect(name, 5, **will))
        got = await refused.take()
        assert got.kind == 2
        assert got.reason == 0x88
        for each in found:
            plain.rename(f"{each}-away", each)
        again = await RawClient(gateway.port, 5).connect(name, **will)
        assert again.connack is not None
        assert again.connack.reason == 0
        await again.publish(name, b"online", retain=True)
        assert [(await watcher.message()).payload for _ in range(2)] == [b"offline", b"online"]


async def test_a_retained_message_that_is_repeated_stays_behind_those_that_came_after_it(
    fleet: list[GatewayProcess], broker: Broker, name: str
) -> None:
    """QoS 2, at another gateway, which does not know whether it was stored: it was, and another client has replaced
    it since."""
    one, other = [await RawClient(each.port, 5).connect(f"{name}-{n}", clean=False, raw_props=KEPT)
                  for n, each in enumerate(fleet)]  # fmt: skip
    one.send(p.publish(name, b"first", 2, 7, 5, retain=True))
    assert (await one.answer(5)).reason == 0
    await other.publish(name, b"second", 1, retain=True)
    await one.publish(f"{name}/else", b"newer in its partition", 1, packet_id=8)
    one.abort()
    call, key = broker.client.execute_command, broker.keys.received(f"{name}-0")
    value = await call("HGET", key, "7")
    assert value.startswith(b"!")
    await call("HSET", key, "7", value[1:])  # as if its gateway had died before it had noted that
    again = await RawClient(fleet[1].port, 5).connect(f"{name}-0", clean=False, raw_props=KEPT)
    again.send(p.publish(name, b"first", 2, 7, 5, retain=True, dup=True))
    assert (await again.answer(5)).reason == 0
    late = await RawClient(fleet[0].port, 5).connect(f"{name}-late")
    await late.subscribe((name, 1))
    assert (await late.message()).payload == b"second"


async def test_a_will_that_some_gateway_is_about_to_publish_is_not_dropped_by_a_connection_that_begins(
    broker: Broker, name: str
) -> None:
    """Before that, the session goes on, and a will that waits for its delay is dropped."""
    call, keys = broker.client.execute_command, broker.keys
    names = (keys.session(name), keys.received(name), keys.inbox(name), keys.will(name))

    async def begin(epoch: str) -> list[Any]:
        await call("HSET", names[0], "epoch", epoch, "gateway", "g", "mqtt", "60")
        return (await BEGIN_MQTT_SESSION(broker.client, names, (epoch, 0, 60, 0, b"")))[5]

    try:
        await call("HSET", names[3], "1", b"10|[]\nx", "2", b"10|[]\ny")
        assert await TAKE_WILL(broker.client, names[3:], ("1",)) == b"10|[]\nx"
        assert await begin("3") == [b"1", b"0|[]\nx"]
        assert await TAKE_WILL(broker.client, names[3:], ("2",)) is None
        assert await TAKE_WILL(broker.client, names[3:], ("1",)) == b"0|[]\nx"  # until it is published
        assert await begin("4") == [b"1", b"0|[]\nx"]
    finally:
        await call("DEL", *names)


async def test_the_token_of_a_will_is_that_of_its_connection() -> None:
    assert token_of("a", "1") == token_of("a", "1")
    assert len({token_of("a", "1"), token_of("a", "2"), token_of("b", "1")}) == 3
