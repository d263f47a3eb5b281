"""The lease scripts: keys before, one call, keys after; with a stale epoch; called twice."""

from __future__ import annotations

from typing import Final

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import (
    CLAIM_PENDING,
    KEEP_STARTS,
    OK,
    RELEASE_LEASE,
    RENEW_LEASE,
    RESET_GROUP,
    STALE_EPOCH,
    TAKE_LEASE,
)

pytestmark = pytest.mark.anyio

AHEAD: Final = 10**15


@pytest.fixture
async def lease(keys: Keys, client: Client) -> str:
    """The lease of one partition. Its epoch is ahead of the clock, so that each grant adds 1."""
    name = keys.lease("orders", 0, "billing")
    await client.execute_command("HSET", name, "epoch", AHEAD)
    return name


def nth(grant: int) -> bytes:
    """The epoch of the n-th grant."""
    return b"%d" % (AHEAD + grant)


@pytest.fixture
async def stream(client: Client, keys: Keys) -> str:
    """The stream of the partition, with the group."""
    name = keys.stream("orders", 0)
    await client.execute_command("XGROUP", "CREATE", name, "billing", "0", "MKSTREAM")
    return name


def stream_of(lease: str) -> str:
    """The stream that a lease is for."""
    return lease.partition("}")[0] + "}"


async def take(
    client: Client,
    lease: str,
    owner: str,
    ttl: int = 60_000,
    absent: str = "",
    channel: str = "",
    reader: str = "",
    longest: int | str = "",
) -> list:
    """One call of take_lease."""
    given = (owner, ttl, reader or f"reader-of-{owner}", absent, channel, "billing", longest)
    return await TAKE_LEASE(client, (lease, stream_of(lease)), given)


async def release(client: Client, lease: str, owner: str, epoch: bytes, late_reader: str = "") -> bytes:
    """One call of release_lease."""
    return await RELEASE_LEASE(client, (lease, stream_of(lease)), (owner, epoch, "billing", late_reader))


async def claim(client: Client, lease: str, owner: str, epoch: bytes, reader: str) -> bytes:
    """The status of one call of claim_pending."""
    given = (owner, epoch, "billing", "0-0", 10, 1000, reader)
    return (await CLAIM_PENDING(client, (stream_of(lease), lease, f"{lease}:retry"), given))[0]


async def consumers(client: Client, stream: str) -> list[bytes]:
    """The names of the group's consumers."""
    return [row[1] for row in await client.execute_command("XINFO", "CONSUMERS", stream, "billing")]


async def field(client: Client, lease: str, name: str) -> bytes:
    """One field of the lease hash."""
    return await client.execute_command("HGET", lease, name)


async def test_take_lease_of_a_free_partition_grants_the_first_epoch(client: Client, lease: str) -> None:
    """Owner, epoch, end and reader are written."""
    assert await take(client, lease, "a") == [OK, nth(1), b"", b"", b"0"]
    assert await field(client, lease, "owner") == b"a"
    assert await field(client, lease, "reader") == b"reader-of-a"
    assert int(await field(client, lease, "until_ms")) > 0


async def test_take_lease_of_a_held_partition_is_refused(client: Client, lease: str) -> None:
    """The reply names the holder and the remaining time; nothing changes."""
    await take(client, lease, "a")
    word, owner, left = await take(client, lease, "b")
    assert (word, owner) == (b"HELD", b"a")
    assert 0 < left <= 60_000
    assert await field(client, lease, "epoch") == nth(1)


async def test_take_lease_twice_by_the_same_owner_raises_the_epoch(client: Client, lease: str) -> None:
    """A late write under the first grant differs from one under the second."""
    await take(client, lease, "a")
    assert (await take(client, lease, "a"))[:2] == [OK, nth(2)]


async def test_take_lease_without_a_record_grants_an_epoch_of_the_clock(client: Client, lease: str) -> None:
    """A store outside that has seen the last epoch does not refuse the first owner after FLUSHALL."""
    await client.execute_command("DEL", lease)
    seconds, micros = await client.execute_command("TIME")
    last = 0
    for owner in ("a", "a", "a"):
        epoch = int((await take(client, lease, owner))[1])
        assert epoch >= int(seconds) * 1000 + int(micros) // 1000
        assert epoch > last
        last = epoch


async def test_reset_group_raises_the_run(client: Client, lease: str, stream: str) -> None:
    """Two resets within a millisecond are two runs; a grant returns the number."""
    others, runs = ("retry", "cancels", "cancelled", "waits", "calls"), [0]
    names = (stream, lease, *[f"{lease}:{each}" for each in others])
    for _ in range(3):
        assert await RESET_GROUP(client, names, ("billing", "0")) == OK
        runs.append(int((await take(client, lease, "a"))[4]))
    assert runs == sorted(set(runs))
    assert await field(client, lease, "run") == str(runs[-1]).encode()


async def test_take_lease_again_after_a_lost_reply_returns_the_last_reader(client: Client, lease: str) -> None:
    """The owner that asks again still learns which reader to cut off."""
    await take(client, lease, "a", ttl=0)
    for epoch in (nth(2), nth(3)):
        word, number, _, reader, _ = await take(client, lease, "b")
        assert (word, number, reader) == (OK, epoch, b"reader-of-a")
    assert await release(client, lease, "b", nth(3)) == OK
    assert await take(client, lease, "c") == [OK, nth(4), b"", b"", b"0"]


async def test_take_lease_after_an_owner_that_never_claimed_returns_all_readers(client: Client, lease: str) -> None:
    """That owner may have ended before it cut off the reader of the owner before it."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b", ttl=0)
    assert (await take(client, lease, "c", ttl=0))[3] == b"reader-of-b\nreader-of-a"
    assert (await take(client, lease, "b", ttl=0))[3] == b"reader-of-c\nreader-of-a"
    for number in range(30):
        await take(client, lease, f"m{number}", ttl=0)
    assert (await take(client, lease, "c"))[3].split() == [b"reader-of-m%d" % number for number in range(29, 13, -1)]


async def test_take_lease_by_the_same_owner_with_another_reader_returns_its_last_one(
    client: Client, lease: str
) -> None:
    """A read on its last connection may be on its way, also if the owner does not remember it."""
    await take(client, lease, "a")
    assert (await take(client, lease, "a"))[3] == b""
    assert (await take(client, lease, "a", reader="another"))[3] == b"reader-of-a"


async def test_claim_by_the_owner_forgets_the_readers_before_it(client: Client, lease: str, stream: str) -> None:
    """An owner claims after it has cut them off. The reader before its own is kept until it claims again."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b", ttl=0)
    assert await claim(client, lease, "b", nth(2), "reader-of-b") == OK
    assert await field(client, lease, "before") == b""
    assert await claim(client, lease, "b", nth(2), "reconnected") == OK
    assert await claim(client, lease, "b", nth(2), "reader-of-b") == OK  # it was sent before the other one
    assert (await take(client, lease, "c"))[3] == b"reader-of-b\nreconnected"


async def test_release_lease_with_a_late_reader_returns_it_to_the_next_owner(client: Client, lease: str) -> None:
    """Also to the same member, which has another connection by then; a release without one leaves no reader."""
    await take(client, lease, "a")
    assert await release(client, lease, "a", nth(1), "late") == OK
    assert await take(client, lease, "a") == [OK, nth(2), b"", b"late", b"0"]
    assert await release(client, lease, "a", nth(2)) == OK
    assert (await take(client, lease, "b"))[3] == b""


async def test_reset_group_keeps_the_reader(client: Client, keys: Keys, lease: str, stream: str) -> None:
    """Its read may be on its way; the next owner learns whom to cut off."""
    await take(client, lease, "a")
    at = ("orders", 0, "billing")
    parts = (keys.retry, keys.cancels, keys.cancelled, keys.waits, keys.calls)
    names = (stream, lease, *[part(*at) for part in parts])
    assert await RESET_GROUP(client, names, ("billing", "0")) == OK
    assert (await take(client, lease, "b"))[:4] == [OK, nth(3), b"", b"reader-of-a"]


async def test_take_lease_of_an_expired_lease_names_the_last_owner_and_reader(client: Client, lease: str) -> None:
    """The caller has to cut off that reader."""
    await take(client, lease, "a", ttl=0)
    assert await take(client, lease, "b") == [OK, nth(2), b"a", b"reader-of-a", b"0"]


async def test_take_lease_of_an_absent_owner_is_granted_early(client: Client, lease: str, prefix: str) -> None:
    """The script checks that its channel has no subscriber."""
    await take(client, lease, "a")
    assert (await take(client, lease, "b", absent="a", channel=f"{prefix}:silent"))[:2] == [OK, nth(2)]


async def test_take_lease_of_an_owner_that_is_back_is_refused(client: Client, lease: str, prefix: str) -> None:
    """Its channel has a subscriber again."""
    await take(client, lease, "a")
    listener = client.pubsub()
    await listener.subscribe(f"{prefix}:me")
    await listener.get_message(timeout=30)
    assert (await take(client, lease, "b", absent="a", channel=f"{prefix}:me"))[0] == b"HELD"
    await listener.aclose()


async def test_renew_lease_moves_the_end(client: Client, lease: str) -> None:
    """This also works for an expired lease that no other member has taken."""
    await take(client, lease, "a", ttl=0)
    before = int(await field(client, lease, "until_ms"))
    for _ in range(2):
        assert await RENEW_LEASE(client, (lease,), ("a", nth(1), 60_000)) == OK
    assert int(await field(client, lease, "until_ms")) >= before + 60_000


async def test_renew_lease_with_a_stale_epoch_or_owner_is_refused(client: Client, lease: str) -> None:
    """Nothing changes."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b")
    before = await field(client, lease, "until_ms")
    assert await RENEW_LEASE(client, (lease,), ("a", nth(1), 99_000)) == STALE_EPOCH
    assert await RENEW_LEASE(client, (lease,), ("a", nth(2), 99_000)) == STALE_EPOCH
    assert await field(client, lease, "until_ms") == before


async def test_release_lease_keeps_the_epoch(client: Client, lease: str) -> None:
    """A second release changes nothing; the next grant has a greater epoch."""
    await take(client, lease, "a")
    assert await release(client, lease, "a", nth(1)) == OK
    assert await release(client, lease, "a", nth(1)) == STALE_EPOCH
    assert (await take(client, lease, "b"))[:2] == [OK, nth(2)]


async def test_keep_starts_leaves_a_text_that_only_the_owner_changes(client: Client, lease: str) -> None:
    """It outlives the release, called twice it changes nothing more, and an empty one removes it."""
    await take(client, lease, "a")
    for _ in range(2):
        assert await KEEP_STARTS(client, (lease,), ("a", nth(1), "{}")) == OK
    assert await KEEP_STARTS(client, (lease,), ("a", nth(2), "x")) == STALE_EPOCH
    assert await KEEP_STARTS(client, (lease,), ("b", nth(1), "")) == STALE_EPOCH
    await release(client, lease, "a", nth(1))
    await take(client, lease, "b")
    assert await field(client, lease, "starts") == b"{}"
    assert await KEEP_STARTS(client, (lease,), ("b", nth(2), "")) == OK
    assert await field(client, lease, "starts") is None


async def test_release_lease_with_a_stale_epoch_is_refused(client: Client, lease: str) -> None:
    """A late release must not free the lease of the next owner."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b")
    assert await release(client, lease, "a", nth(1)) == STALE_EPOCH
    assert await field(client, lease, "owner") == b"b"


async def test_take_lease_creates_the_consumer_and_release_deletes_it(client: Client, lease: str, stream: str) -> None:
    """A consumer with pending messages stays, because deleting it would delete them."""
    await take(client, lease, "a")
    assert await consumers(client, stream) == [b"a"]
    assert await release(client, lease, "a", nth(1)) == OK
    assert await consumers(client, stream) == []
    await take(client, lease, "a")
    await client.execute_command("XADD", stream, "*", "data", "x")
    await client.execute_command("XREADGROUP", "GROUP", "billing", "a", "STREAMS", stream, ">")
    assert await release(client, lease, "a", nth(2)) == OK
    assert await consumers(client, stream) == [b"a"]


async def test_take_lease_after_a_lost_record_waits_for_one_lease(client: Client, lease: str, stream: str) -> None:
    """The previous owner may still read, so no member gets the partition meanwhile: for the longest of their leases."""
    await take(client, lease, "a")
    await client.execute_command("DEL", lease)
    assert await take(client, lease, "b", ttl=1000) == [b"UNKNOWN"]
    assert not await client.execute_command("EXISTS", lease)
    for _ in range(2):
        word, owner, left = await take(client, lease, "b", ttl=1000, longest=50_000)
        assert (word, owner) == (b"HELD", b"")
        assert 0 < left <= 50_000
    assert (await take(client, lease, "a", absent="a"))[0] == b"HELD"
    assert await RENEW_LEASE(client, (lease,), ("a", nth(1), 60_000)) == STALE_EPOCH
    await client.execute_command("HSET", lease, "until_ms", 1)
    assert (await take(client, lease, "b"))[0] == OK


async def test_take_lease_of_a_live_owner_that_lost_it_waits_for_one_lease_after_a_clock_set_back(
    client: Client, lease: str
) -> None:
    """Its end is an hour ahead. Its owner has at most the time of its grant, so no other member waits for longer."""
    await take(client, lease, "a", ttl=50_000)
    until = int(await field(client, lease, "until_ms"))
    await client.execute_command("HSET", lease, "until_ms", until + 3_600_000)
    for _ in range(2):
        word, owner, left = await take(client, lease, "b", ttl=1000)
        assert (word, owner) == (b"HELD", b"a")
        assert 40_000 < left <= 50_000
    assert int(await field(client, lease, "until_ms")) < until + 60_000
    assert await RENEW_LEASE(client, (lease,), ("a", nth(1), 50_000)) == OK
    await client.execute_command("HSET", lease, "until_ms", 1)
    assert (await take(client, lease, "b"))[:2] == [OK, nth(2)]


async def test_take_lease_does_not_judge_a_grant_by_the_length_of_an_earlier_one(client: Client, lease: str) -> None:
    """An owner of a release that does not write the length may have a longer lease than the owner before it."""
    await take(client, lease, "a", ttl=1000)
    await client.execute_command("HSET", lease, "owner", "old", "epoch", 2, "until_ms", 9_999_999_999_999)
    word, _, left = await take(client, lease, "b", ttl=1000)
    assert (word, left > 3_600_000) == (b"HELD", True)


async def test_take_lease_without_a_record_and_other_consumers_is_granted_at_once(
    client: Client, lease: str, stream: str
) -> None:
    """No other member has read there: before the first grant, or after the group was created again."""
    assert (await take(client, lease, "a"))[0] == OK
    await client.execute_command("DEL", lease)
    assert (await take(client, lease, "a"))[0] == OK
    await client.execute_command("DEL", lease, stream)
    assert (await take(client, lease, "b"))[0] == OK
