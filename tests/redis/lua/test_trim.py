"""trim_partition: what every group has settled goes, what any of them needs stays."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import TRIM_PARTITION
from rsmq.redis.streams import trim

DAY = 86_400_000


class Partition:
    """One partition, its groups, and questions about its keys."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.stream, self.marks = keys.stream("orders", 3), keys.marks("orders", 3)
        self.removed = keys.removed("orders", 3)
        self.parts = keys.retry, keys.errors, keys.cancels, keys.cancelled, keys.lease

    async def call(self, *command: Any) -> Any:
        return await self.client.execute_command(*command)

    async def fill(self, count: int) -> list[bytes]:
        return await self.client.pipelined([("XADD", self.stream, "*", "data", "x")] * count)

    async def group(self, name: str, *, read: int, settle: int) -> None:
        """A group that has read so many entries and settled the first of them."""
        await self.call("XGROUP", "CREATE", self.stream, name, "0", "MKSTREAM")
        if read:
            reply = await self.call("XREADGROUP", "GROUP", name, "me", "COUNT", read, "STREAMS", self.stream, ">")
            ids = [entry for entry, _ in reply[0][1]][:settle]
            if ids:
                await self.call("XACK", self.stream, name, *ids)

    async def park(self, group: str, *ids: bytes) -> None:
        for entry in ids:
            await self.call("ZADD", self.retry(group), 1, entry + b"|1")

    def retry(self, group: str) -> str:
        return self.keys.retry("orders", 3, group)

    async def trim(self, *groups: str, keep_length: int = 0, keep_age_ms: int = 0, archive: str = "off") -> Any:
        keys = [self.stream, self.marks, self.keys.archived("orders", 3), self.removed]
        for group in groups:
            keys += [part("orders", 3, group) for part in self.parts]
        return await TRIM_PARTITION(self.client, keys, (keep_age_ms, keep_length, 1, archive, *groups))

    async def left(self) -> list[bytes]:
        return [entry for entry, _ in await self.call("XRANGE", self.stream, "-", "+")]


@pytest.fixture
def partition(client: Client, keys: Keys) -> Partition:
    """An empty partition."""
    return Partition(client, keys)


async def test_trim_stops_at_the_slowest_group(partition: Partition) -> None:
    """One group has settled 8, the other 5: 5 entries are removed, and a second call removes none."""
    ids = await partition.fill(10)
    await partition.group("fast", read=10, settle=8)
    await partition.group("slow", read=5, settle=5)
    assert await partition.trim("fast", "slow") == [
        b"OK",
        5,
        ids[4].rpartition(b"-")[0] + b"-%d" % (int(ids[4].rpartition(b"-")[2]) + 1),
        0,
    ]
    assert await partition.left() == ids[5:]
    assert (await partition.trim("fast", "slow"))[1] == 0
    assert await partition.left() == ids[5:]


async def test_trim_keeps_pending_and_parked_entries(partition: Partition) -> None:
    """What one group has pending and another has parked stays, and what is settled between goes."""
    ids = await partition.fill(10)
    await partition.group("a", read=10, settle=6)
    await partition.group("b", read=10, settle=10)
    await partition.park("b", ids[7], ids[3])
    for removed in (5, 0):
        assert (await partition.trim("a", "b"))[:3] == [b"OK", removed, ids[3]]
    assert await partition.left() == [ids[3], *ids[6:]]
    await partition.call("DEL", partition.retry("b"))
    assert (await partition.trim("a", "b"))[1] == 1
    assert await partition.left() == ids[6:]


async def test_trim_of_a_settled_stream_without_limits_empties_it(partition: Partition) -> None:
    """The group keeps its position."""
    await partition.fill(10)
    await partition.group("a", read=10, settle=10)
    for removed in (10, 0):
        assert (await partition.trim("a"))[:2] == [b"OK", removed]
    assert await partition.left() == []
    (later,) = await partition.fill(1)
    reply = await partition.call("XREADGROUP", "GROUP", "a", "me", "STREAMS", partition.stream, ">")
    assert [entry for entry, _ in reply[0][1]] == [later]


async def test_trim_with_an_unknown_group_removes_nothing(partition: Partition) -> None:
    """The group was created after the caller read the list: the caller has to read it again."""
    ids = await partition.fill(3)
    await partition.group("a", read=3, settle=3)
    await partition.group("b", read=0, settle=0)
    for _ in range(2):
        assert await partition.trim("a") == [b"GROUPS_CHANGED"]
    assert await partition.left() == ids
    assert (await partition.trim("a", "b", "gone"))[:2] == [b"OK", 0]


async def test_trim_without_a_group_removes_nothing(partition: Partition) -> None:
    """The first group may want all entries."""
    ids = await partition.fill(3)
    for _ in range(2):
        assert await partition.trim() == [b"NO_GROUPS"]
    assert await partition.left() == ids


async def test_trim_with_too_many_parked_messages_of_unknown_attempts_removes_nothing(partition: Partition) -> None:
    """More than 5 000 parked messages are not read in one call, and cannot be looked for: the reply names the group."""
    ids = await partition.fill(2)
    await partition.group("a", read=2, settle=2)
    pairs = [part for number in range(5001) for part in (number, b"%s|%d" % (ids[1], number))]
    await partition.call("ZADD", partition.retry("a"), *pairs)
    for _ in range(2):
        assert await partition.trim("a") == [b"TOO_MANY_PARKED", b"a"]
    assert await partition.left() == ids


@pytest.mark.parametrize("most", [3, 1000])
async def test_trim_around_more_parked_messages_than_one_call_reads(partition: Partition, most: int) -> None:
    """Each entry is looked for under every number of attempts up to the noted one, in the pages that this allows."""
    ids = await partition.fill(60)
    await partition.group("a", read=60, settle=60)
    await partition.group("b", read=60, settle=59)
    kept = {ids[0]: 0, ids[7]: 1, ids[20]: most // 2, ids[21]: min(most, 999), ids[22]: min(most, 1000), ids[40]: most}
    others = [part for number in range(1, 5001) for part in (number, b"%d-1|1" % number)]
    pairs = [part for entry, attempts in kept.items() for part in (1, b"%s|%d" % (entry, attempts))]
    await partition.call("ZADD", partition.retry("a"), *others, *pairs)
    lease = partition.keys.lease("orders", 3, "a")
    for unusable in ("", "many", "1001"):
        await partition.call("HSET", lease, "most_charged", unusable)
        assert await partition.trim("a", "b") == [b"TOO_MANY_PARKED", b"a"]
    await partition.call("HSET", lease, "most_charged", most)
    for removed in (60 - len(kept) - 1, 0):
        assert await cut_all(partition, "a", "b") == removed
        assert await partition.left() == [*kept, ids[59]]


async def test_trim_with_a_required_archive_stops_at_the_slowest_archive(partition: Partition) -> None:
    """Nothing is removed until an archive has committed; with `off` none of them counts."""
    ids = await partition.fill(10)
    await partition.group("a", read=10, settle=8)
    archived = partition.keys.archived("orders", 3)
    assert (await partition.trim("a", archive="required"))[:2] == [b"OK", 0]
    await partition.call("HSET", archived, "nightly", ids[4], "other", ids[2])
    for removed in (3, 0):
        assert (await partition.trim("a", archive="required"))[1] == removed
    assert await partition.left() == ids[3:]
    await partition.call("HSET", archived, "other", ids[9])
    assert (await partition.trim("a", archive="required"))[1] == 2
    await partition.call("HSET", archived, "nightly", ids[9])
    assert await partition.trim("a", archive="required") == [b"OK", 3, ids[8], 0]
    await partition.call("DEL", archived)
    assert (await partition.trim("a", archive="off"))[1] == 0
    assert await partition.left() == ids[8:]


async def test_trim_keeps_young_settled_entries_up_to_keep_length(partition: Partition) -> None:
    """Marks count the entries, so some more may be kept."""
    kept = 0
    await partition.group("a", read=0, settle=0)
    for _ in range(20):
        await partition.fill(100)
        await partition.call("XGROUP", "SETID", partition.stream, "a", "$")
        assert (await partition.trim("a", keep_length=500, keep_age_ms=DAY))[0] == b"OK"
        kept = len(await partition.left())
    assert 500 <= kept <= 700
    assert (await partition.trim("a", keep_length=500, keep_age_ms=DAY))[1] == 0
    assert await partition.call("ZCARD", partition.marks) <= 8


async def test_trim_removes_settled_entries_older_than_keep_age(partition: Partition) -> None:
    """The number of entries does not matter; unsettled ones stay."""
    for number in range(1, 6):
        await partition.call("XADD", partition.stream, f"{number}-0", "data", "x")
    young = await partition.fill(2)
    await partition.group("a", read=3, settle=3)
    for removed in (3, 0):
        assert (await partition.trim("a", keep_length=1000, keep_age_ms=DAY))[1] == removed
    assert await partition.left() == [b"4-0", b"5-0", *young]


FAR = 2**48 + 12345
LAST = 2**64 - 1
IDS = (f"{FAR - 1}-9", f"{FAR}-{2**53}", f"{FAR}-{2**53 + 1}", f"{FAR}-{LAST}", f"{FAR + 1}-0")


@pytest.mark.parametrize("holder", ["group", "archive"])
@pytest.mark.parametrize(
    ("position", "left"),
    [
        (f"{FAR - 1}-{LAST}", IDS[1:]),  # as of a group that begins at a time
        (f"{FAR}-{2**53}", IDS[2:]),
        (f"{FAR}-{2**53 + 1}", IDS[3:]),
        (f"{FAR}-{LAST}", IDS[4:]),
        (f"{LAST}-{LAST}", ()),
    ],
)
async def test_trim_behind_a_position_beyond_53_bits_is_exact(
    partition: Partition, holder: str, position: str, left: tuple[str, ...]
) -> None:
    """A group that has not read yet, and an archive, at any position that the server accepts."""
    for entry in IDS:
        await partition.call("XADD", partition.stream, entry, "data", "x")
    await partition.call("XGROUP", "CREATE", partition.stream, "late", position if holder == "group" else "$")
    await partition.call("HSET", partition.keys.archived("orders", 3), "nightly", position)
    status, trimmed, *_ = await partition.trim("late", archive="required" if holder == "archive" else "off")
    assert (status, trimmed) == (b"OK", len(IDS) - len(left))
    assert await partition.left() == [entry.encode() for entry in left]


async def test_trim_beside_a_group_with_a_name_of_bytes_goes_on(partition: Partition) -> None:
    """Another client may have named its group anything."""
    await partition.fill(3)
    await partition.call("XGROUP", "CREATE", partition.stream, b"\xff", "$")
    assert (await trim(partition.client, partition.keys, "orders", 3, keep_age_ms=0, keep_length=0, exact=True)) == (
        b"OK", 3, "", False,
    )  # fmt: skip


async def cut_all(partition: Partition, *groups: str, **limits: Any) -> int:
    """Trim until there is no other page; returns how many were removed."""
    removed, is_more = 0, True
    while is_more:
        word, count, _, is_more = await partition.trim(*groups, **limits)
        assert word == b"OK"
        removed += count
    return removed


async def test_trim_around_a_message_that_waits_removes_what_it_would_without_it(partition: Partition) -> None:
    """One pending and one parked message hold no others: pages of what is settled between them go, and are counted as
    removed by retention."""
    ids = await partition.fill(2500)
    await partition.group("a", read=2500, settle=0)
    await partition.group("b", read=2500, settle=2500)
    await partition.call("XACK", partition.stream, "a", *ids[1:1200], *ids[1201:])
    await partition.park("b", ids[700])
    assert await cut_all(partition, "a", "b") == 2497
    assert await partition.left() == [ids[0], ids[700], ids[1200]]
    assert await partition.call("HGET", partition.removed, "own") == b"2497"
    info = await partition.call("XINFO", "GROUPS", partition.stream)
    assert [row[row.index(b"lag") + 1] for row in info] == [0, 0]
    later = await partition.fill(5)
    assert await cut_all(partition, "a", "b") == 0
    assert await partition.left() == [ids[0], ids[700], ids[1200], *later]


async def test_trim_around_what_waits_keeps_as_many_as_the_limits_say(partition: Partition) -> None:
    """A waiting message changes nothing about what is kept for a replay."""
    ids = await partition.fill(1)
    await partition.group("a", read=1, settle=0)
    for _ in range(20):
        await partition.fill(100)
        await partition.call("XGROUP", "SETID", partition.stream, "a", "$")
        await cut_all(partition, "a", keep_length=500, keep_age_ms=DAY)
    left = await partition.left()
    assert left[0] == ids[0]
    assert 500 < len(left) <= 701


async def test_trim_around_what_waits_stops_at_positions_and_archives(partition: Partition) -> None:
    """What another group has not been delivered, and what a required archive has not committed, stays."""
    ids = await partition.fill(10)
    await partition.group("a", read=10, settle=10)
    await partition.call("XGROUP", "CREATE", partition.stream, "b", "0")
    await partition.call("XREADGROUP", "GROUP", "b", "me", "COUNT", 6, "STREAMS", partition.stream, ">")
    await partition.call("XACK", partition.stream, "b", *ids[1:6])
    await partition.call("HSET", partition.keys.archived("orders", 3), "nightly", ids[3])
    assert await cut_all(partition, "a", "b", archive="required") == 3
    assert await partition.left() == [ids[0], *ids[4:]]
    assert await cut_all(partition, "a", "b") == 2
    assert await partition.left() == [ids[0], *ids[6:]]


async def test_trim_around_pending_ids_without_entries_removes_nothing_that_waits(partition: Partition) -> None:
    """Another client has deleted many pending entries: the pending list has more ids than a page has entries."""
    ids = await partition.fill(300)
    await partition.group("a", read=300, settle=0)
    await partition.call("XDEL", partition.stream, *ids[1:250])
    await partition.call("XACK", partition.stream, "a", *ids[250:260], *ids[270:299])
    assert await cut_all(partition, "a") == 39
    assert await partition.left() == [ids[0], *ids[260:270], ids[299]]


async def test_trim_around_what_waits_forgets_the_notes_of_what_goes(partition: Partition) -> None:
    """Errors of failed attempts and marks of cancelled messages go with their messages, in every group."""
    ids = await partition.fill(4)
    await partition.group("a", read=4, settle=0)
    await partition.call("XACK", partition.stream, "a", *ids[1:3])
    _, errors, cancels, cancelled, _ = (part("orders", 3, "a") for part in partition.parts)
    for each in (ids[0], ids[1]):
        await partition.call("HSET", errors, each, "1 5 failed", each + b"|past", "[]")
        await partition.call("HSET", cancels, each, "asked")
        await partition.call("ZADD", cancelled, 1, each)
    assert await cut_all(partition, "a") == 2
    assert sorted(await partition.call("HKEYS", errors)) == [ids[0], ids[0] + b"|past"]
    assert await partition.call("HKEYS", cancels) == [ids[0]]
    assert await partition.call("ZRANGE", cancelled, 0, -1) == [ids[0]]


async def test_trim_around_what_waits_goes_on_where_it_has_been(partition: Partition) -> None:
    """Each call looks only at what is new, until most of what waited there is settled: then it begins anew."""
    ids = await partition.fill(3000)
    await partition.group("a", read=3000, settle=0)
    await cut_all(partition, "a")
    assert await partition.call("HMGET", partition.removed, "cut", "left") != [None, None]
    await partition.call("XACK", partition.stream, "a", *ids[1:900])
    assert await cut_all(partition, "a") == 0
    await partition.call("XACK", partition.stream, "a", *ids[900:2990])
    assert await cut_all(partition, "a") == 2989
    assert await partition.left() == [ids[0], *ids[2990:]]


async def test_trim_around_what_waits_leaves_few_settled_ones(partition: Partition) -> None:
    """What was settled after it has been there goes, however little it is: never more stay than wait."""
    ids = await partition.fill(100)
    await partition.group("a", read=100, settle=0)
    await cut_all(partition, "a")
    await partition.call("XACK", partition.stream, "a", *ids[1:98])
    assert await cut_all(partition, "a") == 97
    assert await partition.left() == [ids[0], *ids[98:]]
