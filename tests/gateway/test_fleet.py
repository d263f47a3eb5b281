"""Several gateways, some of which are killed: traps 25, 26, 30, 31, 40, 60, 61, 67, 68, 71."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Iterator

import pytest

from rsmq import Broker
from rsmq.errors import BrokerUnavailable, SessionTaken
from rsmq.gateway.fleet.client_acks import ClientAcks
from rsmq.gateway.fleet.history import LetterHistory
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.router import MqttRouter
from rsmq.gateway.fleet.sessions import PAGE, Ended, Sessions
from rsmq.gateway.fleet.shares import KeptChoices, Shares
from rsmq.model.clock import ServerClock
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.mqtt_subscription import Subscription, shard_of
from rsmq.model.settings import Settings
from rsmq.persistence.inbox_writer import InboxWriter
from rsmq.persistence.mqtt_clients import MqttClients
from rsmq.redis.client.script_batcher import ScriptBatcher
from tests.chaos.system_faults import FaultyServer
from tests.gateway import packets as p
from tests.gateway.conftest import make_sessions
from tests.gateway.ledger import Publisher, Subscriber, firsts
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

QUICK = {"lease_ttl": "PT2S", "presence_grace": "PT0.5S", "presence_interval": "PT0.1S"}
LONG = bool(os.environ.get("CHAOS"))


def start(server: Server, prefix: str) -> GatewayProcess:
    return GatewayProcess(server.url, prefix, settings=QUICK, lease=1)


@pytest.fixture(scope="module")
def pair(server: Server, fleet_prefix: str) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """Two gateways that no test kills."""
    with start(server, fleet_prefix) as one, start(server, fleet_prefix) as two:
        yield one, two


async def test_a_topic_of_gateways_grows_while_clients_publish(
    pair: tuple[GatewayProcess, GatewayProcess], clients: list[RawClient], server: Server, fleet_prefix: str, name: str
) -> None:
    """All that is published before, meanwhile and afterwards is routed once and in order, by both gateways."""
    subscriber = await RawClient(pair[0].port, 5).connect(name)
    publisher = await RawClient(pair[1].port, 5).connect(f"{name}-p")
    clients += [subscriber, publisher]
    await subscriber.subscribe((f"{name}/#", 1))
    settings = Settings(url=server.url, prefix=fleet_prefix, preflight="warn")
    async with Broker(settings) as broker, asyncio.timeout(60):
        wanted = 2 * (await broker.topics.existing("mqtt")).partitions
        number = partitions = 0
        while partitions != wanted or number % 10:
            await publisher.publish(f"{name}/{number % 3}", b"%d" % number)
            if partitions != wanted and number >= 20:
                partitions = (await broker.topics.resize("mqtt", wanted)).partitions
            number += 1
        for _ in range(20):
            await publisher.publish(f"{name}/{number % 3}", b"%d" % number)
            number += 1
        found = [int((await subscriber.message()).payload) for _ in range(number)]
    for each in range(3):
        assert [one for one in found if one % 3 == each] == list(range(each, number, 3))


async def test_a_message_published_anywhere_after_a_suback_meets_the_subscription(
    pair: tuple[GatewayProcess, GatewayProcess], clients: list[RawClient], name: str
) -> None:
    """Subscribe at one gateway, publish at the other at once; the router's owner is either of them."""
    subscriber = await RawClient(pair[0].port, 5).connect(name)
    publisher = await RawClient(pair[1].port, 5).connect(f"{name}-p")
    clients += [subscriber, publisher]
    for number in range(1000 if LONG else 150):
        topic = f"{name}/{number}" if number % 3 else f"{name}/+/{number}"
        await subscriber.subscribe((topic, 1))
        await publisher.publish(topic.replace("+", "x"), b"%d" % number)
        assert (await subscriber.message()).payload == b"%d" % number
        if number % 40 == 39:
            subscriber.send(p.unsubscribe([f"{name}/{n}" for n in range(number)], 2, 5))
            await subscriber.take(11)


async def test_a_session_is_taken_over_at_another_gateway(
    pair: tuple[GatewayProcess, GatewayProcess], clients: list[RawClient], name: str
) -> None:
    """Between PUBLISH and PUBACK, and between PUBREC and PUBREL."""
    raw = b"\x11\0\0\0\x3c"
    old = await RawClient(pair[0].port, 5).connect(name, clean=False, raw_props=raw)
    sender = await RawClient(pair[1].port).connect(f"{name}-s")
    clients += [old, sender]
    await old.subscribe((name, 2))
    await sender.publish(name, b"one", 1)
    await sender.publish(name, b"two", 2)
    one, two = await old.take(3), await old.take(3)
    old.send(p.publish(f"{name}/x", b"mine", 2, 77, 5))
    assert (await old.take(5)).packet_id == 77
    old.send(b"".join(p.publish(f"{name}/y", b"cut off", 2, number, 5) for number in range(100, 115)))
    new = await RawClient(pair[1].port, 5).connect(name, clean=False, raw_props=raw)
    clients.append(new)
    last = await old.ended()
    assert last is not None
    assert last.reason == 0x8E
    again = [await new.take(3), await new.take(3)]
    assert [(each.packet_id, each.payload, each.dup) for each in again] == [
        (one.packet_id, b"one", True), (two.packet_id, b"two", True)
    ]  # fmt: skip
    new.send(p.ack(4, one.packet_id) + p.ack(5, two.packet_id) + p.ack(6, 77))
    kinds = {(await new.take()).kind for _ in range(2)}
    assert kinds == {6, 7}
    new.send(p.ack(7, two.packet_id))
    assert await new.is_silent()


async def test_gateways_on_two_databases_of_a_server_do_not_hear_each_other(
    server: Server, fleet_prefix: str, clients: list[RawClient], name: str
) -> None:
    """Pub/Sub knows no databases: staging beside production, one prefix. QoS 0 and a kick stay where they began."""
    with (
        GatewayProcess(server.in_database(1), fleet_prefix, settings=QUICK, lease=1) as production,
        GatewayProcess(server.in_database(2), fleet_prefix, settings=QUICK, lease=1) as staging,
        GatewayProcess(server.in_database(2), fleet_prefix, settings=QUICK, lease=1) as staging_too,
    ):
        watcher = await RawClient(production.port, 5).connect(name)
        same = await RawClient(staging.port, 5).connect(name)
        sender = await RawClient(staging_too.port, 5).connect(f"{name}-s")
        clients += [watcher, same, sender]
        await watcher.subscribe((f"{name}/#", 0))
        await same.subscribe((f"{name}/#", 0))
        for number in range(16):
            await sender.publish(f"{name}/x", b"%d" % number)
        assert [(await same.message()).payload for _ in range(16)] == [b"%d" % number for number in range(16)]
        async with Broker(Settings(url=server.in_database(2), prefix=fleet_prefix)) as broker:
            assert await MqttClients(broker.client, broker.keys).kick(name, 20)
        await same.ended()
        assert await watcher.is_silent()  # it has neither the messages nor the end of its connection


async def test_a_takeover_with_clean_start_leaves_nothing_of_the_old_session(
    pair: tuple[GatewayProcess, GatewayProcess], clients: list[RawClient], name: str
) -> None:
    old = await RawClient(pair[0].port, 5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
    sender = await RawClient(pair[1].port).connect(f"{name}-s")
    clients += [old, sender]
    await old.subscribe((f"{name}/#", 1))

    async def flood() -> None:
        for number in range(100):
            await sender.publish(f"{name}/x", b"%d" % number)

    flooding = asyncio.create_task(flood())
    await old.take(3)
    new = await RawClient(pair[1].port, 5).connect(name, clean=True)
    clients.append(new)
    assert new.connack is not None
    assert not new.connack.session_present
    await flooding
    assert await new.is_silent()


async def test_an_expired_session_leaves_no_key(
    pair: tuple[GatewayProcess, GatewayProcess], server_url: str, fleet_prefix: str, name: str
) -> None:
    """Of an expiry of 0 at once, of one second soon; one that was raised in DISCONNECT is an error."""
    sender = await RawClient(pair[1].port).connect(f"{name}-s")
    for number, (connect, disconnect) in enumerate([(0, None), (1, None), (60, 0), (60, 1)]):
        raw = b"\x11" + connect.to_bytes(4, "big")
        one = await RawClient(pair[0].port, 5).connect(f"{name}-{number}", clean=False, raw_props=raw)
        await one.subscribe((f"{name}/#", 1))
        if disconnect is None:
            one.send(p.DISCONNECT)
        else:
            one.send(p.packet(0xE0, b"\0", b"\5\x11" + disconnect.to_bytes(4, "big")))
        await one.ended()
        one.close()
        await sender.publish(f"{name}/x", b"perhaps late")
    await sender.disconnect()
    async with Broker(Settings(url=server_url, prefix=fleet_prefix)) as broker:

        async def is_clean() -> bool:
            keys = await broker.client.execute_command("KEYS", f"{fleet_prefix}:*{name}*")
            lists = [
                await broker.client.execute_command("HKEYS", broker.keys.mqtt(n, "subscriptions")) for n in range(8)
            ]
            return not keys and not any(name.encode() in each for found in lists for each in found)

        await until(is_clean, "no key is left")


async def test_a_message_routed_behind_the_end_of_its_session_is_not_stored(
    pair: tuple[GatewayProcess, GatewayProcess], broker: Broker, name: str
) -> None:
    """The order is forced: the router has read the subscription, the session ends, then the letter is to be stored.

    While the session is there, the same letter is stored.
    """
    one = await RawClient(pair[0].port, 5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
    await one.subscribe((name, 1))
    one.send(p.DISCONNECT)
    await one.ended()
    client, keys = broker.client, broker.keys
    inbox, session, _, _ = keys.device(name)

    async def is_away() -> bool:
        return not await client.execute_command("HEXISTS", session, "gateway")

    await until(is_away, "the connection has ended")
    batcher = ScriptBatcher(client)
    running = asyncio.create_task(batcher.run())
    writer = InboxWriter(batcher, keys, broker.settings, is_cluster=False)
    registry = Registry(client, keys, batcher)
    retained, now_ms = Retained(client, keys, batcher, 100), ServerClock().now_ms
    router = MqttRouter(registry, writer, retained, KeptChoices(keys, batcher), now_ms)
    await broker.publish(name, b"early", headers={"mqtt-topic": name, "mqtt-client": "other", "mqtt-qos": "1"})
    await broker.publish(name, b"late", headers={"mqtt-topic": name, "mqtt-client": "other", "mqtt-qos": "1"})
    early, late = [
        Message(MessageOrigin(name, 0, "mqtt"), entry_id, fields)
        for n in range((await broker.topics.find(name)).partitions)  # type: ignore[union-attr]
        for entry_id, fields in await client.execute_command("XRANGE", keys.stream(name, n), "-", "+")
    ]
    assert await router.route([early]) is None
    assert await client.execute_command("ZCARD", inbox) == 1
    epoch = (await client.execute_command("HGET", session, "epoch")).decode()
    look = registry.look

    async def look_and_end(names: Collection[str]) -> None:
        await look(names)
        registry.look = look  # type: ignore[method-assign]
        ending = Registry(client, keys, batcher)
        shares = Shares(client, keys, ending, writer)
        ends = Sessions(client, keys, batcher, ending, shares, None, "late", ServerClock(), asyncio.create_task)  # type: ignore[arg-type]
        await ends.end(name, epoch)

    registry.look = look_and_end  # type: ignore[method-assign]
    assert await router.route([late]) is None
    assert router.letters == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await client.execute_command("KEYS", f"{keys.prefix}:{{{name}}}*") == []
    await broker.topics.delete(name)


async def met(registry: Registry, name: str) -> list[Subscription]:
    """The subscriptions that a topic name meets."""
    await registry.look((name,))
    by_name = registry.subscribers(name)
    assert by_name is not None
    return [subscription for _, subscription in (*by_name.found, *registry.tree.match(name))]


async def test_a_client_that_subscribes_again_to_what_it_has_changes_nothing(broker: Broker, name: str) -> None:
    """Else a fleet that connects again writes a change for each client, and routers which miss 10 000 read all again.

    Its newer epoch is written all the same: what an older connection writes is refused.
    """
    client, keys = broker.client, broker.keys
    batcher = ScriptBatcher(client)
    running = asyncio.create_task(batcher.run())
    registry, following = (Registry(client, keys, batcher) for _ in range(2))
    changes = keys.mqtt(shard_of(name), "changes")
    for shares in (b"OK", b"SHARED"):
        wanted = [Subscription(f"{name}/#", 1), Subscription("$share/g/x" if shares == b"SHARED" else "x", 2)]
        await registry.write(name, "10", wanted)
        before = await client.execute_command("XLEN", changes)
        assert await registry.write(name, "11", wanted, before={"mqtt.0": "5-0"}) == shares
        assert await client.execute_command("XLEN", changes) == before
        with pytest.raises(SessionTaken):
            await registry.write(name, "10", ())
        assert [each.filter for each in await met(following, "x")] == [wanted[1].filter]
        assert await registry.write(name, "11", wanted, is_online=False) == shares
        assert await client.execute_command("XLEN", changes) == before + 1
        assert await registry.write(name, "12", wanted[:1]) == shares
        assert await met(following, "x") == []
        assert await registry.write(name, "12", ()) == shares
        assert await registry.write(name, "12", wanted, is_online=False) == b"NONE", "removed meanwhile"
        assert await met(following, "x") == []
        await client.execute_command("HDEL", keys.mqtt(shard_of(name), "subscriptions"), name)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_retained_message_is_kept_before_its_subscriptions_are_read(broker: Broker, name: str) -> None:
    """Else one that subscribes between both, while its gateway is slow to keep it, gets it neither live nor retained.

    A removal counts, what has expired and what its broken headers say does not, and an older one replaces nothing.
    """
    client, keys = broker.client, broker.keys
    batcher = ScriptBatcher(client)
    running = asyncio.create_task(batcher.run())
    clock = ServerClock()
    retained, registry = Retained(client, keys, batcher, 100), Registry(client, keys, batcher)
    seen = list[bytes]()
    look = registry.look

    async def note_and_look(names: Collection[str]) -> None:
        seen.append(await retained.find_one(name))
        await look(names)

    registry.look = note_and_look  # type: ignore[method-assign]
    writer = InboxWriter(batcher, keys, broker.settings, is_cluster=False)
    router = MqttRouter(registry, writer, retained, KeptChoices(keys, batcher), clock.now_ms)
    headers = {"mqtt-topic": name, "mqtt-client": "other", "mqtt-qos": "1", "mqtt-retain": "1"}
    for payload, others in (
        (b"online", {}), (b"", {}), (b"again", {}), (b"broken", {"mqtt-qos": "x"}), (b"late", {"mqtt-expiry": "0"}),
    ):  # fmt: skip
        await broker.publish(name, payload, key="one", headers=headers | others)
    found = [
        Message(MessageOrigin(name, 0, "mqtt"), entry_id, fields)
        for n in range((await broker.topics.find(name)).partitions)  # type: ignore[union-attr]
        for entry_id, fields in await client.execute_command("XRANGE", keys.stream(name, n), "-", "+")
    ]
    for message in found:
        await router.route([message])
    online, removed, again, broken, late = seen
    assert online.endswith(b"online")
    assert removed == b""
    assert all(each.endswith(b"again") for each in (again, broken, late))
    await router.route([found[0]])
    assert seen[-1] == again
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await broker.topics.delete(name)


@pytest.mark.parametrize("step", ["before the answer", "after PUBREC"])
async def test_qos_2_goes_on_at_another_gateway_and_is_stored_once(
    pair: tuple[GatewayProcess, GatewayProcess], server: Server, fleet_prefix: str, step: str, name: str
) -> None:
    """The publisher's gateway is killed; the same packet comes with DUP elsewhere, then its id is used again."""
    with start(server, fleet_prefix) as dying:
        old = await RawClient(dying.port).connect(name, clean=False)
        old.send(p.publish("x", name.encode(), 2, 9))
        if step == "after PUBREC":
            await old.take(5)
        dying.kill()
    new = await RawClient(pair[1].port).connect(name, clean=False)
    new.send(p.publish("x", name.encode(), 2, 9, dup=True))
    await new.take(5)
    new.send(p.ack(6, 9))
    assert (await new.take(7)).packet_id == 9
    assert await new.publish("x", name.encode() + b" again", 2, 9) == 0
    async with Broker(Settings(url=server.url, prefix=fleet_prefix)) as broker:
        found = [each for each in await stored(broker) if each.startswith(name.encode())]
    assert found == [name.encode(), name.encode() + b" again"]


async def stored(broker: Broker) -> list[bytes]:
    """The payloads in the topic `mqtt`."""
    found = list[bytes]()
    for partition in (await broker.topics.existing("mqtt")).numbers:
        rows = await broker.client.execute_command("XRANGE", broker.keys.stream("mqtt", partition), "-", "+")
        found += [fields[1] for _, fields in rows]
    return found


async def test_no_kill_of_a_gateway_loses_or_reorders_messages(server: Server, fleet_prefix: str) -> None:
    """Gateways route, hold the publishers and hold the subscribers; they are killed while messages flow."""
    prefix = f"{fleet_prefix}-k"
    count, kills = (4000, 6) if LONG else (600, 2)
    payloads = [b"%d" % number for number in range(count)]
    gateways = [start(server, prefix) for _ in range(3)]
    try:
        ports = [each.port for each in gateways]
        subscribers = {qos: Subscriber(ports, f"reader{qos}", qos - 1) for qos in (1, 2)}
        publishers = {qos: Publisher(ports, f"writer{qos}", qos - 1) for qos in (1, 2)}
        tasks = [asyncio.create_task(each.collect(f"t{qos}/#", count, qos)) for qos, each in subscribers.items()]
        for each in subscribers.values():
            await each.ready.wait()
        tasks += [asyncio.create_task(each.publish(f"t{qos}/x", payloads, qos)) for qos, each in publishers.items()]
        for number in range(kills):
            wanted = (number + 1) * count // (kills + 1)
            while any(len(each.got) < wanted for each in subscribers.values()):
                await asyncio.sleep(0.01)
                assert not any(task.done() and task.exception() for task in tasks)
            gateways.pop(0).kill()
            if LONG:
                gateways.append(start(server, prefix))
            ports[:] = [each.port for each in gateways]
            for each in (*subscribers.values(), *publishers.values()):
                each.ports = ports
        async with asyncio.timeout(100):
            await asyncio.gather(*tasks)
        assert any(each.connects > 1 for each in (*subscribers.values(), *publishers.values()))
        assert firsts(subscribers[1].got) == payloads
        assert subscribers[2].got == payloads
    finally:
        for gateway in gateways:
            gateway.kill()


async def test_a_server_that_restarts_loses_nothing_and_repeats_nothing(fleet_prefix: str) -> None:
    """No PUBACK while it is away. What was published meanwhile is stored once, in order."""
    with Server(aof=True, tcp=True) as server, start(server, fleet_prefix) as gateway:
        one = await RawClient(gateway.port).connect("writer", clean=False, keep_alive=0)
        for number in range(10):
            await one.publish("x", b"%d" % number, 1, number + 1)
        server.stop()
        one.send(b"".join(p.publish("x", b"%d" % number, 1, number + 1) for number in range(10, 20)))
        assert await one.is_silent()
        server.start()
        assert [(await one.take(4)).packet_id for _ in range(10)] == list(range(11, 21))
        async with Broker(Settings(url=server.url, prefix=fleet_prefix)) as broker:
            assert await stored(broker) == [b"%d" % number for number in range(20)]


async def test_survivors_end_the_connections_of_a_dead_gateway(
    pair: tuple[GatewayProcess, GatewayProcess], server: Server, fleet_prefix: str, name: str
) -> None:
    """Clean sessions at once, the others when they expire."""
    with start(server, fleet_prefix) as dead:
        for number in range(6):
            raw = b"\x11\0\0\0\x01" if number % 2 else b""
            one = await RawClient(dead.port, 5).connect(f"{name}-{number}", raw_props=raw)
            await one.subscribe((f"{name}/#", 1))
        dead.kill()
    async with Broker(Settings(url=server.url, prefix=fleet_prefix)) as broker:

        async def is_clean() -> bool:
            keys = await broker.client.execute_command("KEYS", f"{fleet_prefix}:*{name}-*")
            lists = [
                await broker.client.execute_command("HKEYS", broker.keys.mqtt(n, "subscriptions")) for n in range(8)
            ]
            return not keys and not any(name.encode() in each for found in lists for each in found)

        await until(is_clean, "the sessions are gone")


async def test_a_gateway_that_was_paused_for_too_long_starts_anew(
    pair: tuple[GatewayProcess, GatewayProcess], server: Server, fleet_prefix: str, name: str
) -> None:
    with start(server, fleet_prefix) as paused:
        one = await RawClient(paused.port).connect(name, clean=False)
        await one.subscribe((name, 1))
        async with Broker(Settings(url=server.url, prefix=fleet_prefix)) as broker:
            before = await broker.client.execute_command("ZCARD", broker.keys.gateways)
            paused.signal(signal.SIGSTOP)

            async def is_buried() -> bool:
                return bool(await broker.client.execute_command("ZCARD", broker.keys.gateways) < before)

            await until(is_buried, "the others have ended its connections")
        moved = await RawClient(pair[0].port).connect(name, clean=False)
        assert moved.connack is not None
        assert moved.connack.session_present
        paused.signal(signal.SIGCONT)
        await one.ended()
        assert await moved.publish(name, b"here") == 0
        assert (await moved.message()).payload == b"here"
        fresh = await RawClient(paused.port).connect(f"{name}-2")
        assert await fresh.is_silent()


@pytest.mark.parametrize("is_buried", [False, True])
@pytest.mark.parametrize("now", ["a later session", "no session"])
async def test_a_subscribe_that_a_paused_gateway_takes_late_leaves_no_subscription(
    pair: tuple[GatewayProcess, GatewayProcess], server: Server, fleet_prefix: str, broker: Broker, name: str,
    is_buried: bool, now: str,
) -> None:  # fmt: skip
    """Its client has connected to another gateway meanwhile, with a clean start; that session may have ended, too. The
    subscription would be in the later session, or belong to none until the paused connection's session expires."""
    kept, client, key = (
        {"raw_props": b"\x11\0\0\0\x3c"},
        broker.client,
        broker.keys.mqtt(shard_of(name), "subscriptions"),
    )
    with start(server, fleet_prefix) as paused:
        one = await RawClient(paused.port, 5).connect(name, clean=False, **kept)
        before = await client.execute_command("ZCARD", broker.keys.gateways)
        paused.signal(signal.SIGSTOP)
        one.send(p.subscribe([(f"{name}/late", 1), (f"$share/g/{name}/+", 1)], 1, 5, b""))

        async def has_been_buried() -> bool:
            return bool(await client.execute_command("ZCARD", broker.keys.gateways) < before)

        async def has_ended() -> bool:
            return not await client.execute_command("EXISTS", broker.keys.session(name))

        if is_buried:
            await until(has_been_buried, "the others have ended its connections")
        two = await RawClient(pair[0].port, 5).connect(name, **kept)
        if now == "no session":
            two.send(p.packet(0xE0, b"\0", p.props(5, b"\x11\0\0\0\0")))
            await until(has_ended, "the later session has ended")
        paused.signal(signal.SIGCONT)
        await one.ended()
        assert await RawClient(paused.port).connect(f"{name}-2")  # it does what it has read before
    entry = await client.execute_command("HGET", key, name)
    if now == "no session":
        assert entry is None
        return
    assert entry.endswith(b"|")
    assert await two.publish(f"{name}/late", b"it has not subscribed") == 0
    assert await two.is_silent()
    assert await two.subscribe((f"{name}/late", 1)) == b"\1"
    assert await two.publish(f"{name}/late", b"now") == 0
    assert (await two.message()).payload == b"now"


async def test_a_subscribe_is_served_where_the_server_has_lost_the_list_of_its_client(
    pair: tuple[GatewayProcess, GatewayProcess], broker: Broker, name: str
) -> None:
    """A failover may lose it, and keep the session."""
    one = await RawClient(pair[0].port, 5).connect(name)
    await one.subscribe((f"{name}/a", 1))
    await broker.client.execute_command("HDEL", broker.keys.mqtt(shard_of(name), "subscriptions"), name)
    assert await one.subscribe((f"{name}/b", 1)) == b"\1"
    for topic in ("a", "b"):
        assert await one.publish(f"{name}/{topic}", topic.encode()) == 0
        assert (await one.message()).payload == topic.encode()


async def test_sigterm_tells_clients_and_keeps_their_sessions(
    pair: tuple[GatewayProcess, GatewayProcess], server: Server, fleet_prefix: str, name: str
) -> None:
    with start(server, fleet_prefix) as gateway:
        five = await RawClient(gateway.port, 5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
        four = await RawClient(gateway.port, 4).connect(f"{name}-4", clean=False)
        await five.subscribe((name, 1))
        gateway.signal(signal.SIGTERM)
        last = await five.ended()
        assert last is not None
        assert last.reason == 0x8B
        assert await four.ended() is None
        assert gateway.stop() == 0
    five = await RawClient(pair[0].port, 5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
    assert five.connack is not None
    assert five.connack.session_present
    assert await five.publish(name, b"still mine") == 0
    assert (await five.message()).payload == b"still mine"


async def test_a_gateway_that_starts_while_subscriptions_change_has_the_same_tree(
    pair: tuple[GatewayProcess, GatewayProcess], server: Server, fleet_prefix: str, name: str
) -> None:
    """What it routes reaches exactly those who are subscribed."""
    readers = [await RawClient(pair[0].port, 5).connect(f"{name}-{number}") for number in range(10)]

    async def change(reader: RawClient, number: int) -> None:
        for round_ in range(30):
            await reader.subscribe((f"{name}/{number}/{round_}", 1))
            if round_ % 3:
                reader.send(p.unsubscribe([f"{name}/{number}/{round_}"], 3, 5))
                await reader.take(11)

    changing = [asyncio.create_task(change(reader, number)) for number, reader in enumerate(readers)]
    with start(server, fleet_prefix) as fresh:
        sender = await RawClient(fresh.port).connect(f"{name}-s")
        await asyncio.gather(*changing)
        for number in range(10):
            for round_ in range(25, 30):
                await sender.publish(f"{name}/{number}/{round_}", b"%d" % round_)
        for reader in readers:
            assert (await reader.message()).payload == b"27"
            assert await reader.is_silent()


async def test_what_connects_to_a_gateway_after_the_others_have_ended_it_is_refused(broker: Broker, name: str) -> None:
    """It was paused, and goes on before it knows: what it does now would be found by no survivor."""
    client, keys = broker.client, broker.keys
    async with make_sessions(broker, f"{name}-a") as paused, make_sessions(broker, f"{name}-b") as survivor:
        await paused.beat(1, new=True)
        await paused.noted(paused.note("before", "7", 0))
        await survivor.bury(paused.gateway)
        assert await client.execute_command("HKEYS", keys.gateway_clients(paused.gateway)) == [b""]
        with pytest.raises(BrokerUnavailable, match="away"):
            await paused.noted(paused.note("after", "8", 0))
        assert await client.execute_command("PTTL", keys.gateway_clients(paused.gateway)) > 0


async def test_a_sweep_ends_all_sessions_that_have_expired(broker: Broker, name: str) -> None:
    """Also more than one page of a shard: sessions may expire faster than one page a round."""
    client, due, many = broker.client, broker.keys.mqtt(3, "sessions"), 2 * PAGE + 7
    await client.execute_command("ZADD", due, *(part for n in range(many) for part in (1, f"{n + 1}:{name}{n}")))
    async with make_sessions(broker, f"{name}-a") as sessions:
        await sessions.sweep()
    assert await client.execute_command("ZCOUNT", due, "-inf", 1) == 0


async def test_a_session_whose_connection_others_have_ended_does_not_begin(broker: Broker, name: str) -> None:
    """The survivors have published its will already, which it would store only now."""
    inboxes = broker._connection.inboxes

    def ignore(*_: object) -> None:
        """No letter comes."""

    reader = InboxReader(
        inboxes,
        name,
        10,
        page_bytes=1,
        on_letters=lambda *_: 0,
        on_received=ignore,
        on_end=ignore,
        history=LetterHistory(),
        acks=ClientAcks(inboxes.batcher, is_cluster=False),
    )
    await reader.open(clean=False, life_ms=60_000)
    async with make_sessions(broker, f"{name}-b") as survivor:
        await survivor.closed(Ended(name, reader.epoch, 60, keeps_will=True, has_shares=False))
    with pytest.raises(SessionTaken):
        await reader.begin(clean=False, expiry=60, has_removed=False, will=b"0|[]\n")
    reader.close()


async def test_a_new_subscription_after_a_failover_to_a_clock_that_is_behind_gets_what_comes(name: str) -> None:
    """A failover loses the newest messages, and the next master's clock is an hour behind: stream ids go back. The ids
    that the gateway has seen before do not keep a message from a subscription that was made afterwards.
    """
    with FaultyServer() as server, start(server, name) as gateway:
        one, two = await RawClient(gateway.port).connect(f"{name}1"), await RawClient(gateway.port).connect(f"{name}2")
        assert await one.publish(name, b"before") == 0
        settings = Settings(url=server.url, prefix=name, preflight="warn")
        async with Broker(settings) as broker:
            topic = await broker.topics.find("mqtt")
            assert topic is not None

            async def lease_until() -> float:
                (_, until_ms) = await broker.client.execute_command("ZRANGE", broker.keys.gateways, 0, 0, "WITHSCORES")
                return float(until_ms)

            before = await lease_until()
            server.faults.step_clock(-3600)
            await broker.client.pipelined(
                [("DEL", broker.keys.stream("mqtt", number)) for number in topic.numbers]
                + [("CLIENT", "KILL", "TYPE", "normal")]
            )

            renewals = set[float]()

            async def has_seen_the_clock() -> bool:
                if (now := await lease_until()) < before - 1800_000:
                    renewals.add(now)
                return len(renewals) == 2  # so the gateway has the reply to the first one

            await until(has_seen_the_clock, "the gateway has renewed its lease by the new clock")
            assert await two.subscribe((name, 1)) == b"\1"
            assert await one.publish(name, b"after", packet_id=2) == 0
            assert (await two.message()).payload == b"after"
