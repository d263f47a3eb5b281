"""The scripts of the outbox: keys before, one call, keys after; and called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.errors import BrokerError
from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields, unpack_fields
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import LEAD_WORK, RELAY_ROWS

A, B, C, D = (bytes([number]) * 16 for number in range(1, 5))


class Partition:
    """One partition and questions about its keys."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        parts = (keys.stream, keys.delayed, keys.relayed, keys.unique)
        self.names = tuple(part("orders", 3) for part in parts)
        self.turn = 0

    async def call(self, *command: Any) -> Any:
        return await self.client.execute_command(*command)

    async def relay(
        self, *ids: bytes, deleted: bytes = b"", turn: str = "", limit: int = 0, on_full: str = "reject", due: Any = ""
    ) -> Any:
        self.turn += 1
        rows = [part for each in ids for part in (each, due, 2, "data", each)]
        args = ("db", turn or f"{self.turn:032d}", limit, on_full, deleted, *rows)
        return await RELAY_ROWS(self.client, self.names, args)

    async def data(self) -> list[bytes]:
        return [fields[1] for _, fields in await self.call("XRANGE", self.names[0], "-", "+")]


@pytest.fixture
def partition(client: Client, keys: Keys) -> Partition:
    """An empty partition."""
    return Partition(client, keys)


async def test_relay_rows_appends_a_row_again_only_when_it_is_known_to_be_deleted(partition: Partition) -> None:
    """Rows that another call has appended are skipped, in any order, until a call says that they are deleted."""
    assert await partition.relay(B, C) == [b"OK", 2, 0, B + C]
    assert await partition.relay(A, B, C) == [b"OK", 1, 2, B + C + A]
    assert await partition.data() == [B, C, A]
    assert await partition.relay(D, deleted=A + B) == [b"OK", 1, 0, C + D]
    assert await partition.relay(deleted=C + D) == [b"OK", 0, 0, b""]
    assert await partition.relay(A, A) == [b"OK", 1, 1, A]


async def test_relay_rows_refuses_an_earlier_turn(partition: Partition) -> None:
    """A late call of an earlier leader, and the late twin of a call, change nothing."""
    assert await partition.relay(A, turn="2") == [b"OK", 1, 0, A]
    before = await partition.call("HGETALL", partition.names[2])
    for late in ("1", "2"):
        assert await partition.relay(B, deleted=A, turn=late) == [b"STALE"]
    assert await partition.call("HGETALL", partition.names[2]) == before
    assert await partition.data() == [A]


async def test_relay_rows_without_room_appends_a_prefix(partition: Partition) -> None:
    """What has no room is not counted, and is appended by a later call. With `trim` there is always room."""
    assert await partition.relay(A, B, C, limit=2) == [b"FULL", 2, 0, A + B]
    assert await partition.relay(A, B, C, limit=2) == [b"FULL", 0, 2, A + B]
    assert await partition.relay(C, limit=2, on_full="trim") == [b"OK", 1, 0, A + B + C]


async def test_relay_rows_delays_a_row_with_a_due_time(partition: Partition) -> None:
    """It waits beside the stream, packed, also if it is overdue: there the order of due times holds."""
    assert await partition.relay(A, due=4_000_000_000_000) == [b"OK", 1, 0, A]
    assert await partition.relay(C, B, due=1) == [b"OK", 2, 0, A + C + B]
    flat = await partition.call("ZRANGE", partition.names[1], 0, -1, "WITHSCORES")
    found = [(unpack_fields(packed)[1], int(float(due))) for packed, due in zip(flat[::2], flat[1::2], strict=True)]
    assert found == [(A, 4_000_000_000_000)]
    assert await partition.data() == [C, B], "what is overdue is released at the end of the call, in order"


async def test_relay_rows_releases_what_is_due_before_a_row_without_a_time(partition: Partition) -> None:
    """Also what another publisher has delayed, and only what is due. A full stream keeps the row out, too."""
    for number, due in ((1, 5), (2, 3), (3, 4_000_000_000_000)):
        packed = pack_fields(["data", str(number), "id", str(number)])
        await partition.call("ZADD", partition.names[1], due, packed)
    assert await partition.relay(A) == [b"OK", 1, 0, A]
    assert await partition.data() == [b"2", b"1", A]
    await partition.call("ZADD", partition.names[1], 6, pack_fields(["data", "4"]))
    assert await partition.relay(A, B, limit=4) == [b"FULL", 0, 1, A]
    assert await partition.data() == [b"2", b"1", A, b"4"]


async def test_relay_rows_moves_a_bounded_number_before_a_row(partition: Partition) -> None:
    """A backlog of due messages takes several calls: until all are in the stream the row waits."""
    pairs = [part for number in range(1500) for part in (number, pack_fields(["data", str(number)]))]
    await partition.call("ZADD", partition.names[1], *pairs)
    assert await partition.relay(A) == [b"OK", 0, 0, b""]
    assert await partition.relay(A) == [b"OK", 1, 0, A]
    assert await partition.data() == [*[str(number).encode() for number in range(1500)], A]


async def test_relay_rows_remembers_what_it_has_appended_before_an_error(partition: Partition) -> None:
    """An error in between does not make the next call append the first rows again."""
    rows = [A, "", 2, "data", A, B, "", 1, "half a pair"]
    with pytest.raises(BrokerError):
        await RELAY_ROWS(partition.client, partition.names, ("db", f"{1:032d}", 0, "reject", "", *rows))
    partition.turn = 1
    assert await partition.relay(A) == [b"OK", 0, 1, A]


async def _now_ms(client: Client) -> int:
    seconds, micros = await client.execute_command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def test_lead_work_grants_one_owner_at_a_time(client: Client, keys: Keys) -> None:
    """The owner keeps its epoch; each change has a higher one, also when the hash was lost."""
    names = (keys.leader("work"),)

    async def bid(owner: str, ttl: int = 60_000, epoch: int = 0) -> Any:
        return await LEAD_WORK(client, names, (owner, ttl, epoch))

    word, epoch = await bid("m1")
    assert (word, await bid("m1", epoch=epoch)) == (b"OK", [b"OK", epoch])
    assert (await bid("m1"))[0] == b"HELD", "another process with the same member id"
    assert await bid("m1", 0) == [b"OK", epoch], "and it releases nothing"
    word, left = await bid("m2")
    assert word == b"HELD"
    assert 0 < left <= 60_000
    assert await bid("m2", 0) == [b"OK", epoch]  # releases nothing: another one leads
    assert (await bid("m2"))[0] == b"HELD"
    await bid("m1", 0, epoch)
    word, second = await bid("m2")
    assert (word, second > epoch) == (b"OK", True)
    await client.execute_command("UNLINK", *names)
    while await _now_ms(client) < second:  # two owners in one millisecond push the epoch ahead of the clock
        pass
    assert (await bid("m3"))[1] >= second
    await client.execute_command("HSET", *names, "until_ms", 9_000_000_000_000)  # the clock has jumped
    assert (await bid("m4"))[0] == b"OK"
