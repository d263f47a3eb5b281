"""The scripts of the audit: keys before, one call, keys after; with a stale epoch; and called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import COUNT_REMOVED, RESTORE_PENDING, TRIM_PARTITION
from tests.redis.lua.test_settle import EPOCH, GROUP, ME, STALE, Partition


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition that `me` owns."""
    return await Partition(client, keys).prepare()


async def restore(partition: Partition, *pairs: Any, epoch: str = EPOCH, really: int = 1) -> Any:
    """One call of restore_pending."""
    keys = (partition.stream, partition.lease)
    return await RESTORE_PENDING(partition.client, keys, (ME, epoch, GROUP, really, *pairs))


async def test_restore_pending_after_a_deleted_consumer_restores_the_attempts(partition: Partition) -> None:
    """The first call only reports the ids, the second restores them with their attempts, the third finds none."""
    first, second, third = await partition.deliver(3)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    assert await restore(partition, first, 1, second, 3, really=0) == [b"OK", first, second]
    assert await partition.pending() == {}
    assert await restore(partition, first, 1, second, 3) == [b"OK", first, second]
    assert await partition.pending() == {first: (ME, 1), second: (ME, 3)}
    assert await restore(partition, first, 1, second, 3) == [b"OK"]
    assert third not in await partition.pending()


async def test_restore_pending_leaves_foreign_deleted_and_undelivered_ids_alone(partition: Partition) -> None:
    """A stale epoch, a deleted entry and an id that the group will receive again change nothing."""
    gone, there, again = await partition.deliver(3)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    await partition.call("XDEL", partition.stream, gone)
    await partition.call("XGROUP", "SETID", partition.stream, GROUP, there)
    before = await partition.state()
    assert await restore(partition, there, 1, epoch="6") == STALE
    assert await restore(partition, gone, 1, again, 1) == [b"OK"]
    assert await partition.state() == before


async def test_restore_pending_compares_ids_beyond_53_bits_exactly(partition: Partition) -> None:
    """What the group will receive again is the very next id."""
    ids = [f"{2**60}-{2**53 + n}".encode() for n in range(2)]
    for entry_id in ids:
        await partition.call("XADD", partition.stream, entry_id, "data", "x")
    await partition.call("XGROUP", "SETID", partition.stream, GROUP, ids[0])
    assert await restore(partition, ids[0], 1, ids[1], 1) == [b"OK", ids[0]]


async def count(client: Client, keys: Keys, group: str = GROUP) -> int:
    """The number of removed entries that count_removed reports, until the caller has taken note of them."""
    names = (keys.stream("orders", 3), keys.removed("orders", 3))
    first, again = [await COUNT_REMOVED(client, names, (group, ME)) for _ in range(2)]
    assert first == again, "a lost reply counts as not reported"
    await client.execute_command("HSET", names[1], f"seen|{group}", first[5])
    return int(first[0])


async def test_count_removed_reports_entries_of_other_clients_once_to_each_group(
    client: Client, keys: Keys, partition: Partition
) -> None:
    """XTRIM and XDEL by other clients count; entries removed before the first call do not."""
    ids = await partition.deliver(10)
    await partition.call("XDEL", partition.stream, ids[0])
    assert await count(client, keys) == 0
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 5)
    await partition.call("XDEL", partition.stream, ids[-1])
    assert [await count(client, keys), await count(client, keys)] == [5, 0]
    assert await count(client, keys, "audit") == 0
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 0)
    assert [await count(client, keys, "audit"), await count(client, keys)] == [4, 4]


async def test_count_removed_reports_entries_pending_with_other_consumers(
    client: Client, keys: Keys, partition: Partition
) -> None:
    """Entries pending with the owner do not count."""
    await partition.deliver(2)
    await partition.deliver(3, "other")
    reply = await COUNT_REMOVED(client, (keys.stream("orders", 3), keys.removed("orders", 3)), (GROUP, ME))
    assert reply[4] == 3


async def test_count_removed_ignores_what_retention_trimmed(client: Client, keys: Keys, partition: Partition) -> None:
    """The trimming script records its own removals."""
    ids = await partition.deliver(10)
    assert await count(client, keys) == 0
    await partition.call("XACK", partition.stream, GROUP, *ids)
    trim = (partition.stream, keys.marks("orders", 3), keys.archived("orders", 3), keys.removed("orders", 3))
    assert (await TRIM_PARTITION(client, (*trim, partition.retry), (0, 0, 1, "off", GROUP)))[1] == 10
    assert await count(client, keys) == 0
    assert await partition.call("XLEN", partition.stream) == 0


async def test_count_removed_of_a_new_stream_starts_again(client: Client, keys: Keys, partition: Partition) -> None:
    """The new stream has lost fewer entries than the old one: nothing is reported until entries are removed again."""
    await partition.deliver(10)
    assert await count(client, keys) == 0
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 0)
    assert await count(client, keys) == 10
    await partition.call("DEL", partition.stream)
    await partition.call("XGROUP", "CREATE", partition.stream, GROUP, "0", "MKSTREAM")
    await partition.deliver(3)
    assert await count(client, keys) == 0
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 1)
    assert await count(client, keys) == 2
