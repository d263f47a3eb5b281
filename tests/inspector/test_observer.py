"""Snapshots of a real server: their numbers, their cost, and values that another client may have written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, Reject, Retry, Settings
from rsmq.errors import ConfigError
from rsmq.inspector.observer import Observer
from rsmq.inspector.state import GroupPartition, Snapshot, member_state
from rsmq.inspector.trend import compare
from rsmq.model.keys import Keys
from rsmq.model.work import Work
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics
from tests.inspector.states import PART, group_of
from tests.patience import PATIENCE, until


class Counting:
    """A client that counts what goes through it, and how large the answers are."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.commands = 0
        self.exchanges = 0
        self.largest = 0

    async def execute_command(self, *command: Any) -> Any:
        self.commands += 1
        self.exchanges += 1
        return await self._client.execute_command(*command)

    async def pipelined(self, commands: list[Any]) -> list[Any]:
        self.commands += len(commands)
        self.exchanges += 1
        replies = await self._client.pipelined(commands)
        self.largest = max(self.largest, *(len(repr(reply)) for reply in replies), 0) if replies else self.largest
        return replies


@pytest.fixture
def observer(client: Client, keys: Keys, settings: Settings) -> Observer:
    """What is tested."""
    return Observer(client, keys, settings)


async def test_snapshot_without_topics_is_empty(
    observer: Observer, client: Client, keys: Keys, settings: Settings
) -> None:
    """No topic, a topic without streams, and one that does not exist."""
    assert (await observer.snapshot()).topics == ()
    assert (await observer.snapshot(["nothing"])).topics == ()
    await Topics(client, keys, settings).ensure("orders", 2)
    (topic,) = (await observer.snapshot()).topics
    assert [(each.added, each.length, each.delayed) for each in topic.partitions] == [(0, 0, 0), (0, 0, 0)]


def serve(broker: Broker, partitions: int, started: anyio.Event, go: anyio.Event) -> None:
    """A handler: the first message is parked, the second becomes a dead letter, the others run until `go`."""

    @broker.handler("orders", group="billing", partitions=partitions, ordering="none")
    async def bill(order: dict[str, int]) -> None:
        if order["n"] == 1:
            raise Retry(after=timedelta(hours=1))
        if order["n"] == 2:
            raise Reject("no")
        started.set()
        await go.wait()


async def publish_each(broker: Broker) -> None:
    """A message for each of these ends, and a delayed one."""
    await broker.publish_many("orders", [{"n": n} for n in (1, 2, 3)])
    await broker.publish("orders", {"n": 9}, delay=timedelta(hours=1))


async def test_snapshot_counts_messages_where_they_are(observer: Observer, settings: Settings) -> None:
    """In flight, parked, dead, delayed and undelivered messages are counted, with owner, member and age."""
    broker, go, started = Broker(settings), anyio.Event(), anyio.Event()
    serve(broker, 1, started, go)
    async with broker.running():
        await publish_each(broker)
        with anyio.fail_after(PATIENCE):
            await started.wait()
            while True:
                seen = await observer.snapshot()
                (topic,), (group,), (member,) = seen.topics, seen.groups, seen.members
                (share,) = group.shares
                if share.pending == share.waiting_for_retry == share.dead_letters == 1 and member.loop_lag is not None:
                    break
                await anyio.sleep(0.02)
        assert broker.worker is not None
        assert share.pending_of == {broker.worker.member: 1}
        assert share.owner == member.id == broker.worker.member
        assert (share.unread, share.read) == (0, 3)
        assert share.oldest is not None
        assert timedelta(0) <= share.oldest < timedelta(minutes=5)
        assert (topic.partitions[0].added, topic.partitions[0].delayed) == (3, 1)
        assert (member.handler, member.concurrency) == ("bill", 64)
        assert member.heard_ago is not None
        go.set()
    (group,) = (await observer.snapshot()).groups
    assert (group.members, group.shares[0].owner) == ((), "")


@pytest.mark.parametrize("count", [1, 4])
async def test_snapshot_costs_a_few_numbers_a_partition(
    client: Client, keys: Keys, settings: Settings, count: int
) -> None:
    """1 + topics + partitions + groups + partitions of each group, in four exchanges; however many messages, however
    large, wait there."""
    partitions = 3
    for number in range(count):
        await Topics(client, keys, settings).ensure(f"t{number}", partitions)
        for partition in range(partitions):
            stream = keys.stream(f"t{number}", partition)
            for group in ("a", "b"):
                await client.execute_command("XGROUP", "CREATE", stream, group, "0", "MKSTREAM")
            for _ in range(5):
                await client.execute_command("XADD", stream, "*", "data", b"x" * 100_000)
            await client.execute_command("XREADGROUP", "GROUP", "a", "m", "COUNT", 2, "STREAMS", stream, ">")
    counting = Counting(client)
    snapshot = await Observer(counting, keys, settings).snapshot()  # type: ignore[arg-type]
    assert counting.commands == 1 + count + count * partitions + 2 * count + 2 * count * partitions
    assert counting.exchanges == 4
    assert counting.largest < 1000
    assert [share.pending for share in snapshot.groups[0].shares] == [2] * partitions
    assert [share.unread for share in snapshot.groups[1].shares] == [5] * partitions


async def test_snapshot_changes_nothing(observer: Observer, client: Client, keys: Keys, settings: Settings) -> None:
    """It creates no key and moves no group."""
    async with Broker(settings) as broker:
        await broker.publish("orders", {"n": 1})
    stream = keys.stream("orders", 0)
    await client.execute_command("XGROUP", "CREATE", stream, "a", "0", "MKSTREAM")
    before = sorted(await client.execute_command("KEYS", f"{keys.prefix}:*"))
    await observer.snapshot()
    assert sorted(await client.execute_command("KEYS", f"{keys.prefix}:*")) == before


async def test_oldest_includes_parked_messages(observer: Observer, client: Client, keys: Keys) -> None:
    """A parked message may be older than anything pending; a reset group does not know its lag."""
    await client.execute_command("SADD", keys.topics, "orders")
    await client.execute_command("HSET", keys.topic("orders"), "partitions", 1)
    stream = keys.stream("orders", 0)
    seconds, _ = await client.execute_command("TIME")
    ids = [f"{(int(seconds) - age) * 1000}-0" for age in (400, 300, 200, 100)]
    for entry in ids:
        await client.execute_command("XADD", stream, entry, "data", "x")
    await client.execute_command("XGROUP", "CREATE", stream, "a", ids[2])

    async def age() -> float:
        (share,) = (await observer.snapshot()).groups[0].shares
        assert share.oldest is not None
        return share.oldest.total_seconds()

    assert 90 < await age() < 199
    await client.execute_command("ZADD", keys.retry("orders", 0, "a"), 1, f"{ids[1]}|1")
    assert 290 < await age() < 399
    (share,) = (await observer.snapshot()).groups[0].shares
    assert (share.unread, share.is_unread_exact, share.read) == (4, False, None)
    assert share.oldest_in_stream is not None
    assert 90 < share.oldest_in_stream.total_seconds() < 199


@pytest.mark.parametrize("has_scripts", [True, False])
async def test_message_that_is_past_the_time_it_waits_for_is_overdue(
    client: Client, keys: Keys, settings: Settings, has_scripts: bool
) -> None:
    """One that is not due, was named to its owner, or is due since an unknown moment, is not."""
    await client.execute_command("SADD", keys.topics, "orders")
    await client.execute_command("HSET", keys.topic("orders"), "partitions", 1)
    await client.execute_command("XGROUP", "CREATE", keys.stream("orders", 0), "a", "0", "MKSTREAM")
    seconds, _ = await client.execute_command("TIME")
    waits = keys.waits("orders", 0, "a")
    asking = client if has_scripts else WithoutScripts(client)

    async def overdue() -> timedelta | None:
        (group,) = (await Observer(asking, keys, settings).snapshot()).groups  # type: ignore[arg-type]
        return group.overdue

    assert await overdue() is None
    for at, due in enumerate(("0", "-1", "1", "2", str((int(seconds) + 900) * 1000))):
        await client.execute_command("ZADD", waits, due, f"{at}-1")
    assert await overdue() is None
    await client.execute_command("ZADD", waits, f"{(int(seconds) - 90) * 1000}.5", "7-1")
    late = await overdue()
    assert late is not None
    assert 89 < late.total_seconds() < 199


def test_foreign_member_is_shown() -> None:
    """Another client may write anything under these keys: it is not an error."""
    for info, vitals in (
        (b"", b""),
        (b"[1]", b"[]"),
        (b"\xff", b"{"),
        (b'{"concurrency":"x"}', b'{"loop_lag_ms":"x"}'),
        (b"{}", b'{"loop_lag_ms":NaN}'),
        (b"{}", b'{"loop_lag_ms":1e300}'),
    ):
        state = member_state(group_of(PART), (b"\xff", info, -2, vitals), timedelta(seconds=6))
        assert (state.concurrency, state.heard_ago, state.loop_lag) == (0, None, None)


@pytest.mark.parametrize(
    ("info", "left_ms", "vitals", "has_told"),
    [
        (b"{}", 5000, b'{"loop_lag_ms":1}', True),
        (b"{}", 5000, b"", False),  # an older version, or a server without memory for it
        (b"{}", 2900, b'{"loop_lag_ms":1}', False),  # two beats were missed
        (b'{"lease_ttl_ms":2000}', 1500, b'{"loop_lag_ms":1}', True),  # its own lease is shorter
        (b'{"lease_ttl_ms":2000}', 900, b'{"loop_lag_ms":1}', False),
        (b"{}", -2, b'{"loop_lag_ms":1}', False),
    ],
)
def test_member_tells_what_its_messages_do_within_two_beats(
    info: bytes, left_ms: int, vitals: bytes, has_told: bool
) -> None:
    """What is older says nothing of now; the age is by the lease of the member itself."""
    state = member_state(group_of(PART), (b"w1", info, left_ms, vitals), timedelta(seconds=6))
    assert state.has_told == has_told


class WithoutScripts(Counting):
    """A client whose user may run no script."""

    async def pipelined(self, commands: list[Any]) -> list[Any]:
        if any(command[0] == "EVAL" for command in commands):
            return [ConfigError("the server's ACL does not allow this")] * len(commands)
        return await super().pipelined(commands)


async def test_message_that_is_parked_and_pending_counts_once(client: Client, keys: Keys, settings: Settings) -> None:
    """With key order a failed message stays pending until its retry starts; without, it is only parked."""
    await Topics(client, keys, settings).ensure("orders", 1)
    stream, retry = keys.stream("orders", 0), keys.retry("orders", 0, "billing")
    ids = [await client.execute_command("XADD", stream, "*", "data", "1") for _ in range(3)]
    await client.execute_command("XGROUP", "CREATE", stream, "billing", "0")
    await client.execute_command("XREADGROUP", "GROUP", "billing", "w1", "STREAMS", stream, ">")
    await client.execute_command("XACK", stream, "billing", ids[0])
    await client.execute_command("ZADD", retry, 1, ids[0] + b"|1", 2, ids[1] + b"|1")
    seen = await steady(client, keys, settings)
    (state,), (group,) = seen.groups, compare(None, seen).groups
    assert (state.pending, state.waiting_for_retry, state.pending_for_retry) == (2, 2, 1)
    assert (group.work, group.backlog) == (Work(ready=1, waiting_for_retry=2), 3)
    assert await steady(WithoutScripts(client), keys, settings) == seen
    await client.execute_command("ZADD", retry, 3, b"no message")
    assert await steady(WithoutScripts(client), keys, settings) == await steady(client, keys, settings)


async def test_plain_commands_answer_as_the_scripts(client: Client, keys: Keys, settings: Settings) -> None:
    """A user without scripts sees the same snapshot: partitions, groups, leases, parked messages and members."""
    broker, go, started = Broker(settings), anyio.Event(), anyio.Event()
    serve(broker, 3, started, go)
    async with broker.running():
        await publish_each(broker)
        await client.execute_command("XGROUP", "CREATE", keys.stream("orders", 0), "late", "0")
        await client.execute_command("XGROUP", "CREATE", keys.stream("orders", 1), "reset", "$")
        await client.execute_command("SADD", keys.members("orders", "late"), b"\xff gone")
        await Topics(client, keys, settings).ensure("empty", 2)

        async def have_ended() -> bool:
            groups = (await steady(client, keys, settings)).groups
            return started.is_set() and sum(group.waiting_for_retry + group.dead_letters for group in groups) == 2

        await until(have_ended, "one is in flight, one parked, one dead")
        scripted = await steady(client, keys, settings)
        plain = await steady(WithoutScripts(client), keys, settings)
        assert plain == scripted
        go.set()


async def steady(client: Any, keys: Keys, settings: Settings) -> Snapshot:
    """A snapshot without the times, which run on."""
    seen = await Observer(client, keys, settings).snapshot()
    groups = tuple(
        replace(group, shares=tuple(without_times(share) for share in group.shares)) for group in seen.groups
    )
    members = tuple(replace(each, heard_ago=None, loop_lag=None) for each in seen.members)
    return replace(seen, at=0.0, groups=groups, members=members)


def without_times(share: GroupPartition) -> GroupPartition:
    """The partition with whether each time is known."""
    known = {name: getattr(share, name) and timedelta(1) for name in ("lease_left", "oldest", "oldest_in_stream")}
    return replace(share, **known)
