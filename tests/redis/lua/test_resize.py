"""The scripts of a resize: keys before, call, keys after; and called twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rsmq.errors import PartitionSealed
from rsmq.model.keys import Keys
from rsmq.model.layout import RESIZED, Layout, single
from rsmq.model.packing import pack_fields
from rsmq.redis.client.connector import Client
from rsmq.redis.layouts import are_finished
from rsmq.redis.scripts import ARE_FINISHED, MOVE_DELAYED, OK, RESET_GROUP, RESIZE_TOPIC, SEAL_PARTITION

pytestmark = pytest.mark.anyio
BEFORE = single(2).with_partitions(4)


async def resize(client: Client, keys: Keys, layout: Layout = BEFORE, read: str = "") -> list[bytes]:
    """The call for a topic with two partitions that become four."""
    names = [keys.topic("t")]
    for number in range(2):
        names += [keys.stream("t", number), keys.removed("t", number)]
    names += [keys.stream("t", number) for number in range(2, 6)]
    args = (read or layout.stored, layout.sealed().stored, layout.sealed().partitions, 2)
    return list(await RESIZE_TOPIC(client, names, args))


async def prepare(client: Client, keys: Keys, numbers: Sequence[int] = range(6)) -> None:
    """The topic with the added block, and a group in these partitions."""
    await client.execute_command("HSET", keys.topic("t"), "partitions", 2, "layout", BEFORE.stored)
    for number in numbers:
        await client.execute_command("XGROUP", "CREATE", keys.stream("t", number), "g", "0", "MKSTREAM")


async def test_resize_topic_seals_all_in_one_step(client: Client, keys: Keys) -> None:
    """The old partitions refuse messages, also one that had no stream; a second call meets another layout."""
    assert await resize(client, keys) == [b"GONE"]
    await prepare(client, keys, range(1, 6))
    entry = await client.execute_command("XADD", keys.stream("t", 1), "*", "data", "1")
    assert await resize(client, keys) == [OK]
    for number in range(2):
        with pytest.raises(PartitionSealed):
            await client.execute_command("XADD", keys.stream("t", number), "*", "data", "2")
    found = await client.execute_command("HMGET", keys.topic("t"), "partitions", "layout")
    assert found == [RESIZED.encode(), BEFORE.sealed().stored.encode()]
    assert await resize(client, keys) == [b"CHANGED"]
    assert await client.execute_command("XLEN", keys.stream("t", 1)) == 1
    assert await client.execute_command("HGET", keys.removed("t", 1), "end") == entry


async def test_resize_topic_changes_nothing_where_something_would_be_lost(client: Client, keys: Keys) -> None:
    """Another layout, a group that is not in each new partition."""
    await prepare(client, keys, range(5))
    assert await resize(client, keys, read="other") == [b"CHANGED"]
    assert await resize(client, keys) == [b"GROUPS", b"g"]
    assert await client.execute_command("XADD", keys.stream("t", 1), "*", "data", "2")
    assert await client.execute_command("HGET", keys.topic("t"), "partitions") == b"2"


async def test_are_finished_looks_at_what_is_left(client: Client, keys: Keys) -> None:
    """Neither an unread message nor one that is pending; a group of after a trim is finished, too."""
    await prepare(client, keys)
    stream = keys.stream("t", 1)
    entry = await client.execute_command("XADD", stream, "*", "data", "1")
    names = (keys.stream("t", 0), stream, keys.topic("t"))
    assert await ARE_FINISHED(client, names, ("g", RESIZED)) == 1, "not before the layout says so"
    assert await resize(client, keys) == [OK]
    assert await ARE_FINISHED(client, names, ("g", RESIZED)) == 2
    assert not await are_finished(client, keys, "t", [0, 1], "g", is_read=True)
    await client.execute_command("XREADGROUP", "GROUP", "g", "c", "STREAMS", stream, ">")
    assert await ARE_FINISHED(client, names, ("g", RESIZED)) == 2
    assert await are_finished(client, keys, "t", [0, 1], "g", is_read=True)
    await client.execute_command("XACK", stream, "g", entry)
    assert await ARE_FINISHED(client, names, ("g", RESIZED)) == 0
    assert await ARE_FINISHED(client, names, ("unknown", RESIZED)) == 1
    await client.execute_command("XTRIM", stream, "MAXLEN", 0)
    for number in range(2):
        await client.execute_command("XGROUP", "CREATE", keys.stream("t", number), "late", "0")
        await client.execute_command("XGROUP", "CREATE", keys.stream("t", number), "end", "$")
    assert await are_finished(client, keys, "t", [0, 1], "late")
    assert await are_finished(client, keys, "t", [0, 1], "end")


async def test_are_finished_sets_a_lost_seal_again(client: Client, keys: Keys) -> None:
    """The topic was made again after FLUSHALL: its first partitions take messages until then."""
    await prepare(client, keys)
    await client.execute_command("HSET", keys.topic("t"), "partitions", RESIZED)
    assert await are_finished(client, keys, "t", [0, 1], "g")
    with pytest.raises(PartitionSealed):
        await client.execute_command("XADD", keys.stream("t", 0), "*", "data", "2")
    await client.execute_command("DEL", keys.stream("t", 1))
    assert not await are_finished(client, keys, "t", [0, 1], "g")
    assert await client.execute_command("EXISTS", keys.stream("t", 1)) == 0


async def test_move_delayed_moves_once_with_the_name(client: Client, keys: Keys) -> None:
    """What was cancelled meanwhile does not come back; a record of another message stays."""
    source, target = keys.delayed("t", 0), keys.delayed("t", 3)
    names = (source, target, keys.unique("t", 0), keys.unique("t", 3))
    plain, named = pack_fields(["id", "a"]), pack_fields(["unique", "n", "id", "b"])
    packed = "return redis.call('HSET', KEYS[1], 'n', cmsgpack.pack({'settled', 'b', '', ARGV[1]}))"
    for content, score in ((plain, "5"), (named, "7.25")):
        await client.execute_command("ZADD", source, score, content)
    for own, where in ((b"other", 0), (named, 3)):
        await client.execute_command("EVAL", packed, 1, keys.unique("t", 0), own)
        await client.execute_command("ZADD", source, "7.25", named)
        assert await MOVE_DELAYED(client, names, (plain, named, b"gone")) == (2 if where == 0 else 1)
        assert await client.execute_command("EXISTS", keys.unique("t", where)) == 1
    assert await client.execute_command("ZRANGE", target, 0, -1, "WITHSCORES") == [plain, b"5", named, b"7.25"]
    assert await client.execute_command("EXISTS", source, keys.unique("t", 0)) == 0
    assert await MOVE_DELAYED(client, names, (plain,)) == 0


async def test_reset_group_resets_all_partitions_of_a_call(client: Client, keys: Keys) -> None:
    """Each gets a new epoch, and nothing of the old run is left."""
    names = list[str]()
    for number in range(2):
        at = ("t", number, "g")
        names += [keys.stream("t", number), keys.lease(*at), keys.retry(*at), keys.cancels(*at), keys.cancelled(*at)]
        names += [keys.waits(*at), keys.calls(*at)]
        await client.execute_command("XADD", keys.stream("t", number), "*", "data", "1")
        await client.execute_command("XGROUP", "CREATE", keys.stream("t", number), "g", "$")
        await client.execute_command("HSET", keys.lease(*at), "owner", "m", "epoch", "7")
        await client.execute_command("ZADD", keys.retry(*at), 1, "1-1|1")
    assert await RESET_GROUP(client, names, ("g", "0")) == OK
    for number in range(2):
        owner, epoch = await client.execute_command("HMGET", keys.lease("t", number, "g"), "owner", "epoch")
        assert (owner, int(epoch)) == (b"", 8)
        assert await client.execute_command("EXISTS", keys.retry("t", number, "g")) == 0
        found = await client.execute_command("XREADGROUP", "GROUP", "g", "c", "STREAMS", keys.stream("t", number), ">")
        assert len(found[0][1]) == 1


async def test_seal_partition_seals_one_whose_followers_are_there(client: Client, keys: Keys) -> None:
    """Not where a stream or a group is missing: then nothing has changed. Twice is once."""
    names = [keys.stream("t", 0), keys.removed("t", 0), keys.stream("t", 2), keys.stream("t", 4)]
    assert await SEAL_PARTITION(client, names, ("seal",)) == [b"GONE", keys.stream("t", 2).encode()]
    assert await SEAL_PARTITION(client, names, ("make",)) == [OK]
    assert await client.execute_command("EXISTS", *names) == 2
    await client.execute_command("XGROUP", "CREATE", keys.stream("t", 0), "g", "0", "MKSTREAM")
    assert await SEAL_PARTITION(client, names, ("seal",)) == [b"GROUPS", b"g"]
    for number in (2, 4):
        await client.execute_command("XGROUP", "CREATE", keys.stream("t", number), "g", "0")
    entry = await client.execute_command("XADD", keys.stream("t", 0), "*", "data", "1")
    for _ in range(2):
        assert await SEAL_PARTITION(client, names, ("seal",)) == [OK]
        assert await client.execute_command("HGET", keys.removed("t", 0), "end") == entry
        with pytest.raises(PartitionSealed):
            await client.execute_command("XADD", keys.stream("t", 0), "*", "data", "2")
    assert not await are_finished(client, keys, "t", [0], "g")
    assert await ARE_FINISHED(client, (keys.stream("t", 0),), ("g", "")) == 1
    await client.execute_command("XGROUP", "SETID", keys.stream("t", 0), "g", entry)
    assert await ARE_FINISHED(client, (keys.stream("t", 0),), ("g", "")) == 0
