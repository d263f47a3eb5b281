"""The scripts of what waits for a time: keys before, one call, keys after; with a stale epoch; twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import KEEP_WAITS, RESCHEDULE_WAIT, RESET_GROUP
from tests.redis.lua.test_settle import EPOCH, GROUP, ME, OTHER, Partition

FAR = 4_000_000_000_000


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition with a lease of `me`."""
    return await Partition(client, keys).prepare()


async def keep(
    partition: Partition,
    *notes: Any,
    forget: tuple[bytes, ...] = (),
    limit: int = 10,
    owner: str = ME,
    epoch: str = EPOCH,
) -> Any:
    """One call of the owner. `notes`: id, due time, id, due time..."""
    keys = (partition.lease, waits(partition))
    return await KEEP_WAITS(partition.client, keys, (owner, epoch, limit, len(forget), *forget, *notes))


def waits(partition: Partition) -> str:
    """The due times."""
    return f"{partition.stream}:{GROUP}:waits"


async def dues(partition: Partition) -> dict[bytes, float]:
    """What the server has noted."""
    flat = await partition.call("ZRANGE", waits(partition), 0, -1, "WITHSCORES")
    return {each: float(due) for each, due in zip(flat[::2], flat[1::2], strict=True)}


async def reschedule(partition: Partition, entry_id: bytes, due: Any) -> Any:
    """One call of another client."""
    keys = (partition.stream, waits(partition), partition.cancels, partition.cancelled)
    return await RESCHEDULE_WAIT(partition.client, keys, (GROUP, entry_id, due))


async def test_what_is_due_is_named_until_it_is_forgotten(partition: Partition) -> None:
    """A lost reply loses none, and the time until the next one comes along."""
    soon, later = await partition.deliver(2)
    word, wait_ms, *named = await keep(partition, soon, 5, later, FAR)
    assert (word, named) == (b"OK", [[soon, 0]])
    assert wait_ms > 0
    for _ in range(2):
        assert (await keep(partition))[2:] == [[soon, 0]]
    assert await dues(partition) == {soon: 0, later: FAR}
    assert (await keep(partition, forget=(soon,)))[2:] == []
    assert await dues(partition) == {later: FAR}
    assert await keep(partition, forget=(later,)) == [b"OK", -1]


async def test_due_time_that_is_there_is_not_replaced_by_an_older_note(partition: Partition) -> None:
    """A note that is sent again after the message was rescheduled; what was named may get a new one."""
    (entry,) = await partition.deliver(1)
    await keep(partition, entry, FAR)
    assert await reschedule(partition, entry, FAR + 1000) == [b"OK", b"%d" % (FAR + 1000)]
    await keep(partition, entry, FAR)
    assert await dues(partition) == {entry: FAR + 1000.5}
    assert await reschedule(partition, entry, 7) == [b"OK", b"7"]
    assert (await keep(partition))[2:] == [[entry, 1]]
    assert await dues(partition) == {entry: -1}
    assert await reschedule(partition, entry, FAR) == [b"NO_WAIT"], "it starts now"
    await keep(partition, entry, FAR)
    assert await dues(partition) == {entry: FAR}


async def test_window_that_ends_earlier_than_was_noted_counts(partition: Partition) -> None:
    """The clock was set back, and the record of the lease was lost. A time that was given by hand stays."""
    window, moved = await partition.deliver(2)
    await keep(partition, window, FAR, moved, FAR)
    assert await reschedule(partition, moved, FAR) == [b"OK", b"%d" % FAR]
    await keep(partition, window, "+50000", moved, "+50000")
    found = await dues(partition)
    assert found[moved] == FAR + 0.5
    assert found[window] < FAR
    await keep(partition, window, "+90000")
    assert await dues(partition) == found, "the earlier end counts"


async def test_due_times_move_back_with_the_servers_clock(partition: Partition) -> None:
    """As far as the clock is behind what the owner saw last. What was named, and is cancelled, is marked as before."""
    named, cancelled, waiting, moved = await partition.deliver(4)
    await keep(partition, named, 5, waiting, FAR, moved, FAR)
    await partition.call("ZADD", waits(partition), 1, cancelled)
    assert await reschedule(partition, moved, FAR) == [b"OK", b"%d" % FAR]
    seen = int(await partition.call("HGET", partition.lease, "waits_clock"))
    await partition.call("HSET", partition.lease, "waits_clock", seen + 1_000_000)
    await keep(partition, limit=0)
    found = await dues(partition)
    assert (found[named], found[cancelled]) == (0, 1)
    assert FAR - 1_000_000 <= found[waiting] < FAR - 900_000
    assert found[moved] == found[waiting] + 0.5
    await keep(partition, limit=0)
    assert await dues(partition) == found, "once"


async def test_former_owner_notes_and_forgets_nothing(partition: Partition) -> None:
    """Another owner or another epoch."""
    (entry,) = await partition.deliver(1)
    await keep(partition, entry, 5, limit=0)
    for owner, epoch in ((OTHER, EPOCH), (ME, "6")):
        assert await keep(partition, entry, FAR, forget=(entry,), owner=owner, epoch=epoch) == [b"STALE_EPOCH"]
    assert await dues(partition) == {entry: 5}


async def test_at_most_so_many_are_named_as_their_owner_reads_again(partition: Partition) -> None:
    """The others are named next."""
    ids = await partition.deliver(5)
    await keep(partition, *[part for entry in ids for part in (entry, 5)], limit=0)
    named = (await keep(partition, limit=3))[2:]
    assert len(named) == 3
    rest = (await keep(partition, forget=tuple(entry for entry, _ in named), limit=3))[2:]
    assert sorted(entry for entry, _ in [*named, *rest]) == sorted(ids)


async def test_only_what_is_pending_and_not_cancelled_can_be_rescheduled(partition: Partition) -> None:
    """The caller looks among the retries then."""
    settled, cancelled, unknown = await partition.deliver(3)
    await keep(partition, settled, FAR, cancelled, FAR)
    await partition.call("XACK", partition.stream, GROUP, settled)
    await partition.call("HSET", partition.cancels, cancelled, "cancelled")
    for each in (settled, cancelled, unknown):
        assert await reschedule(partition, each, "+5") == [b"NO_WAIT"]
    assert await dues(partition) == {settled: FAR, cancelled: FAR}


async def test_reset_of_a_group_forgets_what_waits(partition: Partition) -> None:
    """The new run asks its rule."""
    (entry,) = await partition.deliver(1)
    await keep(partition, entry, FAR)
    keys = (
        partition.stream,
        partition.lease,
        partition.retry,
        partition.cancels,
        partition.cancelled,
        waits(partition),
        waits(partition).replace(":waits", ":calls"),
    )
    assert await RESET_GROUP(partition.client, keys, (GROUP, "0")) == b"OK"
    assert await dues(partition) == {}


@pytest.mark.parametrize("member", [b"no id", b"1-1", b"\xff"])
async def test_what_another_client_has_written_among_the_due_times_is_named_and_forgotten(
    partition: Partition, member: bytes
) -> None:
    """Its owner does not know it."""
    await partition.call("ZADD", waits(partition), 5, member)
    assert (await keep(partition))[2:] == [[member, 0]]
    await keep(partition, forget=(member,))
    assert await dues(partition) == {}
