"""The scripts that put aside and read again: keys before, one call, keys after; with a stale epoch; late; twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.model.reason import lost_body
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import CLAIM_IDS, PARK_MESSAGE, PUT_ASIDE, READ_AGAIN
from tests.redis.lua.test_settle import EPOCH, GROUP, ME, OTHER, STALE, Partition

BIG = 1 << 30
LATE = [b"LATE"]
DONE: list[Any] = [b"OK", [], []]


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition with a lease of `me`."""
    return await Partition(client, keys).prepare()


async def put_aside(
    partition: Partition, number: int, *ids: bytes, owner: str = ME, epoch: str = EPOCH, trims: int = 0
) -> Any:
    """One call of the script."""
    keys = (partition.stream, partition.lease, partition.dlq)
    args = (owner, epoch, GROUP, number, trims, 1000, *lost_body(GROUP, ME))
    return await PUT_ASIDE(partition.client, keys, (*args, *ids))


async def read_again(
    partition: Partition, number: int, *pairs: tuple[bytes, int], epoch: str = EPOCH, budget: int = BIG, trims: int = 0
) -> Any:
    """One call of the script."""
    keys = (partition.stream, partition.lease, partition.retry, partition.dlq, partition.cancels, partition.cancelled)
    args = (ME, epoch, GROUP, number, budget, trims, 1000, *lost_body(GROUP, ME))
    return await READ_AGAIN(partition.client, keys, (*args, *[part for pair in pairs for part in pair]))


async def test_put_aside_makes_the_count_0_and_reading_again_makes_it_1(partition: Partition) -> None:
    """So what waits as an id has provably not started, and what has its body again may have."""
    ids = await partition.deliver(3)
    assert await put_aside(partition, 1, *ids[1:]) == DONE
    assert await partition.pending() == {ids[0]: (ME, 1), ids[1]: (ME, 0), ids[2]: (ME, 0)}
    assert await read_again(partition, 2, (ids[1], 1)) == [b"OK", [ids[1], 1, [b"data", b"x"]]]
    assert await partition.pending() == {ids[0]: (ME, 1), ids[1]: (ME, 1), ids[2]: (ME, 0)}
    assert await read_again(partition, 3, (ids[1], 1)) == [b"OK", [ids[1], 1, [b"data", b"x"]]], "a repetition"


async def test_many_ids_are_put_aside_with_one_call(partition: Partition) -> None:
    """More than one command of the server takes."""
    ids = await partition.deliver(1203)
    assert await put_aside(partition, 1, *ids) == DONE
    rows = await partition.call("XPENDING", partition.stream, GROUP, "-", "+", 2000)
    assert {row[3] for row in rows} == {0}


async def test_put_aside_that_comes_after_a_later_call_does_nothing(partition: Partition) -> None:
    """Otherwise it would hide the start of a message that kills its process."""
    (first,) = await partition.deliver(1)
    assert (await read_again(partition, 2, (first, 1)))[0] == b"OK"
    assert await put_aside(partition, 1, first) == LATE
    assert await put_aside(partition, 2, first) == LATE
    assert await partition.pending() == {first: (ME, 1)}
    await partition.call("HSET", partition.lease, "epoch", "8")
    assert await put_aside(partition, 1, first, epoch="8") == DONE, "numbers begin anew with a lease"


@pytest.mark.parametrize(("owner", "epoch"), [(ME, "6"), (OTHER, EPOCH)])
async def test_neither_works_without_the_lease(partition: Partition, owner: str, epoch: str) -> None:
    """Who has lost the partition changes no count."""
    (first,) = await partition.deliver(1)
    before = await partition.state()
    assert await put_aside(partition, 1, first, owner=owner, epoch=epoch) == STALE
    assert await partition.state() == before
    assert await read_again(partition, 2, (first, 1), epoch="6") == STALE
    assert await partition.state() == before


async def test_redelivered_message_keeps_its_count(partition: Partition) -> None:
    """Its start is charged by start_message."""
    (first,) = await partition.deliver(1)
    await partition.call("XCLAIM", partition.stream, GROUP, ME, 0, first, "RETRYCOUNT", 3, "JUSTID")
    assert await read_again(partition, 1, (first, 0)) == [b"OK", [first, 3, [b"data", b"x"]]]
    assert await partition.pending() == {first: (ME, 3)}


async def test_deleted_message_becomes_a_dead_letter_in_either_step(partition: Partition) -> None:
    """XCLAIM would drop it without a trace."""
    ids = await partition.deliver(3)
    await partition.call("XDEL", partition.stream, ids[0], ids[1])
    assert await put_aside(partition, 1, ids[0], ids[2]) == [b"OK", ids[:1], []]
    assert await read_again(partition, 2, (ids[1], 1), (ids[2], 1)) == [
        b"OK", [ids[1], b"LOST"], [ids[2], 1, [b"data", b"x"]],
    ]  # fmt: skip
    assert await partition.lost() == ids[:2]
    assert list(await partition.pending()) == ids[2:]


async def test_trimmed_message_is_settled_without_a_dead_letter(partition: Partition) -> None:
    """A topic that trims itself would push all real dead letters out with a hundred thousand of them."""
    ids = await partition.deliver(3)
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 1)
    assert await read_again(partition, 1, (ids[0], 1), (ids[1], 1), trims=1) == [
        b"OK", [ids[0], b"TRIMMED"], [ids[1], b"TRIMMED"],
    ]  # fmt: skip
    assert (await partition.dead(), list(await partition.pending())) == ([], ids[2:])


async def test_what_was_trimmed_before_it_is_put_aside_is_settled_without_a_dead_letter(partition: Partition) -> None:
    """But what another client deleted in the midst of the stream becomes one."""
    ids = await partition.deliver(4)
    await partition.call("XDEL", partition.stream, ids[2])
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 2)
    assert await put_aside(partition, 1, *ids, trims=1) == [b"OK", [ids[2]], ids[:1]]
    assert (await partition.lost(), list(await partition.pending())) == ([ids[2]], [ids[1], ids[3]])


async def test_cancelled_message_is_settled_when_it_is_read_again(partition: Partition) -> None:
    """Also if its mark was set while it waited."""
    ids = await partition.deliver(2)
    await partition.call("HSET", partition.cancels, ids[0], "asked")
    assert await read_again(partition, 1, *[(each, 1) for each in ids]) == [
        b"OK", [ids[0], b"CANCELLED"], [ids[1], 1, [b"data", b"x"]],
    ]  # fmt: skip
    assert list(await partition.pending()) == ids[1:]
    assert await partition.call("ZRANGE", partition.cancelled, 0, -1) == ids[:1]
    assert await partition.call("EXISTS", partition.cancels) == 0


async def test_message_that_lost_its_consumer_is_made_pending_again(partition: Partition) -> None:
    """XGROUP DELCONSUMER deletes the pending list too. What the group was not given comes again by itself."""
    ids = await partition.deliver(2)
    later = await partition.call("XADD", partition.stream, "*", "data", "x")
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    reply = await read_again(partition, 1, (ids[0], 1), (ids[1], 0), (later, 1))
    assert reply == [
        b"OK", [ids[0], 1, [b"data", b"x"]], [ids[1], 1, [b"data", b"x"]], [later, b"UNDELIVERED"],
    ]  # fmt: skip
    assert await partition.pending() == {ids[0]: (ME, 1), ids[1]: (ME, 1)}


async def test_reading_again_ends_at_its_budget(partition: Partition) -> None:
    """What is left is asked for by another call."""
    ids = await partition.deliver(3, ME, "data", "x" * 100)
    reply = await read_again(partition, 1, *[(each, 1) for each in ids], budget=150)
    assert [row[0] for row in reply[1:]] == ids[:2]


async def test_reading_again_a_parked_message_keeps_its_record(partition: Partition) -> None:
    """`start_message` removes it; a deleted one leaves none behind."""
    first, second = await partition.deliver(2)
    keys = (partition.stream, partition.lease, partition.retry, partition.errors)
    for each in (first, second):
        await PARK_MESSAGE(partition.client, keys, (ME, EPOCH, GROUP, each, 1, 60_000, 1, 1, "no"))
    await partition.call("XDEL", partition.stream, second)
    reply = await read_again(partition, 1, (first, 0), (second, 0))
    assert reply == [b"OK", [first, 1, [b"data", b"x"]], [second, b"LOST"]]
    assert list(await partition.parked()) == [first + b"|1"]


async def claim_ids(
    partition: Partition, cursor: bytes = b"0-0", count: int = 100, *, epoch: str = EPOCH, trims: int = 0
) -> Any:
    """One call of the script."""
    keys = (partition.stream, partition.lease, partition.retry, partition.dlq)
    args = (ME, epoch, GROUP, cursor, count, trims, "12 127.0.0.1:5000", 1000, *lost_body(GROUP, ME))
    return await CLAIM_IDS(partition.client, keys, args)


async def test_claim_of_ids_takes_over_pages_without_bodies(partition: Partition) -> None:
    """Nothing is charged, the reader is stored, and a repetition has the same answer but for the former owner."""
    ids = [*await partition.deliver(2, OTHER), *await partition.deliver(1)]
    await partition.park(ids[2], 1, 60_000, keep=True)
    before = await partition.state()
    assert await claim_ids(partition, epoch="6") == STALE
    assert await partition.state() == before
    word, cursor, lost, trimmed, found = await claim_ids(partition, count=2)
    assert (word, cursor, lost, trimmed) == (b"OK", ids[2], [], [])
    assert found == [ids[0], 1, 0, 0, ids[1], 1, 0, 0]
    *_, found = await claim_ids(partition, count=2)
    assert found == [ids[0], 1, 0, 1, ids[1], 1, 0, 1]
    _, cursor, *_, found = await claim_ids(partition, cursor)
    assert (cursor, found[:2], found[3]) == (b"0-0", [ids[2], 1], 1)
    assert 0 < found[2] <= 60_000
    assert await partition.pending() == dict.fromkeys(ids, (ME, 1))
    assert await partition.call("HGET", partition.lease, "reader") == b"12 127.0.0.1:5000"


@pytest.mark.parametrize("by", ["claim_ids", "claim_pending"])
async def test_take_over_tells_what_was_deleted_from_what_the_topic_has_trimmed(partition: Partition, by: str) -> None:
    """One becomes a dead letter in the same step, the other is counted. Without trimming both are dead letters."""
    ids = await partition.deliver(5)
    await partition.call("XDEL", partition.stream, ids[3])
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 2)
    if by == "claim_ids":
        _, _, lost, trimmed, found = await claim_ids(partition, trims=1)
        kept = found[::4]
    else:
        _, _, lost, *rows = await partition.claim(trims=1)
        trimmed = [row[0] for row in rows if row[1:] == [b"TRIMMED"]]
        kept = [row[0] for row in rows if len(row) > 2]
    assert (lost, trimmed, kept) == ([ids[3]], ids[:2], [ids[2], ids[4]])
    assert (await partition.lost(), list(await partition.pending())) == ([ids[3]], kept)


@pytest.mark.parametrize("call", [put_aside, read_again])
async def test_call_without_a_group_changes_nothing(partition: Partition, call: Any) -> None:
    """A script must not fail after its first write."""
    (first,) = await partition.deliver(1)
    await partition.call("XGROUP", "DESTROY", partition.stream, GROUP)
    before = await partition.call("HGETALL", partition.lease)
    with pytest.raises(Exception, match=r"(?i)group"):
        await call(partition, 1, *((first,) if call is put_aside else ((first, 1),)))
    assert await partition.call("HGETALL", partition.lease) == before
