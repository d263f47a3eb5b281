"""The scripts of operators: replay a dead letter, reset a group, remove a consumer; each called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import REMOVE_CONSUMER, REPLAY_DEAD_LETTER, RESET_GROUP, SETTLE_MESSAGES

GROUP = "billing"


class Partition:
    """One partition whose group has pending and parked messages, a lease and dead letters."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        self.stream, self.lease = keys.stream("orders", 3), keys.lease("orders", 3, GROUP)
        self.retry, self.dlq = keys.retry("orders", 3, GROUP), keys.dlq("orders", 3, GROUP)
        self.cancels, self.cancelled = keys.cancels("orders", 3, GROUP), keys.cancelled("orders", 3, GROUP)

    async def call(self, *command: Any) -> Any:
        return await self.client.execute_command(*command)

    async def fill(self) -> list[bytes]:
        """Three messages, two of them delivered to `me`."""
        ids = [await self.call("XADD", self.stream, "*", "data", str(number)) for number in range(3)]
        await self.call("XGROUP", "CREATE", self.stream, GROUP, "0")
        await self.call("XREADGROUP", "GROUP", GROUP, "me", "COUNT", 2, "STREAMS", self.stream, ">")
        return ids

    async def pending(self) -> int:
        return (await self.call("XPENDING", self.stream, GROUP))[0]

    async def entries(self, key: str) -> list[list[bytes]]:
        return [fields for _, fields in await self.call("XRANGE", key, "-", "+")]


@pytest.fixture
def partition(client: Client, keys: Keys) -> Partition:
    """An empty partition."""
    return Partition(client, keys)


async def test_replay_dead_letter_moves_it_back_once(partition: Partition) -> None:
    """Its original fields go back, addressed to the group that failed, and the dead letter is deleted."""
    letter = await partition.call(
        "XADD",
        partition.dlq,
        "*",
        "data",
        "x",
        "key",
        "k",
        "group",
        "old",
        "dlq.reason",
        "attempts",
        "dlq.group",
        GROUP,
    )
    keys = (partition.stream, partition.dlq)
    word, entry = await REPLAY_DEAD_LETTER(partition.client, keys, (letter, GROUP, 0, "reject"))
    assert word == b"OK"
    assert await partition.call("XRANGE", partition.stream, "-", "+") == [
        [entry, [b"data", b"x", b"key", b"k", b"group", GROUP.encode()]]
    ]
    assert await partition.call("XLEN", partition.dlq) == 0
    assert await REPLAY_DEAD_LETTER(partition.client, keys, (letter, GROUP, 0, "reject")) == [b"GONE"]
    assert await partition.call("XLEN", partition.stream) == 1


async def test_replay_of_a_packed_dead_letter_returns_its_fields(partition: Partition) -> None:
    """An entry too wide for a script is returned and stays until the caller has stored it."""
    packed = pack_fields(["data", "x"])
    letter = await partition.call("XADD", partition.dlq, "*", "dlq.packed", packed, "dlq.reason", "malformed")
    for _ in range(2):
        reply = await REPLAY_DEAD_LETTER(
            partition.client, (partition.stream, partition.dlq), (letter, GROUP, 0, "reject")
        )
        assert reply == [b"PACKED", packed]
    assert await partition.call("EXISTS", partition.stream) == 0
    assert await partition.call("XLEN", partition.dlq) == 1


def keys_of_a_reset(partition: Partition) -> tuple[str, ...]:
    """What RESET_GROUP forgets."""
    own = (partition.retry, partition.cancels, partition.cancelled)
    return (partition.stream, partition.lease, *own, f"{partition.lease}:waits", f"{partition.lease}:calls")


@pytest.mark.parametrize(("start", "delivered"), [("0", [b"0", b"1", b"2"]), ("$", []), ("second", [b"2"])])
async def test_reset_group_starts_at_the_given_position(
    partition: Partition, start: str, delivered: list[bytes]
) -> None:
    """Nothing is pending or parked any more, dead letters stay, and a second call changes nothing."""
    ids = await partition.fill()
    await partition.call("ZADD", partition.retry, 1, b"%s|1" % ids[0])
    await partition.call("HSET", partition.lease, "owner", "me", "epoch", 7, "until_ms", 9, "reader", "5 addr")
    await partition.call("XADD", partition.dlq, "*", "data", "x")
    position = ids[1] if start == "second" else start
    for epoch in (b"8", b"9"):
        assert await RESET_GROUP(partition.client, keys_of_a_reset(partition), (GROUP, position)) == b"OK"
        assert await partition.pending() == 0
        assert await partition.call("EXISTS", partition.retry) == 0
        lease = await partition.call("HMGET", partition.lease, "owner", "epoch", "until_ms", "reader")
        assert lease == [b"", epoch, b"0", b"5 addr"]
    late = (partition.stream, partition.lease, partition.retry), ("me", GROUP, "7", 1, 0, ids[0])
    assert await SETTLE_MESSAGES(partition.client, *late) == [[b"STALE_EPOCH"]]
    reply = await partition.call("XREADGROUP", "GROUP", GROUP, "me", "STREAMS", partition.stream, ">")
    assert [fields[1] for _, fields in (reply[0][1] if reply else [])] == delivered
    assert await partition.call("XLEN", partition.dlq) == 1


async def test_reset_group_without_a_stream_creates_both(partition: Partition) -> None:
    """Neither the stream nor the group has to exist."""
    for _ in range(2):
        assert await RESET_GROUP(partition.client, keys_of_a_reset(partition), (GROUP, "0")) == b"OK"
    assert await partition.pending() == 0


async def test_remove_consumer_with_pending_messages_is_refused(partition: Partition) -> None:
    """After they are settled the consumer is deleted; a second call is harmless."""
    ids = await partition.fill()
    for _ in range(2):
        assert await REMOVE_CONSUMER(partition.client, (partition.stream,), (GROUP, "me")) == b"HAS_PENDING"
    assert await partition.pending() == 2
    await partition.call("XACK", partition.stream, GROUP, *ids)
    for _ in range(2):
        assert await REMOVE_CONSUMER(partition.client, (partition.stream,), (GROUP, "me")) == b"OK"
        assert await partition.call("XINFO", "CONSUMERS", partition.stream, GROUP) == []


async def test_replay_into_a_full_partition_leaves_the_dead_letter(partition: Partition) -> None:
    """There is no room, unless the topic makes it."""
    await partition.call("XADD", partition.stream, "*", "data", "there")
    letter = await partition.call("XADD", partition.dlq, "*", "data", "x", "dlq.reason", "failed")
    keys = (partition.stream, partition.dlq)
    assert await REPLAY_DEAD_LETTER(partition.client, keys, (letter, GROUP, 1, "reject")) == [b"FULL"]
    assert await partition.call("XLEN", partition.dlq) == 1
    assert (await REPLAY_DEAD_LETTER(partition.client, keys, (letter, GROUP, 2, "reject")))[0] == b"OK"
