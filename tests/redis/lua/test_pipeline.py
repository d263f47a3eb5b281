"""The scripts of the Spark pipeline: keys before, one call, keys after; and called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.errors import BrokerError
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import PUBLISH_MARKED, PUBLISH_UNSEEN, RESTORE_MESSAGES, SEEK_ENTRY

FIELDS = (2, "data", "x")


class Partition:
    """One partition and questions about its keys."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.stream, self.jobs = keys.stream("orders", 3), keys.jobs("orders", 3)

    async def call(self, *command: Any) -> Any:
        return await self.client.execute_command(*command)

    async def ids(self) -> list[str]:
        return [entry_id.decode() for entry_id, _ in await self.call("XRANGE", self.stream, "-", "+")]

    async def add(self, *ids: str) -> None:
        for entry_id in ids:
            await self.call("XADD", self.stream, entry_id, "data", "x")

    async def seek(self, after: str, upto: str, count: int) -> Any:
        return await SEEK_ENTRY(self.client, (self.stream,), (after, upto, count))

    async def marked(self, *positions: str, mark: str = "job|a.0", limit: int = 0, on_full: str = "reject") -> Any:
        args = [part for position in positions for part in (position, *FIELDS)]
        return await PUBLISH_MARKED(self.client, (self.stream, self.jobs), (limit, on_full, mark, *args))

    async def restore(self, *ids: str, limit: int = 0, on_full: str = "reject") -> Any:
        args = [part for entry_id in ids for part in (entry_id, *FIELDS)]
        return await RESTORE_MESSAGES(self.client, (self.stream,), (limit, on_full, *args))

    async def unseen(self, *ids: str, limit: int = 0, on_full: str = "reject") -> Any:
        keys = (self.stream, *(self.keys.dedup("orders", 3, each) for each in ids))
        return await PUBLISH_UNSEEN(self.client, keys, (limit, on_full, 60_000, *FIELDS * len(ids)))


@pytest.fixture
def partition(client: Client, keys: Keys) -> Partition:
    """An empty partition."""
    return Partition(client, keys)


# -- seek_entry -------------------------------------------------------------------------------------------------------


async def test_seek_entry_returns_count_and_last_id(partition: Partition) -> None:
    """It counts after an id, up to an id and up to a limit, in several steps, and changes nothing."""
    await partition.add(*(f"{number}-0" for number in range(1, 251)))
    assert await partition.seek("0-0", "250-0", 1000) == [250, b"250-0"]
    assert await partition.seek("0-0", "250-0", 120) == [120, b"120-0"]
    assert await partition.seek("10-0", "20-0", 1000) == [10, b"20-0"]
    assert await partition.seek("250-0", "+", 10) == [0, b"250-0"]
    assert len(await partition.ids()) == 250


# -- publish_marked -------------------------------------------------------------------------------------------------


async def test_publish_marked_appends_only_positions_above_the_mark(partition: Partition) -> None:
    """Repeated calls append once; an overlapping batch appends its rest; each source has its own mark."""
    assert await partition.marked("1", "2") == [b"OK", 2, 0]
    assert await partition.marked("1", "2") == [b"OK", 0, 2]
    assert await partition.marked("2", "3") == [b"OK", 1, 1]
    assert await partition.marked("1", mark="job|b.0") == [b"OK", 1, 0]
    assert len(await partition.ids()) == 4
    marks = await partition.call("HGETALL", partition.jobs)
    assert dict(zip(marks[::2], marks[1::2], strict=True)) == {b"job|a.0": b"3", b"job|b.0": b"1"}


async def test_publish_marked_to_a_full_partition_stops_at_the_limit(partition: Partition) -> None:
    """The mark is at the last message with room, and later calls continue there; `trim` makes room."""
    assert await partition.marked("1", "2", "3", limit=2) == [b"FULL", 2, 0]
    assert await partition.call("HGET", partition.jobs, "job|a.0") == b"2"
    assert await partition.marked("1", "2", limit=2) == [b"OK", 0, 2]
    assert await partition.marked("1", "2", "3", limit=2) == [b"FULL", 0, 2]
    assert await partition.marked("1", "2", "3", limit=2, on_full="trim") == [b"OK", 1, 2]


async def test_publish_marked_with_a_broken_message_keeps_its_mark(partition: Partition) -> None:
    """The call fails, and the messages before the broken one stay appended."""
    args = (0, "reject", "job|a.0", "1", *FIELDS, "2", 1, "no value")
    for _ in range(2):
        with pytest.raises(BrokerError, match=r"(?i)wrong number of arg"):
            await PUBLISH_MARKED(partition.client, (partition.stream, partition.jobs), args)
    assert len(await partition.ids()) == 1
    assert await partition.call("HGET", partition.jobs, "job|a.0") == b"1"


# -- restore_messages -------------------------------------------------------------------------------------------------


async def test_restore_messages_called_again_appends_each_id_once(partition: Partition) -> None:
    """This also holds when an earlier call stored only a part."""
    assert await partition.restore("5-0", "5-1") == [b"OK", 2, 0]
    assert await partition.restore("5-0", "5-1", "7-0") == [b"OK", 1, 2]
    assert await partition.ids() == ["5-0", "5-1", "7-0"]


async def test_restore_messages_to_a_stream_with_newer_entries_is_refused(partition: Partition) -> None:
    """The reply names the missing id that is older than the newest entry."""
    await partition.add("9-0")
    assert await partition.restore("10-0", "5-0") == [b"FOREIGN", 1, 0, b"5-0"]
    assert await partition.ids() == ["9-0", "10-0"]


async def test_restore_messages_called_again_where_the_topic_has_trimmed_the_front_skips_it(
    partition: Partition,
) -> None:
    """As after a lost reply. In a topic that is not full, an older id is still refused."""
    ids = [f"{2**60}-{number}" for number in range(1, 351)]
    assert await partition.restore(*ids, limit=100, on_full="trim") == [b"OK", 350, 0]
    left = await partition.client.execute_command("XLEN", partition.stream)
    assert 100 <= left < 250
    assert await partition.restore(*ids, limit=100, on_full="trim") == [b"OK", 0, 350]
    assert (await partition.restore("1-0", limit=1000, on_full="trim"))[0] == b"FOREIGN"


async def test_restore_messages_to_a_full_partition_stops_at_the_limit(partition: Partition) -> None:
    """Entries already there need no room; `trim` makes room."""
    assert await partition.restore("1-0", "2-0", "3-0", limit=2) == [b"FULL", 2, 0]
    assert await partition.restore("1-0", "2-0", limit=2) == [b"OK", 0, 2]
    assert await partition.restore("3-0", limit=2, on_full="trim") == [b"OK", 1, 0]


# -- publish_unseen -------------------------------------------------------------------------------------------------


async def test_publish_unseen_appends_each_id_once(partition: Partition) -> None:
    """This holds within one call and across calls; the dedup keys are those of `publish_once`."""
    assert await partition.unseen("a", "b", "a") == [b"OK", 2, 1]
    assert await partition.unseen("a", "c") == [b"OK", 1, 1]
    ids = await partition.ids()
    for name, entry_id in zip("abc", ids, strict=True):
        key = partition.keys.dedup("orders", 3, name)
        assert (await partition.call("GET", key)).decode() == entry_id
        assert 0 < await partition.call("PTTL", key) <= 60_000


async def test_publish_unseen_to_a_full_partition_stops_at_the_limit(partition: Partition) -> None:
    """A message that was not stored leaves no dedup key; `trim` makes room."""
    assert await partition.unseen("a", "b", limit=1) == [b"FULL", 1, 0]
    assert await partition.call("EXISTS", partition.keys.dedup("orders", 3, "b")) == 0
    assert await partition.unseen("a", "b", limit=1, on_full="trim") == [b"OK", 1, 1]
