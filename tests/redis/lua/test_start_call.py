"""The script that begins a call with the messages of one key: keys before, one call, keys after; stale; late; twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.model.reason import lost_body
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import START_CALL
from tests.redis.lua.test_read_ahead import LATE, put_aside
from tests.redis.lua.test_settle import EPOCH, GROUP, ME, OTHER, STALE, Partition

BODY = [b"data", b"x"]
KEY = "u7"


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition with a lease of `me`."""
    return await Partition(client, keys).prepare()


def calls_of(partition: Partition) -> str:
    return f"{partition.lease.removesuffix(':lease')}:calls"


async def start(
    partition: Partition, number: int, *ids: bytes, owner: str = ME, epoch: str = EPOCH, budget: int = 0,
    attempt: int = 1, end: int = 0, starts: int = 1, newest: bytes = b"0-0", ended: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """One call of the script."""
    keys = (
        partition.stream, partition.lease, partition.retry, partition.dlq, partition.cancels, partition.cancelled,
        calls_of(partition),
    )  # fmt: skip
    args = (owner, epoch, GROUP, number, budget, 0, 1000, *lost_body(GROUP, ME))
    about = (attempt, KEY, end, starts, newest, len(ended) // 2, *ended)
    return await START_CALL(partition.client, keys, (*args, *about, *ids))


async def record(partition: Partition, key: str = KEY) -> Any:
    return await partition.call("HGET", calls_of(partition), key)


async def test_call_marks_all_of_its_messages_and_records_the_last(partition: Partition) -> None:
    """The counts become the attempt; others stay. What is asked again is answered again."""
    ids = await partition.deliver(4)
    await put_aside(partition, 1, *ids)
    assert await start(partition, 2, *ids[:3]) == [b"OK", *[[each, BODY] for each in ids[:3]]]
    assert await partition.pending() == {**dict.fromkeys(ids[:3], (ME, 1)), ids[3]: (ME, 0)}
    assert await record(partition) == ids[2]
    assert (await start(partition, 3, *ids[:3], attempt=2))[0] == b"OK"
    assert await partition.pending() == {**dict.fromkeys(ids[:3], (ME, 2)), ids[3]: (ME, 0)}


@pytest.mark.parametrize(("owner", "epoch"), [(ME, "6"), (OTHER, EPOCH)])
async def test_call_without_the_lease_changes_nothing(partition: Partition, owner: str, epoch: str) -> None:
    """The next owner finds the same counts and records."""
    ids = await partition.deliver(2)
    before = await partition.state()
    assert await start(partition, 1, *ids, owner=owner, epoch=epoch) == STALE
    assert (await partition.state(), await record(partition)) == (before, None)


async def test_call_that_comes_after_a_later_one_does_nothing(partition: Partition) -> None:
    """Otherwise it would mark what was handed back."""
    ids = await partition.deliver(2)
    await put_aside(partition, 2, *ids)
    assert await start(partition, 1, *ids) == LATE
    assert set((await partition.pending()).values()) == {(ME, 0)}
    assert await record(partition) is None


async def test_budget_ends_a_call_before_its_last_messages(partition: Partition) -> None:
    """They wait for the next one."""
    ids = await partition.deliver(3)
    await put_aside(partition, 1, *ids)
    assert await start(partition, 2, *ids, budget=6) == [b"OK", [ids[0], BODY], [ids[1], BODY]]
    assert (await partition.pending())[ids[2]] == (ME, 0)
    assert await record(partition) == ids[1]


async def test_call_with_a_retry_that_is_not_due_waits_until_the_last_one_is(partition: Partition) -> None:
    """Nothing is charged. A retry under another count than the server's was started since, and is not waited for."""
    ids = await partition.deliver(3)
    now = int((await partition.call("TIME"))[0]) * 1000
    for entry_id, count, after in ((ids[1], 1, 100_000), (ids[2], 1, 3_600_000), (ids[0], 7, 9_000_000)):
        await partition.call("ZADD", partition.retry, now + after, entry_id.decode() + f"|{count}")
    await start(partition, 1, *ids, attempt=2, starts=2)  # notes the time of the server
    before = await partition.state()
    word, wait_ms = await start(partition, 1, *ids, attempt=2, starts=2)
    assert (word, 3_590_000 < wait_ms <= 3_600_000) == (b"NOT_DUE", True)
    assert (await partition.state(), await record(partition)) == (before, None)
    await partition.call("ZADD", partition.retry, now - 1, ids[2].decode() + "|1")
    assert (await start(partition, 1, *ids, attempt=2, starts=2))[1] <= 100_000
    await partition.call("ZADD", partition.retry, now - 1, ids[1].decode() + "|1")
    assert (await start(partition, 1, *ids, attempt=2, starts=2))[0] == b"OK"
    assert await partition.call("ZRANGE", partition.retry, 0, -1) == [ids[0] + b"|7"]


async def test_call_is_behind_while_messages_of_its_window_are_not_received(partition: Partition) -> None:
    """Not delivered, or delivered in an answer that is on its way."""
    ids = await partition.deliver(2)
    later = int(ids[0].partition(b"-")[0]) + 3_600_000
    assert await start(partition, 1, ids[0], end=later, newest=ids[0]) == [b"BEHIND"]
    assert (await start(partition, 1, *ids, end=later, newest=ids[1]))[0] == b"OK"
    await partition.call("XADD", partition.stream, f"{int(ids[1].partition(b'-')[0])}-99", "data", "x")
    while await start(partition, 2, *ids, end=later, newest=ids[1]) != [b"BEHIND"]:
        pass  # within the same millisecond it was stored after the end of what is asked for
    assert (await start(partition, 3, *ids, end=int(ids[0].partition(b"-")[0]), newest=ids[1]))[0] == b"OK"


async def test_cancelled_and_deleted_messages_leave_their_call(partition: Partition) -> None:
    """A deleted one is a dead letter. Where nothing may start only what is in front leaves."""
    ids = await partition.deliver(5)
    await put_aside(partition, 1, *ids)
    await partition.call("HSET", partition.cancels, ids[0], "cancelled", ids[3], "cancelled")
    await partition.call("XDEL", partition.stream, ids[1])
    front = await start(partition, 2, *ids, starts=0)
    assert front == [b"OK", [ids[0], b"CANCELLED"], [ids[1], b"LOST"]]
    assert await record(partition) is None
    assert await start(partition, 3, *ids[2:]) == [b"OK", [ids[2], BODY], [ids[3], b"CANCELLED"], [ids[4], BODY]]
    assert set(await partition.pending()) == {ids[2], ids[4]}
    assert await record(partition) == ids[4]
    assert await partition.call("XLEN", partition.dlq) == 1


async def test_record_of_an_ended_call_is_forgotten_unless_a_later_one_has_taken_its_place(
    partition: Partition,
) -> None:
    """So records do not pile up, and none is lost."""
    ids = await partition.deliver(3)
    await start(partition, 1, ids[0])
    await start(partition, 2, ids[1])
    await start(partition, 3, ended=(KEY, ids[0].decode()))
    assert await record(partition) == ids[1]
    await start(partition, 4, ended=(KEY, ids[1].decode(), "other", ids[2].decode()))
    assert await record(partition) is None


async def test_message_that_was_not_delivered_is_named(partition: Partition) -> None:
    """The server has lost writes: the owner gives the partition up."""
    (first,) = await partition.deliver(1)
    unknown = b"%d-0" % (int(first.partition(b"-")[0]) + 1000)
    assert (await start(partition, 1, first, unknown))[-1] == [unknown, b"UNDELIVERED"]
