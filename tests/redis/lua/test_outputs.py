"""The scripts of outputs: keys before, one call, keys after; with a stale epoch; called twice; without room."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.errors import BrokerError
from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import RELAY_OUTPUTS, SETTLE_OUTPUTS
from tests.redis.lua.test_dead_letters import GROUP, Partition

EPOCH = "7"
MARK = "out|orders.3|billing"


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition whose lease is held, and whose target is `invoices.1`."""
    made = Partition(client, keys)
    await made.call("HSET", made.lease, "owner", "me", "epoch", EPOCH)
    return made


def one(entry_id: bytes, data: str, rule: str = "", target: int = 4) -> list[Any]:
    """A message with one output."""
    stored = [pack_fields(["data", data])] if rule.split(" ")[4:] not in ([], [""]) else ["data", data]
    return [entry_id, 1, target, rule, len(stored), *stored]


async def settle(
    partition: Partition,
    keys: list[str],
    *args: Any,
    counts: tuple[int, ...] = (1, 0, 0),
    again: int = 0,
    epoch: str = EPOCH,
) -> Any:
    """One call of settle_outputs."""
    given = ("me", epoch, GROUP, again, *counts, *args)
    return await SETTLE_OUTPUTS(partition.client, (partition.stream, partition.lease, partition.retry, *keys), given)


@pytest.mark.parametrize("epoch", [EPOCH, ""])
async def test_settle_outputs_twice_stores_them_once(partition: Partition, keys: Keys, epoch: str) -> None:
    """What is not pending any more is done with, and stores nothing."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    for acknowledged, again in ((2, 0), (0, 1)):
        args = [*one(ids[0], "a"), *one(ids[1], "b")]
        assert await settle(partition, [target], *args, again=again, epoch=epoch) == [b"OK", 2, acknowledged, 0]
        assert await partition.entries(target) == [[b"data", b"a"], [b"data", b"b"]]
    assert await partition.pending() == 0


async def test_settle_outputs_with_a_stale_epoch_changes_nothing(partition: Partition, keys: Keys) -> None:
    """Neither the messages nor the target."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    assert await settle(partition, [target], *one(ids[0], "a"), epoch="6") == [b"STALE_EPOCH"]
    assert await partition.pending() == 2
    assert await partition.call("EXISTS", target) == 0


async def test_settle_outputs_without_room_stops_there(partition: Partition, keys: Keys) -> None:
    """The message before is settled; the one without room, and those after it, are not."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    other = keys.stream("invoices", 2)
    args = [*one(ids[0], "a", "1 reject 0 0 "), *one(ids[1], "b", "1 reject 0 0 "), *one(ids[2], "c", "", 5)]
    assert await settle(partition, [target, other], *args, counts=(2, 0, 1)) == [b"OK", 1, 1, 4]
    assert await partition.pending() == 1
    assert await partition.entries(target) == [[b"data", b"a"]]
    assert await partition.entries(other) == []


async def test_settle_outputs_of_a_deleted_consumer_stores_them(partition: Partition, keys: Keys) -> None:
    """Only the owner settles. Left alone: a message that the group has not received, and any on a second call."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, "me")
    assert await settle(partition, [target], *one(ids[2], "c")) == [b"OK", 1, 0, 0]
    assert await settle(partition, [target], *one(ids[1], "b"), again=1) == [b"OK", 1, 0, 0]
    assert await settle(partition, [target], *one(ids[0], "a")) == [b"OK", 1, 1, 0]
    assert await partition.entries(target) == [[b"data", b"a"]]


async def test_settle_outputs_into_a_key_of_another_type_changes_nothing(partition: Partition, keys: Keys) -> None:
    """An operator can repair it; the message stays pending."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    await partition.call("SET", target, "x")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await settle(partition, [target], *one(ids[0], "a"))
    assert await partition.pending() == 2


@pytest.mark.parametrize("sealed", [1, 2])
async def test_settle_outputs_into_a_stream_that_takes_nothing_changes_nothing(
    partition: Partition, keys: Keys, sealed: int
) -> None:
    """A stream with the largest id refuses entries: the message stays pending, and the other output is not stored."""
    ids, targets = await partition.fill(), [keys.stream("invoices", 1), keys.stream("invoices", 2)]
    await partition.call("XADD", targets[sealed - 1], f"{2**64 - 1}-{2**64 - 1}", "data", "sealed")
    args = [ids[0], 2, 3, "", 2, "data", "a", 4, "", 2, "data", "b"]
    with pytest.raises(BrokerError, match="takes no entries"):
        await settle(partition, targets, *args, counts=(2, 0, 0))
    assert await partition.pending() == 2
    assert await partition.call("XLEN", targets[2 - sealed]) == 0


async def test_settle_outputs_without_memory_changes_nothing(partition: Partition, keys: Keys) -> None:
    """The script is refused as a whole: an XACK without its outputs would lose them."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    (_, before) = await partition.call("CONFIG", "GET", "maxmemory")
    await partition.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(BrokerError, match="out of memory"):
            await settle(partition, [target], *one(ids[0], "a"))
    finally:
        await partition.call("CONFIG", "SET", "maxmemory", before)
    assert await partition.pending() == 2
    assert await partition.call("EXISTS", target) == 0


async def test_settle_outputs_with_an_id_and_a_due_time(partition: Partition, keys: Keys) -> None:
    """An id is stored once within its window, also twice in a call; a delayed output waits in its zset."""
    ids, target = await partition.fill(), keys.stream("invoices", 1)
    delayed, dedup = keys.delayed("invoices", 1), keys.dedup("invoices", 1, "one")
    args = [*one(ids[0], "a", "0 reject 6 60000 "), *one(ids[1], "b", "0 reject 6 60000 ")]
    assert (await settle(partition, [target, delayed, dedup], *args, counts=(1, 1, 1)))[:2] == [b"OK", 2]
    assert await partition.entries(target) == [[b"data", b"a"]]
    assert 0 < await partition.call("PTTL", dedup) <= 60_000
    (entry,) = (await partition.call("XREADGROUP", "GROUP", GROUP, "me", "STREAMS", partition.stream, ">"))[0][1]
    late = one(entry[0], "d", "0 reject 0 0 +5000", 5)
    assert await settle(partition, [target, delayed, dedup], *late, counts=(1, 1, 1)) == [b"OK", 1, 1, 0]
    packed, due = await partition.call("ZRANGE", delayed, 0, -1, "WITHSCORES")
    seconds, _ = await partition.call("TIME")
    assert packed == pack_fields(["data", "d"])
    assert int(seconds) * 1000 < float(due) <= (int(seconds) + 6) * 1000


def position(number: int) -> str:
    """A position of fixed width."""
    return f"{number:020d}-{0:020d}"


async def relay(partition: Partition, keys: Keys, *numbers: int, max_length: int = 0, on_full: str = "reject") -> Any:
    """One call of relay_outputs; the payload is the number."""
    names = (keys.stream("invoices", 1), keys.jobs("invoices", 1), keys.delayed("invoices", 1))
    args = [part for n in numbers for part in (position(n), 0, 0, "", 2, "data", str(n))]
    return await RELAY_OUTPUTS(partition.client, names, (MARK, max_length, on_full, *args))


async def test_relay_outputs_twice_stores_them_once(partition: Partition, keys: Keys) -> None:
    """By the last owner and the next one, in any overlap; in order."""
    for numbers in ([1, 2], [1, 2, 3], [2, 3], [3, 4]):
        assert await relay(partition, keys, *numbers) == [b"OK", len(numbers)]
    found = await partition.entries(keys.stream("invoices", 1))
    assert found == [[b"data", str(n).encode()] for n in (1, 2, 3, 4)]


async def test_relay_outputs_without_room_stops_there(partition: Partition, keys: Keys) -> None:
    """What has no room comes with the next call."""
    assert await relay(partition, keys, 1, 2, 3, max_length=2) == [b"FULL", 2]
    assert await relay(partition, keys, 1, 2, 3, max_length=3) == [b"OK", 3]
    assert len(await partition.entries(keys.stream("invoices", 1))) == 3


async def test_relay_outputs_with_an_id_and_a_due_time(partition: Partition, keys: Keys) -> None:
    """An id that was stored within its window is skipped; a delayed output goes to its zset."""
    stream, delayed, dedup = (keys.stream("invoices", 1), keys.delayed("invoices", 1), keys.dedup("invoices", 1, "one"))
    names, packed = (stream, keys.jobs("invoices", 1), delayed, dedup), pack_fields(["data", "c"])
    first = (position(1), 4, 60_000, "", 2, "data", "a", position(2), 4, 60_000, "", 2, "data", "b")
    last = (position(3), 0, 0, "99999999999999", 1, packed)
    for _ in range(2):
        assert await RELAY_OUTPUTS(partition.client, names, (MARK, 0, "reject", *first, *last)) == [b"OK", 3]
    assert await partition.entries(stream) == [[b"data", b"a"]]
    assert await partition.call("ZRANGE", delayed, 0, -1, "WITHSCORES") == [packed, b"99999999999999"]
