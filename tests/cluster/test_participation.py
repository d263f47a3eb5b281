"""A member that cannot read or settle at a node of a cluster leaves its partitions to others, and keeps the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Self

import pytest

from rsmq.broker.broker import Broker
from rsmq.inspector.inspector import Inspector
from rsmq.model.settings import Settings
from rsmq.redis.wire.slots import slot_of
from rsmq.telemetry.health import HealthLimits, WorkerProbe, troubles
from rsmq.testing.proxy import Proxy
from tests.cluster.cluster import Cluster, Member
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

LEASE = timedelta(seconds=1)
PARTITIONS = 6
TOPIC = "rights"
"""Its partitions are spread over the masters as long as no other test moves their slots."""


def make(cluster: Cluster, prefix: str, done: Counter[int], user: str = "") -> Broker:
    """A broker with one handler that counts how often each message is handled."""
    url = cluster.url.replace("//", f"//{user}:secret@") if user else cluster.url
    settings = Settings(
        url=url, prefix=prefix, partitions=PARTITIONS, lease_ttl=LEASE, preflight="warn", presence_grace=LEASE
    )
    broker = Broker(settings=settings)

    @broker.handler(TOPIC, group="g")
    async def handle(number: int) -> None:
        done[number] += 1

    return broker


@asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[None]:
    """Run its worker, from the start on."""
    async with broker:
        task = asyncio.create_task(broker.run())
        try:
            yield
        finally:
            broker.stop(timedelta(0))
            await task


@contextmanager
def user_on(cluster: Cluster, name: str) -> Iterator[None]:
    """A user who may do everything at every node."""
    for member in cluster.members:
        member.ask("ACL", "SETUSER", name, "on", ">secret", "~*", "&*", "+@all")
    try:
        yield
    finally:
        for member in cluster.members:
            member.ask("ACL", "DELUSER", name)


def held(broker: Broker) -> set[int]:
    """The partitions that it has."""
    return {number for each in broker.worker.consumers for number in each.lanes} if broker.worker else set()


def reasons(broker: Broker) -> str:
    """What /readyz says."""
    return "\n".join(troubles(WorkerProbe(broker).read(), HealthLimits.of(broker.settings), "ready"))


async def unreadable(asking: Broker, of: Broker) -> tuple[int, ...]:
    """The partitions that a member cannot read or settle, as `rsmq member list` and the doctor see it."""
    assert of.worker is not None
    members = await Inspector(asking.client, asking.keys, asking.settings).members(TOPIC, "g")
    return next(each.unreadable for each in members if each.id == of.worker.member)


def one_node(cluster: Cluster, broker: Broker, of: set[int]) -> tuple[Member, set[int]]:
    """A master that serves some of these partitions, but not the records of the group; and all partitions there."""
    keys = broker.keys
    owners = {number: cluster.owner(keys.stream(TOPIC, number)) for number in range(PARTITIONS)}
    group = cluster.owner(keys.members(TOPIC, "g"))
    node = next(owner for number, owner in owners.items() if number in of and owner is not group)
    return node, {number for number, owner in owners.items() if owner is node}


class Refusal(Proxy):
    """Before one node. It can close the connections of one user as soon as they say who they are."""

    def __init__(self, cluster: Cluster, node: Member, user: str) -> None:
        super().__init__(node.port)
        self.cluster = cluster
        self._node, self._user = node, user.encode()
        self._ends = set[asyncio.StreamWriter]()
        self._refuses = False

    def refuse(self) -> None:
        """Break what the user has, and let nothing new of it pass."""
        self._refuses = True
        for end in self._ends:
            end.transport.abort()

    def allow(self) -> None:
        """All pass again."""
        self._refuses = False

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        first = await reader.read(1 << 16)
        is_user = self._user in first
        if is_user and self._refuses:
            return
        if is_user:
            self._ends.add(writer)
        far_writer.write(first)
        await super()._pass(reader, writer, far_reader, far_writer)

    async def __aenter__(self) -> Self:
        """The cluster names its port in place of the node's."""
        await super().__aenter__()
        self._node.ask("CONFIG", "SET", "cluster-announce-port", self.port)
        await self._is_announced(self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._node.ask("CONFIG", "SET", "cluster-announce-port", 0)
        await self._is_announced(self._node.port)
        await super().__aexit__(*error)

    async def _is_announced(self, port: int) -> None:
        def sees(member: Member) -> bool:
            return any(where[1] == port for _, _, *nodes in member.ask("CLUSTER", "SLOTS") for where in nodes)

        members = [member for member in self.cluster.members if member.is_running]
        await until(lambda: all(map(sees, members)), "all nodes name the port")


def owners_now(cluster: Cluster) -> Callable[[str], Member]:
    """Which master serves a key, as long as no slot moves; also while other ports are announced."""
    ports = {member.port: member for member in cluster.members}
    ranges = [(first, last, ports[where[1]]) for first, last, where, *_ in cluster.masters[0].ask("CLUSTER", "SLOTS")]
    return lambda key: next(member for first, last, member in ranges if first <= slot_of(key) <= last)


async def handles_all(broker: Broker, done: Counter[int]) -> None:
    """Messages into all partitions are handled."""
    numbers = range(len(done), len(done) + 40)
    for number in numbers:
        await broker.publish(TOPIC, number, key=str(number))
    await until(lambda: done.keys() >= set(numbers), "all are handled")


async def test_member_that_may_not_read_at_a_node_keeps_the_others(cluster: Cluster, prefix: str) -> None:
    """After a lease the other member has that node's partitions, and it takes its share again when it may read."""
    done, everything = Counter[int](), set(range(PARTITIONS))
    with user_on(cluster, "half"):
        healthy, half = make(cluster, prefix, done), make(cluster, prefix, done, "half")
        async with running(healthy), running(half):
            await until(lambda: len(held(healthy)) == len(held(half)) == PARTITIONS // 2, "each has its share")
            node, there = one_node(cluster, half, held(half))
            node.ask("ACL", "SETUSER", "half", "-xreadgroup")
            await until(lambda: held(healthy) >= there, "the other member has the partitions of the node")
            await until(lambda: held(healthy) | held(half) == everything, "each has an owner")
            assert held(half), "it keeps what it can read"
            assert "cannot be read" in reasons(half)
            assert await unreadable(healthy, half) == tuple(sorted(there))
            await handles_all(healthy, done)
            node.ask("ACL", "SETUSER", "half", "+xreadgroup")
            await until(lambda: len(held(healthy)) == len(held(half)) == PARTITIONS // 2, "each has its share again")
            await until(lambda: not reasons(half), "it is ready again")


async def test_member_that_may_not_settle_at_a_node_keeps_the_others(cluster: Cluster, prefix: str) -> None:
    """It reads there, but may run no script: after a lease the other member has the partitions, until it may."""
    done, everything = Counter[int](), set(range(PARTITIONS))
    with user_on(cluster, "half"):
        healthy, half = make(cluster, prefix, done), make(cluster, prefix, done, "half")
        async with running(healthy), running(half):
            await until(lambda: len(held(healthy)) == len(held(half)) == PARTITIONS // 2, "each has its share")
            node, there = one_node(cluster, half, held(half))
            node.ask("ACL", "SETUSER", "half", "-evalsha", "-eval")
            await until(lambda: held(healthy) >= there, "the other member has the partitions of the node")
            await until(lambda: held(healthy) | held(half) == everything, "each has an owner")
            assert held(half), "it keeps what it can settle"
            assert await unreadable(healthy, half) == tuple(sorted(there))
            await handles_all(healthy, done)
            node.ask("ACL", "SETUSER", "half", "+evalsha", "+eval")
            await until(lambda: len(held(healthy)) == len(held(half)) == PARTITIONS // 2, "each has its share again")
            await until(lambda: not reasons(half), "it is ready again")
            await handles_all(healthy, done)


async def test_member_that_cannot_settle_at_a_node_is_given_nothing_there(cluster: Cluster, prefix: str) -> None:
    """It joins with the rest: the node's partitions stay with their owner, under the same epochs."""
    done = Counter[int]()
    with user_on(cluster, "half"):
        healthy, half = make(cluster, prefix, done), make(cluster, prefix, done, "half")
        async with running(healthy):
            await until(lambda: len(held(healthy)) == PARTITIONS, "it has all partitions")
            assert healthy.worker is not None
            node, there = one_node(cluster, healthy, held(healthy))
            epochs = {number: healthy.worker.consumers[0].lanes[number].epoch for number in there}
            node.ask("ACL", "SETUSER", "half", "-evalsha", "-eval")
            async with running(half):
                await until(lambda: len(held(half)) == PARTITIONS // 2, "it has its share of the other nodes")
                lanes = healthy.worker.consumers[0].lanes
                assert {number: lanes[number].epoch for number in there} == epochs
                node.ask("ACL", "SETUSER", "half", "+evalsha", "+eval")
                await until(lambda: not reasons(half), "it is ready")
                await handles_all(healthy, done)


async def test_member_that_cannot_read_at_a_node_is_given_nothing_there(cluster: Cluster, prefix: str) -> None:
    """It joins with what it can read; meanwhile the other member keeps the rest, and hands over no partition of it."""
    done = Counter[int]()
    with user_on(cluster, "half"):
        healthy, half = make(cluster, prefix, done), make(cluster, prefix, done, "half")
        async with running(healthy):
            await until(lambda: len(held(healthy)) == PARTITIONS, "it has all partitions")
            assert healthy.worker is not None
            node, there = one_node(cluster, healthy, held(healthy))
            epochs = {number: healthy.worker.consumers[0].lanes[number].epoch for number in there}
            node.ask("ACL", "SETUSER", "half", "-xreadgroup")
            async with running(half):
                await until(lambda: len(held(half)) == PARTITIONS // 2, "it has its share of the other nodes")
                await handles_all(healthy, done)
                lanes = healthy.worker.consumers[0].lanes
                assert {number: lanes[number].epoch for number in there} == epochs
                node.ask("ACL", "SETUSER", "half", "+xreadgroup")
                await until(lambda: not reasons(half), "it is ready")
                await handles_all(healthy, done)


async def test_member_that_does_not_reach_a_node_leaves_its_partitions(cluster: Cluster, prefix: str) -> None:
    """Its heartbeat fails there as well: it tells the others by the node that has the records of the group."""
    done = Counter[int]()
    with user_on(cluster, "half"):
        healthy, half = make(cluster, prefix, done), make(cluster, prefix, done, "half")
        owner = owners_now(cluster)
        async with AsyncExitStack() as stack:
            paths = {node: await stack.enter_async_context(Refusal(cluster, node, "half")) for node in cluster.masters}
            await stack.enter_async_context(running(half))
            await until(lambda: len(held(half)) == PARTITIONS, "it has all partitions")
            assert half.worker is not None
            busy = (owner(half.keys.members(TOPIC, "g")), owner(half.keys.presence(half.worker.member)))
            owners = {number: owner(half.keys.stream(TOPIC, number)) for number in range(PARTITIONS)}
            node = next(each for each in owners.values() if each not in busy)
            there = {number for number, each in owners.items() if each is node}
            path = paths[node]
            path.refuse()
            async with running(healthy):
                await until(lambda: held(healthy) >= there, "the other member has the partitions of the node")
                await handles_all(healthy, done)
                path.allow()
                await until(lambda: not reasons(half), "it is ready again")
                await until(lambda: len(held(healthy)) == len(held(half)) == PARTITIONS // 2, "each has its share")
                await handles_all(healthy, done)


async def test_member_keeps_the_partitions_that_no_member_can_read(cluster: Cluster, prefix: str) -> None:
    """A node that is away for all costs no member a partition of the other nodes, and all goes on when it is back."""
    done = Counter[int]()
    with user_on(cluster, "half"):
        one, other = (make(cluster, prefix, done, "half") for _ in range(2))
        async with running(one), running(other):
            await until(lambda: len(held(one)) == len(held(other)) == PARTITIONS // 2, "each has its share")
            node, there = one_node(cluster, one, held(one) | held(other))
            node.ask("ACL", "SETUSER", "half", "-xreadgroup")
            for broker in (one, other):
                await until(lambda broker=broker: "cannot be read" in reasons(broker), "it says so")  # type: ignore[misc]
            rest = set(range(PARTITIONS)) - there
            await until(lambda: held(one) | held(other) >= rest, "the others are held")
            node.ask("ACL", "SETUSER", "half", "+xreadgroup")
            await until(lambda: not reasons(one) and not reasons(other), "both are ready")
            await handles_all(one, done)
            await until(lambda: len(held(one)) == len(held(other)) == PARTITIONS // 2, "each has its share")
