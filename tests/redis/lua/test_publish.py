"""The scripts that publish: keys before, one call, keys after; and called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import DELAY_MESSAGE, PUBLISH_MESSAGES, PUBLISH_ONCE, RELEASE_DELAYED

WINDOW = 60_000


class Partition:
    """One partition and questions about its keys."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.stream, self.delayed = keys.stream("orders", 3), keys.delayed("orders", 3)
        self.unique = keys.unique("orders", 3)

    async def call(self, *command: Any) -> Any:
        return await self.client.execute_command(*command)

    async def entries(self) -> list[list[bytes]]:
        return [fields for _, fields in await self.call("XRANGE", self.stream, "-", "+")]

    async def publish(self, *messages: list[str], limit: int = 0, on_full: str = "reject") -> list[Any]:
        args = [part for fields in messages for part in (len(fields), *fields)]
        return await PUBLISH_MESSAGES(self.client, (self.stream,), (limit, on_full, *args))

    async def once(self, message_id: str, *, since: str = "", limit: int = 0, on_full: str = "reject") -> Any:
        args = (limit, on_full, WINDOW, since, message_id, "data", "x", "id", message_id)
        return await PUBLISH_ONCE(self.client, (self.stream, self.dedup(message_id)), args)

    async def delay(self, due: str, message_id: str) -> Any:
        packed = pack_fields(["data", "x", "id", message_id])
        return await DELAY_MESSAGE(
            self.client, (self.delayed, self.stream, self.dedup(message_id)), (due, WINDOW, packed)
        )

    async def release(self, limit: int = 100, *, most: int = 0, on_full: str = "reject") -> Any:
        reply = await RELEASE_DELAYED(self.client, (self.stream, self.delayed, self.unique), (limit, most, on_full))
        assert most or reply[2] == 0
        return reply if most else reply[:2]

    async def now_ms(self) -> int:
        seconds, microseconds = await self.call("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def dedup(self, message_id: str) -> str:
        return self.keys.dedup("orders", 3, message_id)


@pytest.fixture
def partition(client: Client, keys: Keys) -> Partition:
    """An empty partition."""
    return Partition(client, keys)


# -- publish_messages ---------------------------------------------------------------------------------------------


async def test_publish_messages_appends_in_order(partition: Partition) -> None:
    """Entries may have any number of fields; the reply has the last id; a second call appends again."""
    reply = await partition.publish(["data", "1"], ["data", "2", "key", "k"], ["data", "3"])
    assert reply == [3, (await partition.call("XREVRANGE", partition.stream, "+", "-", "COUNT", 1))[0][0]]
    expected = [[b"data", b"1"], [b"data", b"2", b"key", b"k"], [b"data", b"3"]]
    assert await partition.entries() == expected
    await partition.publish(["data", "1"], ["data", "2", "key", "k"], ["data", "3"])
    assert await partition.entries() == expected * 2
    assert await partition.publish() == [0, b""]


async def test_publish_messages_stops_at_the_limit(partition: Partition) -> None:
    """The reply has fewer messages than the call; a second call stores nothing."""
    messages = [["data", str(number)] for number in range(5)]
    assert (await partition.publish(*messages, limit=3))[0] == 3
    assert await partition.publish(*messages, limit=3) == [0, b""]
    assert await partition.entries() == [[b"data", b"0"], [b"data", b"1"], [b"data", b"2"]]


async def test_publish_messages_with_trim_drops_the_oldest(partition: Partition) -> None:
    """All messages are stored and the oldest nodes of the stream are removed."""
    messages = [["data", str(number)] for number in range(500)]
    for _ in range(2):
        assert (await partition.publish(*messages, limit=50, on_full="trim"))[0] == 500
        kept = await partition.entries()
        assert kept[-1] == [b"data", b"499"]
        assert 50 <= len(kept) < 250


async def test_publish_messages_with_the_largest_batch_fits_the_lua_stack(partition: Partition) -> None:
    """500 messages of 250 fields are stored in one call."""
    wide = ["data", "x", *(f"f{number}" for number in range(248))]
    assert (await partition.publish(*[wide] * 500))[0] == 500


# -- publish_once -------------------------------------------------------------------------------------------------


async def test_publish_once_called_twice_stores_one_message(partition: Partition) -> None:
    """The dedup key holds the stream id for the window; the second call returns it."""
    word, entry = await partition.once("a")
    assert word == b"OK"
    assert await partition.once("a") == [b"DUPLICATE", entry, 1]
    assert await partition.entries() == [[b"data", b"x", b"id", b"a"]]
    assert await partition.call("GET", partition.dedup("a")) == entry
    assert 0 < await partition.call("PTTL", partition.dedup("a")) <= WINDOW
    assert (await partition.once("b"))[0] == b"OK"


async def test_publish_once_finds_a_first_attempt_without_a_dedup_key(partition: Partition) -> None:
    """After a plain batch with a lost reply, the message is found after `since` and gets a dedup key."""
    _, before = await partition.publish(["data", "x", "id", "z"])
    _, entry = await partition.publish(["data", "y", "id", "c"], ["data", "x", "id", "a"])
    for _ in range(2):
        assert await partition.once("a", since=before.decode()) == [b"DUPLICATE", entry, 1]
    assert await partition.call("GET", partition.dedup("a")) == entry
    assert (await partition.once("z", since=before.decode()))[0] == b"OK"
    assert len(await partition.entries()) == 4


async def test_publish_once_to_a_full_partition_stores_nothing(partition: Partition) -> None:
    """It leaves no dedup key, so that a later try can succeed; a duplicate still counts as one."""
    assert (await partition.once("a", limit=1))[0] == b"OK"
    for _ in range(2):
        assert await partition.once("b", limit=1) == [b"FULL"]
    assert await partition.call("EXISTS", partition.dedup("b")) == 0
    assert (await partition.once("a", limit=1))[0] == b"DUPLICATE"
    assert (await partition.once("b", limit=1, on_full="trim"))[0] == b"OK"


# -- delay_message, release_delayed -------------------------------------------------------------------------------


async def test_delay_message_called_twice_keeps_the_first_due_time(partition: Partition) -> None:
    """The due time counts from the server's clock; the second call with the same id changes nothing."""
    now = await partition.now_ms()
    word, due = await partition.delay("+5000", "a")
    assert word == b"OK"
    assert 5000 <= int(due) - now < 20_000
    assert await partition.delay("+90000", "a") == [b"DUPLICATE", due, 1]
    packed = pack_fields(["data", "x", "id", "a"])
    assert await partition.call("ZRANGE", partition.delayed, 0, -1, "WITHSCORES") == [packed, due]
    assert 5000 < await partition.call("PTTL", partition.dedup("a")) <= WINDOW + 6000
    assert await partition.delay("4102444800000", "b") == [b"OK", b"4102444800000"]


async def test_release_delayed_moves_due_messages_in_order(partition: Partition) -> None:
    """They leave the set; later ones stay; a second call moves nothing more."""
    now = await partition.now_ms()
    for message_id, due in (("c", now - 1), ("a", now - 3), ("b", now - 2), ("later", now + 3_600_000)):
        await partition.delay(str(due), message_id)
    assert (await partition.release(limit=2))[0] == 2
    moved, wait = await partition.release()
    assert moved == 1
    assert 3_000_000 < wait <= 3_600_000
    assert (await partition.release())[0] == 0
    assert [fields[3] for fields in await partition.entries()] == [b"a", b"b", b"c"]
    assert await partition.call("ZCARD", partition.delayed) == 1


async def test_delayed_messages_of_one_millisecond_keep_the_order_of_their_calls(partition: Partition) -> None:
    """With any bytes, and also if one in between was removed; those of the next one come behind them."""
    names = ["z", "a", "m", "b", "y"]
    await partition.delay("8", "next")
    for name in names[:3]:
        await partition.delay("7", name)
    await partition.call("ZREM", partition.delayed, pack_fields(["data", "x", "id", "z"]))
    for name in names[3:]:
        assert await partition.delay("7", name) == [b"OK", b"7"]
    assert await partition.delay("7", "y") == [b"DUPLICATE", b"7", 1]
    await partition.release()
    assert [fields[3].decode() for fields in await partition.entries()] == [*names[1:], "next"]


async def test_release_delayed_of_an_empty_partition_creates_no_key(partition: Partition) -> None:
    """The reply says that no message waits."""
    for _ in range(2):
        assert await partition.release() == [0, -1]
    assert await partition.call("EXISTS", partition.stream, partition.delayed) == 0


@pytest.mark.parametrize("foreign", [b"junk", b"\x00\x00\x00\x09data", pack_fields(["odd"]), b"\xff" * 8])
async def test_release_delayed_with_an_unreadable_entry_moves_the_others(partition: Partition, foreign: bytes) -> None:
    """The entry of another client is moved without `data`, so that consumers bury it as malformed."""
    await partition.call("ZADD", partition.delayed, 1, foreign)
    await partition.delay("2", "a")
    assert await partition.release() == [2, -1]
    assert await partition.entries() == [[b"packed", foreign], [b"data", b"x", b"id", b"a"]]


async def test_release_moves_as_many_as_there_is_room_for(partition: Partition) -> None:
    """What is due waits, in order, until there is room; a topic that trims takes all of it."""
    for number in range(4):
        await partition.delay(str(number + 1), f"id-{number}")
    assert (await partition.release(most=3))[::2] == [3, 1]
    assert (await partition.release(most=3))[::2] == [0, 1]
    await partition.call("XTRIM", partition.stream, "MAXLEN", 2)
    assert (await partition.release(most=3))[::2] == [1, 0]
    assert [fields[3] for fields in await partition.entries()] == [b"id-1", b"id-2", b"id-3"]
    await partition.delay("1", "late")
    assert (await partition.release(most=3, on_full="trim"))[::2] == [1, 0]
