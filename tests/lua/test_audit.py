"""The scripts of the audit: keys before, one call, keys after; with a stale epoch; and called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.script import COUNT_REMOVED, RESTORE_PENDING, TRIM_PARTITION
from tests.lua.test_settle import EPOCH, GROUP, ME, STALE, Partition


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition that `me` owns."""
    return await Partition(client, keys).prepare()


async def restore(partition: Partition, *pairs: Any, epoch: str = EPOCH, really: int = 1) -> Any:
    """Call it."""
    keys = (partition.stream, partition.lease)
    return await RESTORE_PENDING(partition.client, keys, (ME, epoch, GROUP, really, *pairs))


async def test_what_is_in_hand_is_pending_again(partition: Partition) -> None:
    """The consumer is deleted: told first, then restored with the attempts it was charged; a second call finds none."""
    first, second, third = await partition.deliver(3)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    assert await restore(partition, first, 1, second, 3, really=0) == [b"OK", first, second]
    assert await partition.pending() == {}
    assert await restore(partition, first, 1, second, 3) == [b"OK", first, second]
    assert await partition.pending() == {first: (ME, 1), second: (ME, 3)}
    assert await restore(partition, first, 1, second, 3) == [b"OK"]
    assert third not in await partition.pending()


async def test_what_is_not_ours_is_left_alone(partition: Partition) -> None:
    """A stale epoch, an entry that is gone, and what the group is given once more anyway: nothing changes."""
    gone, there, again = await partition.deliver(3)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    await partition.call("XDEL", partition.stream, gone)
    await partition.call("XGROUP", "SETID", partition.stream, GROUP, there)
    before = await partition.state()
    assert await restore(partition, there, 1, epoch="6") == STALE
    assert await restore(partition, gone, 1, again, 1) == [b"OK"]
    assert await partition.state() == before


async def count(client: Client, keys: Keys, group: str = GROUP) -> int:
    """Ask; returns the number only."""
    reply = await COUNT_REMOVED(client, (keys.stream("orders", 3), keys.removed("orders", 3)), (group, ME))
    return int(reply[0])


async def test_what_others_remove_is_counted(client: Client, keys: Keys, partition: Partition) -> None:
    """XTRIM and XDEL by others are told to each group once; what was before the first question is not."""
    ids = await partition.deliver(10)
    await partition.call("XDEL", partition.stream, ids[0])
    assert await count(client, keys) == 0
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 5)
    await partition.call("XDEL", partition.stream, ids[-1])
    assert [await count(client, keys), await count(client, keys)] == [5, 0]
    assert await count(client, keys, "audit") == 0
    await partition.call("XTRIM", partition.stream, "MAXLEN", "=", 0)
    assert [await count(client, keys, "audit"), await count(client, keys)] == [4, 4]


async def test_what_others_have_read_is_counted(client: Client, keys: Keys, partition: Partition) -> None:
    """Pending with others than the owner."""
    await partition.deliver(2)
    await partition.deliver(3, "other")
    reply = await COUNT_REMOVED(client, (keys.stream("orders", 3), keys.removed("orders", 3)), (GROUP, ME))
    assert reply[4] == 3


async def test_what_retention_removes_is_not_counted(client: Client, keys: Keys, partition: Partition) -> None:
    """It notes what it has taken itself, in the same script."""
    ids = await partition.deliver(10)
    assert await count(client, keys) == 0
    await partition.call("XACK", partition.stream, GROUP, *ids)
    trim = (partition.stream, keys.marks("orders", 3), keys.archived("orders", 3), keys.removed("orders", 3))
    assert (await TRIM_PARTITION(client, (*trim, partition.retry), (0, 0, 1, "off", GROUP)))[1] == 10
    assert await count(client, keys) == 0
    assert await partition.call("XLEN", partition.stream) == 0


async def test_a_stream_that_was_made_anew_is_a_new_beginning(client: Client, keys: Keys, partition: Partition) -> None:
    """Deleted and made again, it has lost fewer than before: nothing is reported until somebody removes again."""
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
