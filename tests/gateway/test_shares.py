"""Shared subscriptions: traps 62 and 70."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rsmq import Broker
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.router import MqttRouter
from rsmq.gateway.fleet.sessions import Ended
from rsmq.gateway.fleet.shares import Choice, KeptChoices, Shares, choices_of, read_choices, write_choices
from rsmq.gateway.protocol.packet import Subscription
from rsmq.model.clock import ServerClock
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.mqtt_subscription import shard_of
from rsmq.model.settings import Settings
from rsmq.persistence.inbox_writer import InboxWriter, LetterBatch, Receipt
from rsmq.persistence.letter import read_mqtt
from rsmq.redis.client.script_batcher import ScriptBatcher
from tests.gateway import packets as p
from tests.gateway.conftest import make_sessions
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

Make = Callable[..., RawClient]
KEPT = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}
TURNS = 10
SEEDS = 100 if os.environ.get("CHAOS") else 3


async def has_ended(broker: Broker, client_id: str) -> None:
    """Wait until the session of a client has ended."""
    while await broker.client.execute_command("EXISTS", broker.keys.session(client_id)):
        await asyncio.sleep(0.01)


async def gets_all(client: RawClient, count: int) -> None:
    """A client gets each of so many messages once, and nothing more."""
    got = [(await client.message()).payload for _ in range(count)]
    assert sorted(map(int, got)) == list(range(count))
    assert await drain(client) == []


async def drain(client: RawClient) -> list[bytes]:
    """What has come up to now. Messages of QoS 1 are acknowledged, those of QoS 2 finished."""
    client.send(p.PING)
    got, is_answered, releases = list[bytes](), False, 0
    while not is_answered or releases:
        each = await client.take()
        is_answered = is_answered or each.kind == 13
        if each.kind == 3:
            got.append(each.payload)
            if each.qos:
                client.send(p.ack(4 if each.qos == 1 else 5, each.packet_id))
                releases += each.qos == 2
        elif each.kind == 6:
            client.send(p.ack(7, each.packet_id))
            releases -= 1
    return got


async def collect(members: list[RawClient], count: int) -> list[list[bytes]]:
    """What each member gets, until they have so many different messages together."""
    got: list[list[bytes]] = [[] for _ in members]
    async with asyncio.timeout(60):
        while len({each for found in got for each in found}) < count:
            for found, member in zip(got, members, strict=True):
                found += await drain(member)
    return got


async def test_each_message_goes_to_one_member_of_each_share(client: Make, name: str) -> None:
    """A subscription that is not shared, and another share, get their own copy. Version 3 may share, too."""
    members = [await client(level).connect(f"{name}-{number}") for number, level in enumerate((5, 5, 4))]
    for number, member in enumerate(members):
        assert await member.subscribe((f"$share/one/{name}/#", number % 3)) == bytes([number % 3])
    alone, other = await client(5).connect(f"{name}-alone"), await client(5).connect(f"{name}-other")
    await alone.subscribe((f"{name}/+", 1))
    await other.subscribe((f"$share/two/{name}/x", 1), raw_props=b"\x0b\x07")
    sender = await client().connect(f"{name}-s")
    for qos in (0, 1, 2):
        for number in range(20):
            await sender.publish(f"{name}/x", b"%d %d" % (qos, number), qos, number + 1)
    wanted = {b"%d %d" % (qos, number) for qos in (0, 1, 2) for number in range(20)}
    got = await collect(members, 60)
    assert all(got), "each member has some"
    assert sorted(each for found in got for each in found) == sorted(wanted)
    for one in (alone, other):
        (found,) = await collect([one], 60)
        assert sorted(found) == sorted(wanted)
    await sender.publish(f"{name}/x", b"last")
    assert (await other.message()).properties[11] == [7]


async def test_a_member_may_have_the_same_filter_of_its_own(client: Make, name: str) -> None:
    one = await client(5).connect(name)
    await one.subscribe((f"$share/g/{name}", 1), (name, 1))
    for qos in (0, 1):
        await one.publish(name, b"twice", qos)
        assert [(await one.message()).payload for _ in range(2)] == [b"twice"] * 2
    one.send(p.unsubscribe([f"$share/g/{name}", f"$share/h/{name}"], 3, 5))
    assert (await one.take(11)).reasons == b"\0\x11"
    for qos in (0, 1):
        await one.publish(name, b"once", qos)
        assert (await one.message()).payload == b"once"
    assert await one.is_silent()


async def test_a_share_gets_no_retained_messages(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name), await client(5).connect(f"{name}-s")
    await sender.publish(name, b"kept", 1, retain=True)
    assert await one.subscribe((f"$share/g/{name}", 1)) == b"\1"
    assert await one.is_silent()
    await sender.publish(name, b"new", 1, retain=True)
    got = await one.message()
    assert (got.payload, got.retain) == (b"new", False)


async def test_connected_members_come_first_and_messages_wait_where_there_are_none(
    client: Make, name: str, broker: Broker
) -> None:
    here, away = await client(5).connect(f"{name}-here", **KEPT), await client(5).connect(f"{name}-away", **KEPT)
    sender = await client().connect(f"{name}-s")
    for each in (here, away):
        await each.subscribe((f"$share/g/{name}", 1))
    await away.disconnect()
    key = broker.keys.mqtt(shard_of(f"{name}-away"), "subscriptions")
    while not (await broker.client.execute_command("HGET", key, f"{name}-away")).endswith(b",0]"):
        await asyncio.sleep(0.01)  # the gateway notes that it is away after it has closed the socket
    for number in range(20):
        await sender.publish(name, b"%d" % number)
        assert (await here.message()).payload == b"%d" % number
    await here.disconnect()
    for number in range(20):
        await sender.publish(name, b"%d" % number)
    again = [await client(5).connect(f"{name}-{each}", **KEPT) for each in ("here", "away")]
    got = await collect(again, 20)
    assert sorted(int(each) for found in got for each in found) == list(range(20))
    for number in range(20):  # both are connected again
        await sender.publish(name, b"%d" % number)
    assert all(await collect(again, 20))


async def test_what_a_member_has_not_acknowledged_goes_to_others_when_its_session_ends(
    client: Make, name: str, broker: Broker
) -> None:
    """Not a message of QoS 2 that was on its way to it."""
    leaving = await client(5).connect(f"{name}-l", raw_props=b"\x21\0\2")
    staying = await client(5).connect(f"{name}-s")
    sender = await client().connect(f"{name}-p")
    await leaving.subscribe((f"$share/g/{name}/#", 2), raw_props=b"\x0b\x05")
    for number in range(10):
        await sender.publish(f"{name}/1", b"%d" % number)
    await sender.publish(f"{name}/2", b"never sent", 2)
    out = [await leaving.take(3) for _ in range(2)]
    assert [each.properties[11] for each in out] == [[5], [5]]
    while await counts(broker, [f"{name}-l"]) != [11]:
        await asyncio.sleep(0.01)  # the two topics may be in two partitions, which are routed one after the other
    await staying.subscribe((f"$share/g/{name}/#", 2), raw_props=b"\x0b\x06")
    leaving.abort()
    got = [await staying.take(3) for _ in range(11)]
    assert [each.payload for each in got] == [b"%d" % number for number in range(10)] + [b"never sent"]
    assert {each.properties[11][0] for each in got} == {6}
    staying.send(b"".join(p.ack(4, each.packet_id) for each in got[:-1]))
    staying.send(p.ack(5, got[-1].packet_id))
    staying.send(p.ack(7, (await staying.take(6)).packet_id))

    leaving = await client(5).connect(f"{name}-2")
    await leaving.subscribe((f"$share/h/{name}-2", 2))
    await sender.publish(f"{name}-2", b"its own", 2)
    await leaving.take(3)
    await staying.subscribe((f"$share/h/{name}-2", 2))
    await leaving.disconnect()
    assert await drain(staying) == []


@pytest.mark.parametrize("way", ["disconnects", "starts clean", "comes back"])
@pytest.mark.parametrize("has_others", [True, False])
async def test_what_a_client_has_of_a_share_that_it_has_left_goes_to_others_when_its_session_ends(
    client: Make, broker: Broker, name: str, way: str, has_others: bool
) -> None:
    """Its other subscriptions remain, or it has subscribed to something else since it had none. It may have connected
    again meanwhile."""
    leaving, staying = await client(5).connect(f"{name}-a", **KEPT), await client(5).connect(f"{name}-b")
    await leaving.subscribe((f"$share/g/{name}", 1), *[(f"{name}/other", 1)] * has_others)
    messages = await page(broker, name, 40)
    async with process(broker) as (router, _):
        assert await router.route(messages) is None
    await leave_share(leaving, name)
    if not has_others:
        await leaving.subscribe((f"{name}/other", 1))
    await staying.subscribe((f"$share/g/{name}", 1))
    if way != "disconnects":
        await leaving.disconnect()
        leaving = await client(5).connect(f"{name}-a", **KEPT if way == "comes back" else {})
        assert leaving.connack is not None
        assert leaving.connack.session_present == (way == "comes back")
    if way != "starts clean":
        leaving.send(p.packet(0xE0, b"\0", p.props(5, b"\x11\0\0\0\0")))  # its session ends with it
        await has_ended(broker, f"{name}-a")
    await gets_all(staying, 40)
    await broker.topics.delete(name)


async def test_no_message_of_a_share_is_lost_when_its_gateway_is_killed(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    """Members with clean sessions there; the survivor's member gets what they have not acknowledged.

    What the dead gateway was routing when it was killed may come twice: it is routed again, for other members.
    """
    sender = await client().connect(f"{name}-s")
    staying = await client(5).connect(name)
    await staying.subscribe((f"$share/g/{name}", 1))
    with GatewayProcess(server.url, fleet_prefix, routes={"ingest/#": "ingest"}) as dying:
        members = [await client(5, dying.port).connect(f"{name}-{number}") for number in range(3)]
        for each in members:
            await each.subscribe((f"$share/g/{name}", 1))
        for number in range(30):
            await sender.publish(name, b"%d" % number)
        first = await members[0].message(ack=False)
        dying.kill()
    (got,) = await collect([staying], 30)
    assert {int(each) for each in got} == set(range(30))
    assert first.payload in got


class KilledWriter(InboxWriter):
    """Of a process that is killed when the letters of one client have not left."""

    unsent = ""

    def put(self, devices: Sequence[str], source: str, letter: bytes, receipt: Receipt) -> None:
        super().put([each for each in devices if each != self.unsent], source, letter, receipt)


class SlowWriter(InboxWriter):
    """What it sends waits until it is released."""

    waiting: list[list[LetterBatch]] | None = None

    def submit(self, batches: list[LetterBatch]) -> None:
        if self.waiting is None:
            super().submit(batches)
        else:
            self.waiting.append(batches)

    def release(self) -> None:
        waiting, self.waiting = self.waiting or [], None
        for each in waiting:
            self.submit(each)


@asynccontextmanager
async def process(broker: Broker, unsent: str = "") -> AsyncIterator[tuple[MqttRouter, Shares]]:
    """Parts of a gateway that has just begun. `unsent`: the client whose letters it does not send."""
    client, keys = broker.client, broker.keys
    batcher = ScriptBatcher(client)
    running = asyncio.create_task(batcher.run())
    writer = KilledWriter(batcher, keys, broker.settings, is_cluster=False)
    writer.unsent = unsent
    yield parts(broker, batcher, writer)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def parts(broker: Broker, batcher: ScriptBatcher, writer: InboxWriter) -> tuple[MqttRouter, Shares]:
    """A router and shares that write with these."""
    client, keys = broker.client, broker.keys
    registry, retained = Registry(client, keys, batcher), Retained(client, keys, batcher, 100)
    router = MqttRouter(registry, writer, retained, KeptChoices(keys, batcher), ServerClock().now_ms)
    return router, Shares(client, keys, registry, writer)


@asynccontextmanager
async def slow_process(broker: Broker) -> AsyncIterator[tuple[MqttRouter, Shares, SlowWriter]]:
    """The same; its letters wait until its writer is released."""
    batcher = ScriptBatcher(broker.client)
    running = asyncio.create_task(batcher.run())
    writer = SlowWriter(batcher, broker.keys, broker.settings, is_cluster=False)
    writer.waiting = []
    yield *parts(broker, batcher, writer), writer
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class HeldCall:
    """Calls of a function wait here until they may go on."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self.has_come, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any, **options: Any) -> Any:
        self.has_come.set()
        await self.may_go_on.wait()
        return await self._call(*args, **options)


@asynccontextmanager
async def own_gateway(url: str, prefix: str) -> AsyncIterator[Gateway]:
    """A gateway in this process, whose steps a test can hold."""
    broker = Broker(Settings(url=url, prefix=prefix))
    gateway = Gateway(broker, listen=["mqtt://127.0.0.1:0"], options=GatewayOptions(anonymous=True))
    async with anyio.create_task_group() as tasks:
        await tasks.start(gateway.run)
        yield gateway
        gateway.stop()


async def page(broker: Broker, name: str, count: int, *, topic: str = "", first: int = 0) -> list[Message]:
    """Messages of one client in one partition of a topic that no gateway reads: `topic`, or one of this name."""
    headers, topic = {"mqtt-topic": name, "mqtt-client": "other", "mqtt-qos": "1"}, topic or name
    for number in range(first, first + count):
        await broker.publish(topic, b"%d" % number, key="one", headers=headers)
    layout = await broker.topics.existing(topic)
    return [
        Message(MessageOrigin(topic, partition, "mqtt"), entry_id, fields)
        for partition in layout.numbers
        for entry_id, fields in await broker.client.execute_command(
            "XRANGE", broker.keys.stream(topic, partition), "-", "+"
        )
    ]


async def goes_away_with(member: RawClient, broker: Broker, name: str, messages: list[Message]) -> str:
    """The only member of a share gets these messages, and goes away; its session stays. Returns its epoch."""
    await member.connect(f"{name}-a", **KEPT)
    await member.subscribe((f"$share/g/{name}", 1))
    async with process(broker) as (router, _):
        assert await router.route(messages) is None
    await member.disconnect()
    session = broker.keys.session(f"{name}-a")
    while await broker.client.execute_command("HEXISTS", session, "gateway"):
        await asyncio.sleep(0.01)
    return (await broker.client.execute_command("HGET", session, "epoch")).decode()


async def keys_of(broker: Broker, client_id: str) -> list[bytes]:
    """All keys of a client."""
    return await broker.client.execute_command("KEYS", f"{broker.keys.prefix}:{{{client_id}}}*")


async def leave_share(member: RawClient, name: str) -> None:
    """Unsubscribe while messages may come."""
    member.send(p.unsubscribe([f"$share/g/{name}"], 3, 5))
    while (await member.take()).kind != 11:
        pass


async def counts(broker: Broker, clients: Sequence[str]) -> list[int]:
    """How many letters wait for each client."""
    return [await broker.client.execute_command("ZCARD", broker.keys.inbox(each)) for each in clients]


async def test_a_page_that_is_routed_again_goes_to_the_same_members(client: Make, broker: Broker, name: str) -> None:
    """Its router dies after it has stored the letters. Then one member goes away, and another one comes."""
    clients = [f"{name}-{each}" for each in "abc"]
    first, second, third = [await client(5).connect(each, **KEPT) for each in clients]
    for each in (first, second):
        await each.subscribe((f"$share/g/{name}", 1))
    messages = await page(broker, name, 40)
    async with process(broker) as (one, _):
        assert await one.route(messages) is None
    stored = await counts(broker, clients)
    assert sum(stored) == 40
    assert all(stored[:2])
    await first.disconnect()
    await third.subscribe((f"$share/g/{name}", 1))
    key = broker.keys.mqtt(shard_of(clients[0]), "subscriptions")
    while not (await broker.client.execute_command("HGET", key, clients[0])).endswith(b",0]"):
        await asyncio.sleep(0.01)
    async with process(broker) as (two, _):
        assert await two.route(messages[:15]) is None
        assert await two.route(messages[15:]) is None
    assert await counts(broker, clients) == stored
    await broker.topics.delete(name)


async def test_what_a_killed_router_has_not_stored_is_stored_when_its_member_has_left(
    client: Make, broker: Broker, name: str
) -> None:
    """The other member has later letters of the same page, which must not hide the earlier ones; nothing comes twice,
    also when the page is routed a third time."""
    clients = [f"{name}-{each}" for each in "abc"]
    first, second, third = [await client(5).connect(each, **KEPT) for each in clients]
    for each in (first, second):
        await each.subscribe((f"$share/g/{name}", 1))
    messages = await page(broker, name, 40)
    async with process(broker, unsent=clients[0]) as (one, _):
        assert await one.route(messages) is None
    _, stored, _ = await counts(broker, clients)
    assert 0 < stored < 40
    await leave_share(first, name)
    async with process(broker) as (two, _):
        assert await two.route(messages) is None
    assert await counts(broker, clients) == [0, 40, 0]
    await third.subscribe((f"$share/g/{name}", 1))
    async with process(broker) as (again, _):
        assert await again.route(messages) is None
    assert await counts(broker, clients) == [0, 40, 0]
    await broker.topics.delete(name)


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_message_whose_member_leaves_before_its_letter_is_stored_goes_to_another_one(
    client: Make, broker: Broker, name: str, comes_back: bool
) -> None:
    """The router has chosen the member, and no gateway passes it on: its letter is on its way when the session ends. A
    member that has come back is a new one, which does not get older messages."""
    leaving, staying = [await client(5).connect(f"{name}-{each}") for each in "ab"]
    for each in (leaving, staying):
        await each.subscribe((f"$share/g/{name}", 1))
    messages = await page(broker, name, 40)
    async with slow_process(broker) as (router, _, writer):
        routing = asyncio.create_task(router.route(messages))
        while not router.letters:
            await asyncio.sleep(0.01)
        await leaving.disconnect()
        await has_ended(broker, f"{name}-a")
        if comes_back:
            again = await client(5).connect(f"{name}-a")
            await again.subscribe((f"$share/g/{name}", 1))
        writer.release()
        assert await routing is None
    await gets_all(staying, 40)
    await broker.topics.delete(name)


async def test_what_is_passed_on_to_a_member_that_leaves_goes_to_another_one(
    client: Make, broker: Broker, name: str
) -> None:
    """The letters are on their way to two members when the session of one of them ends."""
    leaving, *clients = [f"{name}-{each}" for each in "abc"]
    gone, first, second = [await client(5).connect(each, **KEPT) for each in (leaving, *clients)]
    await gone.subscribe((f"$share/g/{name}", 1))
    messages = await page(broker, name, 40)
    async with process(broker) as (one, _):
        assert await one.route(messages) is None
    for each in (first, second):
        await each.subscribe((f"$share/g/{name}", 1))
    await leave_share(gone, name)
    async with slow_process(broker) as (_, shares, writer):
        passing = asyncio.create_task(shares.pass_on(leaving))
        while not writer.waiting:
            await asyncio.sleep(0.01)
        first.send(p.packet(0xE0, b"\0", p.props(5, b"\x11\0\0\0\0")))  # its session ends with it
        await has_ended(broker, clients[0])
        writer.release()
        await passing
    await gets_all(second, 40)
    await broker.topics.delete(name)


async def test_what_a_killed_gateway_has_not_passed_on_is_passed_on_when_its_member_has_left(
    client: Make, broker: Broker, name: str
) -> None:
    """The same for what a member that has left leaves behind."""
    leaving, *clients = [f"{name}-{each}" for each in "abc"]
    gone, first, second = [await client(5).connect(each, **KEPT) for each in (leaving, *clients)]
    await gone.subscribe((f"$share/g/{name}", 1))
    messages = await page(broker, name, 40)
    async with process(broker) as (one, _):
        assert await one.route(messages) is None
    assert await counts(broker, [leaving, *clients]) == [40, 0, 0]
    for each in (first, second):
        await each.subscribe((f"$share/g/{name}", 1))
    await leave_share(gone, name)
    async with process(broker, unsent=clients[0]) as (_, shares):
        await shares.pass_on(leaving)
    _, stored = await counts(broker, clients)
    assert 0 < stored < 40
    await leave_share(first, name)
    async with process(broker) as (_, shares):
        await shares.pass_on(leaving)
        await shares.pass_on(leaving)
    seqs = await broker.client.execute_command("ZRANGE", broker.keys.inbox(clients[1]), 0, -1)
    names = [broker.keys.letter(clients[1], int(each)) for each in seqs]
    found = {read_mqtt(each).data for each in await broker.client.execute_command("MGET", *names)}
    assert found == {b"%d" % number for number in range(40)}
    await broker.topics.delete(name)


@pytest.mark.parametrize("moment", ["taken over", "looked through", "begun"])
async def test_a_letter_that_comes_during_a_clean_start_at_another_gateway_goes_to_another_member(
    client: Make, broker: Broker, server_url: str, fleet_prefix: str, name: str, moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A router chooses the member after its new connection has taken the inbox over: its subscriptions are still there.

    Its letters come right then; when they are removed, and what it had not acknowledged was passed on; or when its new
    session has begun.
    """
    member = await client(5).connect(f"{name}-a", **KEPT)
    await member.subscribe((f"$share/g/{name}", 1))
    async with own_gateway(server_url, fleet_prefix) as gateway, slow_process(broker) as (router, _, writer):
        assert gateway.context is not None
        registry = gateway.context.fleet.registry
        removing, beginning = HeldCall(registry.begin), HeldCall(InboxReader.begin)
        monkeypatch.setattr(registry, "begin", removing)
        monkeypatch.setattr(InboxReader, "begin", lambda reader, **options: beginning(reader, **options))
        again = client(5, gateway.ports[0])
        starting = asyncio.create_task(again.connect(f"{name}-a"))
        await removing.has_come.wait()
        messages = await page(broker, name, 40)
        routing = asyncio.create_task(router.route(messages))
        while router.letters < len(messages):
            await asyncio.sleep(0.01)
        staying = await client(5).connect(f"{name}-b", **KEPT)
        await staying.subscribe((f"$share/g/{name}", 1))
        if moment == "taken over":
            writer.release()
            assert await routing is None
        removing.may_go_on.set()
        await beginning.has_come.wait()
        if moment == "looked through":
            writer.release()
            assert await routing is None
        beginning.may_go_on.set()
        await starting
        writer.release()
        assert await routing is None
        await gets_all(staying, 40)
        assert await again.is_silent()
    await broker.topics.delete(name)


@pytest.mark.parametrize("is_buried", [False, True])
@pytest.mark.parametrize("moment", ["taken over", "removed", "passed on"])
async def test_a_clean_start_that_is_cut_off_is_finished_by_the_next_connect(
    client: Make, broker: Broker, server_url: str, fleet_prefix: str, name: str, moment: str, is_buried: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its gateway stands still when it has taken the inbox over, when the subscriptions are removed, or when what was
    left is passed on. The next connect is no clean start. What others have sent to the client meanwhile stays.

    Nor has the new session what was received before: a message of QoS 2 with the same packet id is another one.
    """
    epoch = await goes_away_with(client(5), broker, name, await page(broker, name, 40))
    await broker.client.execute_command("HSET", broker.keys.received(f"{name}-a"), "7", name)
    staying = await client(5).connect(f"{name}-b", **KEPT)
    await staying.subscribe((f"$share/g/{name}", 1), (f"{name}/other", 2))
    async with own_gateway(server_url, fleet_prefix) as gateway:
        assert gateway.context is not None
        fleet, standing = gateway.context.fleet, HeldCall(InboxReader.begin)
        if moment == "taken over":
            standing = HeldCall(fleet.registry.begin)
            monkeypatch.setattr(fleet.registry, "begin", standing)
        elif moment == "removed":
            standing = HeldCall(fleet.shares.pass_on)
            monkeypatch.setattr(fleet.shares, "pass_on", standing)
        else:
            begin = InboxReader.begin

            async def begin_or_wait(reader: InboxReader, **options: Any) -> Any:
                return await (standing if options["clean"] else begin)(reader, **options)

            monkeypatch.setattr(InboxReader, "begin", begin_or_wait)
        cut_off = await client(5, gateway.ports[0]).open()
        cut_off.send(p.connect(f"{name}-a", 5, **{**KEPT, "clean": True}))
        await standing.has_come.wait()
        await broker.send(f"{name}-a", b"sent meanwhile", topic="x")
        if is_buried:
            session = broker.keys.session(f"{name}-a")
            now = (await broker.client.execute_command("HGET", session, "epoch")).decode()
            assert now != epoch
            async with make_sessions(broker, f"{name}-g") as survivor:
                await survivor.closed(Ended(f"{name}-a", now, 60, keeps_will=True, has_shares=True))
        again = await client(5).connect(f"{name}-a", **KEPT)
        assert again.connack is not None
        assert not again.connack.session_present
        standing.may_go_on.set()
        await cut_off.ended()
        assert (await again.message()).payload == b"sent meanwhile"
        await gets_all(staying, 40)
        assert await again.publish(f"{name}/other", b"new", 2, 7) == 0
        assert (await staying.take(3)).payload == b"new"
        assert await again.publish(name, b"it has not subscribed") == 0
        assert (await staying.message()).payload == b"it has not subscribed"
    await broker.topics.delete(name)


async def test_a_letter_that_comes_while_an_expired_session_is_swept_goes_to_another_member(
    client: Make, broker: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member was chosen when no other was there. Its session takes letters until it is swept, and what it had got
    until then is passed on already when this one comes."""
    messages = await page(broker, name, 40)
    epoch = await goes_away_with(client(5), broker, name, messages[:1])
    async with slow_process(broker) as (router, _, writer), make_sessions(broker, f"{name}-g") as sessions:
        routing = asyncio.create_task(router.route(messages[1:]))
        while router.letters < 39:
            await asyncio.sleep(0.01)
        staying = await client(5).connect(f"{name}-b", **KEPT)
        await staying.subscribe((f"$share/g/{name}", 1))
        pass_on = sessions._shares.pass_on

        async def pass_on_before(member: str) -> None:
            await pass_on(member)
            writer.release()
            assert await routing is None

        monkeypatch.setattr(sessions._shares, "pass_on", pass_on_before)
        await sessions.end(f"{name}-a", epoch)
    await gets_all(staying, 40)
    assert await keys_of(broker, f"{name}-a") == []
    await broker.topics.delete(name)


@pytest.mark.parametrize("at_once", [False, True])
async def test_what_a_gateway_was_passing_on_when_it_died_is_passed_on_by_another_one(
    client: Make, broker: Broker, name: str, at_once: bool
) -> None:
    """It has removed the subscriptions of the member, and no more. `at_once`: two survivors end the same session, or
    sweep it, so that one of them finds no subscriptions, and letters that the other one is about to pass on."""
    epoch = await goes_away_with(client(5), broker, name, await page(broker, name, 40))
    staying = await client(5).connect(f"{name}-b", **KEPT)
    await staying.subscribe((f"$share/g/{name}", 1))
    async with make_sessions(broker, f"{name}-g") as one, make_sessions(broker, f"{name}-h") as two:
        if at_once:
            await asyncio.gather(*(each.end(f"{name}-a", epoch) for each in (one, two)))
        else:
            await one._registry.write(f"{name}-a", epoch, ())
            await two.end(f"{name}-a", epoch)
    await gets_all(staying, 40)
    assert await keys_of(broker, f"{name}-a") == []
    await broker.topics.delete(name)


async def test_what_a_member_has_not_acknowledged_goes_to_one_that_has_come_later(
    client: Make, broker: Broker, name: str
) -> None:
    """Its session began after the messages were published, with a clean start: as of a worker that replaces another."""
    leaving = await client(5).connect(f"{name}-a")
    await leaving.subscribe((f"$share/g/{name}", 1))
    messages = await page(broker, name, 40)
    async with process(broker) as (one, _):
        assert await one.route(messages) is None
    staying = await client(5).connect(f"{name}-b")
    await staying.subscribe((f"$share/g/{name}", 1))
    await leaving.disconnect()
    await gets_all(staying, 40)
    await broker.topics.delete(name)


async def test_what_a_member_has_of_several_partitions_goes_to_another_one(
    client: Make, broker: Broker, name: str
) -> None:
    """They are routed one after the other: what stands behind in the inbox was published before."""
    leaving, staying = await client(5).connect(f"{name}-a"), await client(5).connect(f"{name}-b")
    await leaving.subscribe((f"$share/g/{name}", 1))
    early = await page(broker, name, 20, topic=f"{name}-early")
    late = await page(broker, name, 20, topic=f"{name}-late", first=20)
    async with process(broker) as (one, _):
        assert await one.route(late) is None
        assert await one.route(early) is None
    await staying.subscribe((f"$share/g/{name}", 1))
    await leaving.disconnect()
    await gets_all(staying, 40)
    for topic in ("early", "late"):
        await broker.topics.delete(f"{name}-{topic}")


async def acks_some(member: RawClient, chance: random.Random) -> set[bytes]:
    """What has come to a member up to now, as far as it acknowledges that."""
    member.send(p.PING)
    done = set[bytes]()
    while (got := await member.take()).kind != 13:
        if got.kind == 3 and chance.random() < 0.5:
            member.send(p.ack(4, got.packet_id))
            done.add(got.payload)
    return done


async def comes_and_goes(
    client: Make, member: str, share: str, ports: Sequence[int], chance: random.Random
) -> set[bytes]:
    """A member connects and leaves in every way, again and again. Returns what it has acknowledged."""
    done = set[bytes]()
    for turn in range(TURNS):
        is_last = turn == TURNS - 1
        options = {} if is_last or chance.random() < 0.5 else KEPT
        one = await client(5, chance.choice(ports)).connect(member, **options)
        await one.subscribe((share, 1))
        for _ in range(chance.randrange(4)):
            done |= await acks_some(one, chance)
        way = "disconnect" if is_last else chance.choice(["disconnect", "end", "abort", "unsubscribe", "stay"])
        if way == "disconnect":
            one.send(p.DISCONNECT)
        elif way == "end":
            one.send(p.packet(0xE0, b"\0", p.props(5, b"\x11\0\0\0\0")))
        elif way == "abort":
            one.abort()
        elif way == "unsubscribe":
            one.send(p.unsubscribe([share], 3, 5))
    return done


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_message_of_a_share_is_lost_while_its_members_come_and_go(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str, seed: int
) -> None:
    """One member stays. The others connect to two gateways, with clean starts and without, take each other's messages
    over, and acknowledge half of what they get."""
    chance, count = random.Random(seed), 300
    staying, sender = await client(5).connect(f"{name}-s"), await client().connect(f"{name}-p")
    await staying.subscribe((f"$share/g/{name}", 1))

    async def publish() -> None:
        for number in range(count):
            await sender.publish(name, b"%d" % number)

    with GatewayProcess(server.url, fleet_prefix, routes={"ingest/#": "ingest"}) as other:
        ports = (gateway.port, other.port)
        members = [comes_and_goes(client, f"{name}-{n}", f"$share/g/{name}", ports, chance) for n in range(3)]
        _, *done = await asyncio.gather(publish(), *members)
        left = {b"%d" % number for number in range(count)}.difference(*done)
        async with asyncio.timeout(60):
            while left:
                left.difference_update(await drain(staying))
                await asyncio.sleep(0.01)


def members_of(*clients: str) -> dict[str, dict[str, Subscription]]:
    """Members of the share `$share/g/x`."""
    return {"$share/g/x": {each: Subscription("$share/g/x", 1) for each in clients}}


def test_a_choice_stays_until_its_member_has_left() -> None:
    shares = ["$share/g/x"]
    (kept,) = choices_of((), shares, "7", members_of("a", "b", "c"), ())
    assert choices_of([kept], shares, "7", members_of("a", "b", "c", "d"), {kept.member}) == (kept,)
    others = {"a", "b", "c"} - {kept.member}
    (after,) = choices_of([kept], shares, "7", members_of(*others), ())
    assert after.chosen == (kept.member, after.member)
    assert after.member in others
    assert len({each.source("source:&t.0/mqtt") for each in (kept, after, Choice(kept.share, (after.member,)))}) == 2
    assert choices_of([after], ["$share/h/x"], "7", {}, ()) == (after,)  # of a share that has no members any more
    assert read_choices(write_choices([kept, after._replace(share="other")])) == (kept, after._replace(share="other"))


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"a": 1}', b'{"a": []}', b'{"a": [1]}', b"1"])
def test_choices_that_another_client_has_written_are_left_out(raw: bytes) -> None:
    assert read_choices(raw) == ()
