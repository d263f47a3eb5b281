"""What no client can make a gateway keep or do: the memory and the time of one packet and of a cache."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import pytest

from rsmq import Broker, ConfigError
from rsmq.gateway import Gateway
from rsmq.gateway.connections import ingest
from rsmq.gateway.connections.auth import Gatekeeper
from rsmq.gateway.connections.client import ClientConnection
from rsmq.gateway.connections.ingest import MOST_WAITING
from rsmq.gateway.fleet.message import from_packet
from rsmq.gateway.fleet.routes import Routes
from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol import decode, encode
from rsmq.gateway.protocol.decode import MOST_FILTERS
from rsmq.gateway.protocol.machine import LARGEST_CONNECT, ClientLimits, Machine
from rsmq.gateway.protocol.packet import LONGEST_NAME, Publish, ReasonCode
from rsmq.gateway.protocol.properties import MOST_PAIRS
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

READ = 512 << 10
"""More than a connection reads at once."""
PAIR = b"\x26\0\1a\0\1b"
FILTERS = [("a", 0)] * (MOST_FILTERS + 1)
TOO_MANY: list[tuple[str, int, bytes, str, ReasonCode]] = [
    # what, version, packet, what it is counted as, reason code
    ("PUBLISH", 5, p.publish("a", b"", 1, 1, 5, raw_props=PAIR * (MOST_PAIRS + 1)), "user_properties",
     ReasonCode.QUOTA_EXCEEDED),
    ("CONNECT", 0, p.connect("c", 5, raw_props=PAIR * (MOST_PAIRS + 1)), "user_properties", ReasonCode.QUOTA_EXCEEDED),
    ("will", 0, p.connect("c", 5, will=("a", b"", 0, False), will_props=PAIR * (MOST_PAIRS + 1)), "user_properties",
     ReasonCode.QUOTA_EXCEEDED),
    ("SUBSCRIBE", 5, p.subscribe(FILTERS, 1, 5), "filters", ReasonCode.QUOTA_EXCEEDED),
    ("SUBSCRIBE 3.1.1", 4, p.subscribe(FILTERS, 1, 4), "filters", ReasonCode.QUOTA_EXCEEDED),
    ("UNSUBSCRIBE", 5, p.unsubscribe([name for name, _ in FILTERS], 1, 5), "filters", ReasonCode.QUOTA_EXCEEDED),
    ("large CONNECT", 0, b"\x10" + p.varint(LARGEST_CONNECT), "packet_too_large", ReasonCode.PACKET_TOO_LARGE),
]  # fmt: skip


def machine(level: int) -> Machine:
    """A connected client of this version; 0: none is yet."""
    made = Machine(ClientLimits())
    if level:
        made.feed(p.connect("c", level))
        made.accept(session_present=False)
    return made


@pytest.mark.parametrize(
    ("level", "data", "name", "reason"), [row[1:] for row in TOO_MANY], ids=[e[0] for e in TOO_MANY]
)
def test_a_packet_with_too_many_fields_is_refused(level: int, data: bytes, name: str, reason: ReasonCode) -> None:
    one = machine(level)
    assert one.feed(data) == []
    assert one.error is not None
    assert (one.error.name, one.error.reason) == (name, reason)


def test_a_packet_with_as_many_fields_as_allowed_is_accepted() -> None:
    assert len(machine(5).feed(p.publish("a", b"", 1, 1, 5, raw_props=PAIR * MOST_PAIRS))) == 1
    assert len(machine(5).feed(p.subscribe(FILTERS[1:], 1, 5))) == 1
    longest = b"x" * 65_535
    assert len(machine(0).feed(p.connect("c", 5, username="u", password=longest, will=("a", longest, 0, False)))) == 1


def test_long_topic_names_are_kept_in_no_cache(tmp_path: Path) -> None:
    """A cache has a number of names. With names of 64 KiB each, it would take gigabytes."""
    rules = tmp_path / "acl"
    rules.write_text("topic readwrite #\n", "utf-8")
    routes, gatekeeper, rights = Routes(), Gatekeeper(GatewayOptions(acl_file=rules, anonymous=True)), {}
    for size, number in ((LONGEST_NAME, 1), (LONGEST_NAME + 1, 0)):
        name = f"{size}".ljust(size, "x")
        before = encode._topic_part.cache_info().currsize, len(decode.KNOWN_NAMES), len(routes._by_name), len(rights)
        machine(5).feed(p.publish(name, b"", 1, 1, 5))
        routes.find(name)
        assert gatekeeper.remembers(rights, "c", None, "write", name)
        encode.publish(name, b"", 0, 0, 5, retain=False, dup=False, properties=b"")
        after = encode._topic_part.cache_info().currsize, len(decode.KNOWN_NAMES), len(routes._by_name), len(rights)
        assert [new - old for new, old in zip(after, before, strict=True)] == [number] * 4


def test_user_properties_are_no_headers_of_the_gateway() -> None:
    """One called mqtt-retain made its message a retained one for subscribers."""
    pairs = [("mqtt-retain", "1"), ("mqtt-expiry", "1"), ("mqtt-client", "other"), ("color", "red")]
    headers = from_packet(Publish("a", b"", 1, b"\0\1"), "me").headers(pairs)
    assert headers == {"color": "red", "mqtt-topic": "a", "mqtt-client": "me", "mqtt-qos": "1"}


async def test_messages_of_qos_0_do_not_pile_up_while_the_server_takes_none(fleet_prefix: str, clients: object) -> None:
    """No Receive Maximum holds them back. What is too much is dropped, and counted."""
    count, size = 290, 250_000
    with Server(tcp=True) as server, GatewayProcess(server.url, fleet_prefix, routes={"x": "x"}) as gateway:
        one = await RawClient(gateway.port).connect("c", keep_alive=0)
        with server.client() as admin:
            admin.config_set("maxmemory", 1)
            for _ in range(count):
                one.send(p.publish("x", bytes(size)))
                await one._writer.drain()
            assert await one.is_silent()
            admin.config_set("maxmemory", 0)
            keys = Keys(fleet_prefix)

            def stored() -> int:
                return sum(admin.xlen(keys.stream("x", number)) for number in range(8))

            await until(lambda: stored() == MOST_WAITING // size, "what has waited is stored")
            assert await one.publish("x", b"next") == 0
            assert stored() == MOST_WAITING // size + 1
        one.abort()


@pytest.mark.parametrize("qos", [1, 2])
async def test_publishers_are_not_read_while_too_much_waits_for_the_server(
    qos: int, fleet_prefix: str, clients: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may send as many as Receive Maximum says, and there are many of them. All are stored later."""
    most, size, number = 1_000_000, 100_000, GatewayOptions().receive_maximum
    monkeypatch.setattr(ingest, "MOST_WAITING", most)
    with Server(tcp=True) as server, server.client() as admin:
        gateway = Gateway(
            Broker(Settings(url=server.url, prefix=fleet_prefix, preflight="warn")), listen=["mqtt://127.0.0.1:0"],
            options=GatewayOptions(anonymous=True),
        )  # fmt: skip
        async with anyio.create_task_group() as tasks:
            await tasks.start(gateway.run)
            other, *some = [await RawClient(gateway.ports[0], 5).connect(f"c{each}", keep_alive=0) for each in range(6)]
            context = gateway.context
            assert context is not None
            admin.config_set("maxmemory", 1)
            for each in some:
                for packet_id in range(1, number + 1):
                    each.send(p.publish("x", bytes(size), qos, packet_id, 5))
            await until(lambda: context.ingest.waiting > most, "too much waits")
            for _ in range(50):
                assert await other.is_silent()
            assert context.ingest.waiting <= most + len(some) * READ
            admin.config_set("maxmemory", 0)
            for each in some:
                assert {(await each.take(3 + qos)).reason for _ in range(number)} <= {0, 0x10}
            assert context.ingest.waiting == 0
            gateway.stop()


async def test_closed_connection_is_forgotten_long_before_its_keep_alive_is_over(
    server_url: str, fleet_prefix: str, clients: object
) -> None:
    """A client that connects again and again would leave one each time, for up to 27 hours."""

    def connections() -> int:
        gc.collect()
        return sum(type(each) is ClientConnection for each in gc.get_objects())

    before = connections()
    gateway = Gateway(
        Broker(Settings(url=server_url, prefix=fleet_prefix, preflight="warn")), listen=["mqtt://127.0.0.1:0"],
        options=GatewayOptions(anonymous=True),
    )  # fmt: skip
    async with anyio.create_task_group() as tasks:
        await tasks.start(gateway.run)
        for n in range(5):
            one = await RawClient(gateway.ports[0]).connect(f"long{n}", keep_alive=65_535)
            await one.disconnect()
        stays = await RawClient(gateway.ports[0]).connect("stays", keep_alive=65_535)
        await until(lambda: connections() == before + 1, "those that are closed are forgotten")
        assert await stays.is_silent()
        gateway.stop()


async def test_connections_without_a_connect_have_a_limit(server: Server, fleet_prefix: str, clients: object) -> None:
    with GatewayProcess(server.url, fleet_prefix, most_opening=3, connect_timeout=60) as gateway:
        connected = [await RawClient(gateway.port).connect(f"c{n}") for n in range(5)]
        waiting = [await RawClient(gateway.port).open() for _ in range(3)]
        one = await RawClient(gateway.port).open()
        assert await one.ended() is None
        assert await connected[0].is_silent()
        waiting[0].send(p.connect("late"))
        assert (await waiting[0].take(2)).reason == 0
        connected.append(await RawClient(gateway.port).connect("more"))
        assert "refused" in gateway.log()
        for each in (*connected, *waiting, one):
            each.abort()


def test_a_window_is_at_most_what_a_session_can_have() -> None:
    """A larger one was taken, and each client that asked for as much was then refused."""
    assert GatewayOptions(window=32_767).window == 32_767
    with pytest.raises(ConfigError, match="window is 32768: use a number from 1 to 32767"):
        GatewayOptions(window=32_768)
