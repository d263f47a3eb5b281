"""Bridges of a real Mosquitto, with its defaults: it says in its CONNECT that it is one (protocol level 0x84)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rsmq.testing.server import free_port
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

MOSQUITTO = shutil.which("mosquitto")
needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed: apt-get install mosquitto")
MARK = "bridged"
Bridge = Callable[..., int]


@pytest.fixture(scope="module")
def gateway(server: Server, fleet_prefix: str) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url, fleet_prefix) as running:
        yield running


@contextmanager
def mosquitto(path: Path, hub: int, *lines: str) -> Iterator[int]:
    """A Mosquitto that bridges into a gateway; its port. Everything that is not given has its default."""
    port, name = free_port(), f"edge{free_port()}"
    config = path / f"{name}.conf"
    config.write_text(
        "\n".join((
            f"listener {port} 127.0.0.1", "allow_anonymous true", f"connection {name}", f"address 127.0.0.1:{hub}",
            f"remote_clientid {name}", "restart_timeout 1 1", *lines, "",
        ))
    )  # fmt: skip
    assert MOSQUITTO is not None
    log = (path / f"{name}.log").open("wb")
    process = subprocess.Popen([MOSQUITTO, "-v", "-c", str(config)], stdout=log, stderr=log)
    try:
        yield port
    except BaseException:
        print((path / f"{name}.log").read_text())
        raise
    finally:
        process.terminate()
        process.wait(30)
        log.close()


@pytest.fixture
def bridge(gateway: GatewayProcess, tmp_path: Path) -> Iterator[Bridge]:
    """Starts a Mosquitto with these lines in its bridge."""
    with ExitStack() as stack:
        yield lambda *lines: stack.enter_context(mosquitto(tmp_path, gateway.port, *lines))


async def connected(port: int, client_id: str) -> RawClient:
    """A client of a broker that has just been started."""
    found: list[RawClient] = []

    async def listens() -> bool:
        try:
            found.append(await RawClient(port).connect(client_id, keep_alive=0))
        except OSError:
            return False
        return True

    await until(listens, "the broker listens")
    return found[0]


async def passes(sender: RawClient, receiver: RawClient, topic: str) -> None:
    """Wait until the bridge passes on what is published from now on."""
    found = list[bytes]()

    async def has_come() -> bool:
        await sender.publish(topic, b"try", 1)
        receiver.send(p.PING)
        while (got := await receiver.take()).kind == 3:
            found.append(got.payload)
            if got.qos == 1:
                receiver.send(p.ack(4, got.packet_id))
        return bool(found)

    await until(has_come, "the bridge is connected")


async def next_but(receiver: RawClient, ignored: bytes = b"try") -> p.Received:
    """The next message that is none of those trials."""
    while True:
        got = await receiver.message()
        if got.payload != ignored:
            return got


@needs_mosquitto
async def test_a_bridge_with_the_defaults_of_mosquitto_brings_messages_in(
    gateway: GatewayProcess, bridge: Bridge, name: str
) -> None:
    """`topic # out 1`, as at the edge of a site."""
    edge = bridge(f"topic {name}/# out 1")
    centre = await RawClient(gateway.port).connect(f"{name}-centre", keep_alive=0)
    await centre.subscribe((f"{name}/#", 1))
    sensor = await connected(edge, "sensor")
    await passes(sensor, centre, f"{name}/try")
    await sensor.publish(f"{name}/temperature", b"21.5", 1)
    got = await next_but(centre)
    assert (got.topic, got.payload, got.qos) == (f"{name}/temperature", b"21.5", 1)


@needs_mosquitto
async def test_a_bridge_both_ways_passes_each_message_on_once_and_keeps_the_retain_flag(
    gateway: GatewayProcess, bridge: Bridge, name: str
) -> None:
    """Nothing comes back to where it came from, and what was retained before and after is retained at both ends."""
    before = await RawClient(gateway.port).connect(f"{name}-before", keep_alive=0)
    await before.publish(f"{name}/old", b"before", 1, retain=True)
    edge = bridge(f"topic {name}/# both 1")
    at_hub = await RawClient(gateway.port).connect(f"{name}-hub", keep_alive=0)
    await at_hub.subscribe((f"{name}/#", 1))
    assert (await at_hub.message()).payload == b"before"
    at_edge = await connected(edge, "edge")
    await at_edge.subscribe((f"{name}/#", 1))
    await passes(at_edge, at_hub, f"{name}/try")
    await at_edge.publish(f"{name}/up", b"from the edge", 1, retain=True)
    await before.publish(f"{name}/down", b"from the hub", 1, retain=True)

    async def all_of(receiver: RawClient, count: int) -> list[bytes]:
        return [(await next_but(receiver)).payload for _ in range(count)]

    assert sorted(await all_of(at_hub, 2)) == [b"from the edge", b"from the hub"]
    assert sorted(await all_of(at_edge, 3)) == [b"before", b"from the edge", b"from the hub"]
    # a message that came back would be before these
    await at_edge.publish(f"{name}/last", b"last", 1)
    assert await all_of(at_hub, 1) == [b"last"]
    await before.publish(f"{name}/last", b"the very last", 1)
    assert await all_of(at_edge, 2) == [b"last", b"the very last"]
    for port in (edge, gateway.port):
        late = await RawClient(port).connect(f"{name}-late", keep_alive=0)
        await late.subscribe((f"{name}/#", 1))
        found = [await late.message() for _ in range(3)]
        assert {(each.topic.partition("/")[2], each.payload, each.retain) for each in found} == {
            ("old", b"before", True), ("up", b"from the edge", True), ("down", b"from the hub", True)
        }  # fmt: skip


@pytest.mark.parametrize(("name_of_it", "level"), [("MQTT", 0x84), ("MQIsdp", 0x83)])
async def test_a_bridge_gets_nothing_back_and_the_retain_flag_as_it_was(
    gateway: GatewayProcess, name: str, name_of_it: str, level: int
) -> None:
    """Without Mosquitto: by the bit in the protocol level. Clients without it get their own messages."""
    edge = await RawClient(gateway.port).connect(name, keep_alive=0)
    edge.abort()
    edge = await RawClient(gateway.port, level & 0x7F).open()
    raw = bytearray(p.connect(name, 4, name=name_of_it))
    raw[raw.index(name_of_it.encode()) + len(name_of_it)] = level
    edge.send(bytes(raw))
    assert (await edge.take(2)).reason == 0
    await edge.subscribe((f"{name}/#", 1), (f"$share/s/{name}/shared", 1))
    other = await RawClient(gateway.port).connect(f"{name}-2", keep_alive=0)
    await other.subscribe((f"{name}/#", 1))
    await edge.publish(f"{name}/mine", b"mine", 1, packet_id=2, retain=True)
    await other.publish(f"{name}/theirs", b"theirs", 1, retain=True)
    got = await edge.message()
    assert (got.payload, got.retain) == (b"theirs", True)
    found = [await other.message() for _ in range(2)]
    assert {(each.payload, each.retain) for each in found} == {(b"mine", False), (b"theirs", False)}


@pytest.mark.parametrize("level", [0x80, 0x85, 0x86, 0xFF])
async def test_other_levels_with_the_bit_of_a_bridge_are_refused(gateway: GatewayProcess, level: int) -> None:
    one = await RawClient(gateway.port).open()
    raw = bytearray(p.connect("x", 4))
    raw[raw.index(b"MQTT") + 4] = level
    one.send(bytes(raw))
    last = await one.ended()
    assert last is None or last.reason in (1, 0x84)
