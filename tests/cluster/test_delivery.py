"""The queue on a cluster: its guarantees hold when the partitions are on several nodes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, BrokerError, Message, Reject, RetryPolicy, Settings
from rsmq.control import asking
from rsmq.errors import BrokerUnavailable, SlotMoved
from rsmq.heartbeat.lease import Leases
from rsmq.heartbeat.presence import Presence
from rsmq.inspector import Inspector
from rsmq.model.keys import Keys
from rsmq.model.partition import partition_for
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.preflight import gather, judge
from rsmq.redis.pubsub import listeners
from rsmq.redis.topics import Topics, lookup_topic
from rsmq.redis.wire.slots import slot_of
from tests.cluster.cluster import Cluster
from tests.model.test_keys import ACL
from tests.patience import PATIENCE, until

PARTITIONS = 12


class Record:
    """The messages that handlers received, by key."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = defaultdict(list)
        self.total = 0

    def note(self, key: str | None, number: int) -> None:
        """A message was handled."""
        self.seen[key or ""].append(number)
        self.total += 1

    async def complete(self, expected: dict[str, list[int]], *, is_ordered: bool = True, seconds: float = 30) -> None:
        """Wait until every message was handled at least once; first deliveries must be in order."""

        def first_times() -> dict[str, list[int]]:
            return {key: list(dict.fromkeys(numbers)) for key, numbers in self.seen.items()}

        with anyio.move_on_after(seconds):
            while {key: sorted(numbers) for key, numbers in first_times().items()} != expected:
                await anyio.sleep(0.02)
        never = {key: sorted(set(numbers) - set(self.seen[key])) for key, numbers in expected.items()}
        assert not any(never.values()), f"Never: { {key: numbers for key, numbers in never.items() if numbers} }"
        assert not is_ordered or first_times() == expected, "OutOfOrder"


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """One with more partitions than nodes, not connected yet."""
    return make_broker(partitions=PARTITIONS, command_timeout=timedelta(seconds=2))


def listen(broker: Broker, record: Record, group: str = "g", **options: Any) -> None:
    """Register a handler that records its messages."""

    @broker.handler("t", group=group, **options)
    async def handle(data: dict[str, int], message: Message) -> None:
        await asyncio.sleep(0)
        record.note(message.key, data["n"])


async def publish(broker: Broker, keys: int, each: int) -> dict[str, list[int]]:
    """`each` numbered messages for every key; returns the expected numbers."""
    items = [(f"k{key}", number) for number in range(each) for key in range(keys)]
    await asyncio.gather(*(broker.publish("t", {"n": number}, key=key) for key, number in items))
    return {f"k{key}": list(range(each)) for key in range(keys)}


async def test_messages_of_partitions_on_all_nodes_arrive_in_order(
    broker: Broker, cluster: Cluster, keys: Keys
) -> None:
    """The partitions of a topic are on every master, and the messages of each key are handled once, in order."""
    record, other = Record(), Record()
    listen(broker, record)
    listen(broker, other, "other", distribution="shared", ordering="none")
    async with broker.running():
        expected = await publish(broker, keys=40, each=25)
        await record.complete(expected)
        assert record.total == 1000
        await until(lambda: other.total >= 1000, "the other has 1000")
        assert other.total == 1000
        ids = await broker.publish_many("t", [{"n": 25}] * 40)
        assert len(set(ids)) == 40
    owners = {cluster.owner(keys.stream("t", number)).port for number in range(PARTITIONS)}
    assert owners == {master.port for master in cluster.masters}


async def test_retries_delays_and_dead_letters_work_on_every_node(broker: Broker, keys: Keys) -> None:
    """Failed messages are retried, delayed ones arrive when due, and poison messages become dead letters."""
    record, poisoned = Record(), set[int]()

    @broker.handler("t", group="g", ordering="none", retry=RetryPolicy(max_attempts=2, wait=wait_fixed(0.05)))
    async def handle(data: dict[str, int], message: Message) -> None:
        if data["n"] % 3 == 0 and message.attempt == 1:
            raise ValueError("the first attempt fails")
        if data["n"] % 5 == 0:
            poisoned.add(data["n"])
            raise Reject("poison")
        record.note("", data["n"])

    async with broker.running():
        for number in range(60):
            await broker.publish("t", {"n": number}, delay=timedelta(milliseconds=200) if number % 2 else None)
        await record.complete({"": [number for number in range(60) if number % 5]}, is_ordered=False)
        topic = await lookup_topic(broker.topics, "t")
        with anyio.fail_after(20):
            while await broker.dead_letters.count(topic, "g") < 12:
                await anyio.sleep(0.02)
        assert len([letter async for letter in broker.dead_letters.iterate(topic, "g")]) == 12
        assert await broker.dead_letters.purge(topic, "g") == 12
    assert poisoned == set(range(0, 60, 5))


async def test_message_id_published_twice_is_stored_once_on_a_cluster(
    broker: Broker, cluster: Cluster, keys: Keys
) -> None:
    """This also holds when its slot has moved between the two calls."""
    async with broker:
        await broker.publish("t", {"n": 1}, key="k", message_id="m-1")
        partition = partition_for("k", PARTITIONS)
        cluster.migrate(keys.stream("t", partition))
        await broker.publish("t", {"n": 1}, key="k", message_id="m-1")
        assert await broker.client.execute_command("XLEN", keys.stream("t", partition)) == 1


async def test_publish_on_a_cluster_waits_for_replicas(broker: Broker) -> None:
    """Each message waits for replicas of its node; an error says when there are too few."""
    async with broker:
        for number in range(12):
            await broker.publish("t", {"n": number}, wait_replicas=1)
        with pytest.raises(BrokerError, match="only 1 of 2 replicas"):
            await broker.publish("t", {"n": 12}, wait_replicas=2)


async def test_publish_to_a_moving_slot_waits(broker: Broker, cluster: Cluster, keys: Keys) -> None:
    """A slot between two nodes delays only its own partition; no message is lost or doubled, also of a transaction."""
    async with broker:
        partition = partition_for("k", PARTITIONS)
        stream = keys.stream("t", partition)
        await broker.publish("t", {"n": 0}, key="k", message_id="m-0")
        async with anyio.create_task_group() as tasks:
            with cluster.moving(stream):
                tasks.start_soon(lambda: broker.publish("t", {"n": 1}, key="k"))
                tasks.start_soon(lambda: broker.publish("t", {"n": 2}, key="k", message_id="m-2"))
                tasks.start_soon(lambda: broker.publish_many("t", [{"n": 3}, {"n": 4}], key=lambda _: "k"))
                await broker.publish_many("t", [{"n": n} for n in range(100)], key=lambda item: other(item, partition))
        rows = await broker.client.execute_command("XRANGE", stream, "-", "+")
        assert [fields[1] for _, fields in rows] == [b'{"n":%d}' % n for n in range(5)]


async def test_publish_to_a_slot_that_moves_for_too_long_says_that_nothing_was_stored(
    cluster: Cluster, prefix: str, keys: Keys
) -> None:
    """The error names the slot, and what to look at; the next publish works when the slot has moved."""
    stream = keys.stream("t", partition_for("k", PARTITIONS))
    async with Broker(
        Settings(url=cluster.url, prefix=prefix, partitions=PARTITIONS, unavailable_timeout="100ms")
    ) as broker:
        await broker.publish("t", 0, key="k")
        expected = rf"slot {slot_of(stream)} .* Nothing was stored: publish it"
        with cluster.moving(stream), pytest.raises(BrokerUnavailable, match=expected):
            await broker.publish("t", 1, key="k")
        await broker.publish("t", 2, key="k")
        rows = await broker.client.execute_command("XRANGE", stream, "-", "+")
    assert [fields[1] for _, fields in rows] == [b"0", b"2"]


async def test_a_message_goes_to_its_new_node_when_another_task_learns_of_that(
    broker: Broker, cluster: Cluster, keys: Keys
) -> None:
    """Its slot has moved when it is published. A reader finds that out before the sender that was woken for it runs."""
    stream = keys.stream("elsewhere", partition_for("k", PARTITIONS))
    async with broker:
        await broker.publish("elsewhere", 0, key="k")
        before = broker.client.node_for(stream)
        target = cluster.migrate(stream)
        publishing = asyncio.create_task(broker.publish("elsewhere", 1, key="k"))
        await asyncio.sleep(0)
        before.note_error(SlotMoved(slot_of(stream), ("127.0.0.1", target.port), is_ask=False))
        with anyio.fail_after(PATIENCE):
            await publishing
        assert await broker.client.execute_command("XLEN", stream) == 2


def other(item: dict[str, int], partition: int) -> str:
    """A key that goes into another partition."""
    return next(key for at in range(1000) if partition_for(key := f"{item['n']}-{at}", PARTITIONS) != partition)


async def test_inspector_on_a_cluster_sees_all_nodes(
    broker: Broker, client: Client, keys: Keys, settings: Settings
) -> None:
    """It sees every partition, member and lease; deleting a topic removes its keys from every node."""
    record, inspector = Record(), Inspector(client, keys, settings)
    listen(broker, record)
    async with broker.running():
        await record.complete(await publish(broker, keys=20, each=5))
        with anyio.fail_after(20):
            while (state := await inspector.group("t", "g")) is None or state.unread or state.pending:
                await anyio.sleep(0.05)
        (member,) = await inspector.members("t", "g")
        assert (member.is_present, member.partitions) == (True, tuple(range(PARTITIONS)))
        assert sum(part.length for part in (await inspector.topics())[0].partitions) == 100
        report = await inspector.server()
        assert not report.is_refused
        assert {finding.topic for finding in report.findings} >= {"server", "eviction", "persistence"}
        await broker.pause_group("t", "g")
        await broker.publish("t", {"n": 99}, key="k0", message_id="m")
        await broker.reset_group("t", "g", "latest")
        await broker.resume_group("t", "g")
    await Topics(client, keys, settings).delete("t")
    for node in client.nodes:
        assert (await node.execute_command("SCAN", 0, "MATCH", f"{keys.prefix}:*", "COUNT", 10_000))[1] == []


async def test_preflight_on_a_cluster_checks_every_master(client: Client, cluster: Cluster, keys: Keys) -> None:
    """One master that would lose messages is enough to refuse; the message names it."""
    culprit = cluster.masters[1]
    culprit.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        refused = [finding for finding in judge(await gather(client, keys)) if finding.level == "refuse"]
    finally:
        culprit.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert len(refused) == 1
    assert f"127.0.0.1:{culprit.port}" in refused[0].text
    assert "allkeys-lru" in refused[0].text


async def test_presence_follows_its_moving_slot(
    connector: Connector, client: Client, cluster: Cluster, keys: Keys, settings: Settings
) -> None:
    """Every node counts the subscriber, also after the slot of the channel has moved."""
    absent = list[float]()
    presence = Presence(connector, settings, keys, "m", lambda _: None, lambda: absent.append(1.0))
    presence.start()

    async def is_seen(count: int) -> None:
        with anyio.fail_after(20):
            while await listeners(client, [keys.presence("m"), keys.presence("silent")]) != [count, 0]:
                await anyio.sleep(0.02)

    try:
        await is_seen(1)
        cluster.migrate(keys.presence("m"))
        await is_seen(1)
    finally:
        presence.stop()
    await is_seen(0)
    assert not absent


async def test_new_owner_on_a_cluster_cuts_off_the_last_reader(client: Client, keys: Keys, settings: Settings) -> None:
    """The blocked read on the node of the partition receives no more messages."""
    for partition in range(3):
        wire = RawConnection(client.node_for(keys.lease("t", partition, "g")))
        await wire.open()
        reader = f"{wire.client_id} {wire.address}"
        assert await Leases(client, keys, settings, "old").take("t", partition, "g", reader=reader) is not None
        new = Leases(client, keys, settings, "new")
        assert await new.take("t", partition, "g", reader="") is None
        assert await new.take("t", partition, "g", reader="", absent={"old"}) is not None
        with pytest.raises(BrokerUnavailable):
            await wire.exchange([pack(("PING",))])


async def test_user_with_the_documented_acl_works_on_a_cluster(cluster: Cluster, prefix: str) -> None:
    """A user created on every node as docs/keys.md says publishes, handles and passes the preflight."""
    rules = ACL.replace("rsmq:", f"{prefix}:").split()
    for member in cluster.members:
        member.ask("ACL", "SETUSER", f"u-{prefix}", "on", ">secret", *rules[rules.index("resetkeys") :])
    record = Record()
    broker = Broker(Settings(url=cluster.url.replace("://", f"://u-{prefix}:secret@"), prefix=prefix))
    listen(broker, record)
    async with broker.running():
        await record.complete(await publish(broker, keys=10, each=5))
    for member in cluster.members:
        member.ask("ACL", "DELUSER", f"u-{prefix}")


async def test_member_of_a_cluster_says_what_its_message_waits_for(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question reaches it from any node, and the answer is in a slot of its own."""
    monkeypatch.setattr(asking, "ANSWER_SECONDS", PATIENCE)
    gate, runs = anyio.Event(), anyio.Event()

    @broker.handler("t", group="g", concurrency=1, tenant=lambda message: message.headers["tenant"])
    async def handle(_order: dict[str, int]) -> None:
        runs.set()
        await gate.wait()

    async with broker.running():
        refs = [await broker.publish("t", {"n": n}, key="k", headers={"tenant": "acme"}) for n in range(2)]
        await runs.wait()
        others = [await broker.publish("t", {"n": n}, headers={"tenant": "zeta"}) for n in range(4)]
        found = list[tuple[str, str | None]]()

        async def is_seen() -> bool:
            statuses = [(await broker.look(ref)).group("g") for ref in (*refs, *others)]
            found[:] = [(each.state, each.tenant) for each in statuses if each is not None]
            return len(found) == 6 and "unread" not in dict(found)

        await until(is_seen, "the worker has them")
        gate.set()
    assert found[:2] == [("running", None), ("waiting_for_key", None)]
    assert found[2:] == [("waiting_for_turn", "zeta")] * 4
