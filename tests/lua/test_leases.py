"""The lease scripts: keys before, one call, keys after; with a stale epoch; called twice."""

from __future__ import annotations

import pytest

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.script import OK, RELEASE_LEASE, RENEW_LEASE, STALE_EPOCH, TAKE_LEASE

pytestmark = pytest.mark.anyio


@pytest.fixture
def lease(keys: Keys) -> str:
    """The lease of one partition."""
    return keys.lease("orders", 0, "billing")


@pytest.fixture
async def stream(client: Client, keys: Keys) -> str:
    """The stream of the partition, with the group."""
    name = keys.stream("orders", 0)
    await client.execute_command("XGROUP", "CREATE", name, "billing", "0", "MKSTREAM")
    return name


def stream_of(lease: str) -> str:
    """The stream that a lease is for."""
    return lease.partition("}")[0] + "}"


async def take(client: Client, lease: str, owner: str, ttl: int = 60_000, absent: str = "", channel: str = "") -> list:
    """One call of take_lease."""
    given = (owner, ttl, f"reader-of-{owner}", absent, channel, "billing")
    return await TAKE_LEASE(client, (lease, stream_of(lease)), given)


async def release(client: Client, lease: str, owner: str, epoch: str) -> bytes:
    """One call of release_lease."""
    return await RELEASE_LEASE(client, (lease, stream_of(lease)), (owner, epoch, "billing"))


async def consumers(client: Client, stream: str) -> list[bytes]:
    """The names of the group's consumers."""
    return [row[1] for row in await client.execute_command("XINFO", "CONSUMERS", stream, "billing")]


async def field(client: Client, lease: str, name: str) -> bytes:
    """One field of the lease hash."""
    return await client.execute_command("HGET", lease, name)


async def test_a_free_lease_is_granted_with_the_first_epoch(client: Client, lease: str) -> None:
    """Owner, epoch, end and reader are written."""
    assert await take(client, lease, "a") == [OK, b"1", b"", b""]
    assert await field(client, lease, "owner") == b"a"
    assert await field(client, lease, "reader") == b"reader-of-a"
    assert int(await field(client, lease, "until_ms")) > 0


async def test_a_held_lease_is_refused_and_unchanged(client: Client, lease: str) -> None:
    """The answer names the holder and how long it still holds."""
    await take(client, lease, "a")
    word, owner, left = await take(client, lease, "b")
    assert (word, owner) == (b"HELD", b"a")
    assert 0 < left <= 60_000
    assert await field(client, lease, "epoch") == b"1"


async def test_taken_twice_by_the_same_owner_the_epoch_grows(client: Client, lease: str) -> None:
    """A late writer of the first grant is told apart from the second."""
    await take(client, lease, "a")
    assert (await take(client, lease, "a"))[:2] == [OK, b"2"]


async def test_the_last_reader_is_told_until_it_was_heard(client: Client, lease: str) -> None:
    """The answer to a grant may be lost: asked again, the owner hears of the reader that it has to cut off."""
    await take(client, lease, "a", ttl=0)
    for epoch in (b"2", b"3"):
        word, number, _, reader = await take(client, lease, "b")
        assert (word, number, reader) == (OK, epoch, b"reader-of-a")
    assert await release(client, lease, "b", "3") == OK
    assert await take(client, lease, "c") == [OK, b"4", b"", b""]


async def test_an_expired_lease_goes_to_whoever_asks(client: Client, lease: str) -> None:
    """The last owner and its reader are named, to be cut off."""
    await take(client, lease, "a", ttl=0)
    assert await take(client, lease, "b") == [OK, b"2", b"a", b"reader-of-a"]


async def test_the_lease_of_an_absent_member_may_be_taken_early(client: Client, lease: str, prefix: str) -> None:
    """Nobody listens on its channel, and the script has looked itself."""
    await take(client, lease, "a")
    assert (await take(client, lease, "b", absent="a", channel=f"{prefix}:nobody"))[:2] == [OK, b"2"]


async def test_a_member_that_is_back_keeps_its_lease(client: Client, lease: str, prefix: str) -> None:
    """Somebody listens again: whoever thought it absent is refused."""
    await take(client, lease, "a")
    listener = client.pubsub()
    await listener.subscribe(f"{prefix}:me")
    await listener.get_message(timeout=5)
    assert (await take(client, lease, "b", absent="a", channel=f"{prefix}:me"))[0] == b"HELD"
    await listener.aclose()


async def test_renewing_moves_the_end(client: Client, lease: str) -> None:
    """Also of a lease that has run out but that nobody took."""
    await take(client, lease, "a", ttl=0)
    before = int(await field(client, lease, "until_ms"))
    for _ in range(2):
        assert await RENEW_LEASE(client, (lease,), ("a", "1", 60_000)) == OK
    assert int(await field(client, lease, "until_ms")) >= before + 60_000


async def test_a_stale_renewal_is_refused(client: Client, lease: str) -> None:
    """By epoch and by owner; nothing changes."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b")
    before = await field(client, lease, "until_ms")
    assert await RENEW_LEASE(client, (lease,), ("a", "1", 99_000)) == STALE_EPOCH
    assert await RENEW_LEASE(client, (lease,), ("a", "2", 99_000)) == STALE_EPOCH
    assert await field(client, lease, "until_ms") == before


async def test_a_released_lease_is_free_and_keeps_its_epoch(client: Client, lease: str) -> None:
    """Released twice it stays so; the next grant has a greater epoch."""
    await take(client, lease, "a")
    assert await release(client, lease, "a", "1") == OK
    assert await release(client, lease, "a", "1") == STALE_EPOCH
    assert (await take(client, lease, "b"))[:2] == [OK, b"2"]


async def test_a_stale_release_is_refused(client: Client, lease: str) -> None:
    """A late goodbye must not free the lease of the next owner."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b")
    assert await release(client, lease, "a", "1") == STALE_EPOCH
    assert await field(client, lease, "owner") == b"b"


async def test_a_grant_makes_its_consumer_and_its_end_removes_it(client: Client, lease: str, stream: str) -> None:
    """What is pending keeps the consumer: deleting it would delete that, too."""
    await take(client, lease, "a")
    assert await consumers(client, stream) == [b"a"]
    assert await release(client, lease, "a", "1") == OK
    assert await consumers(client, stream) == []
    await take(client, lease, "a")
    await client.execute_command("XADD", stream, "*", "data", "x")
    await client.execute_command("XREADGROUP", "GROUP", "billing", "a", "STREAMS", stream, ">")
    assert await release(client, lease, "a", "2") == OK
    assert await consumers(client, stream) == [b"a"]


async def test_a_lost_record_is_waited_for(client: Client, lease: str, stream: str) -> None:
    """Its owner may still read: nobody gets the partition, not even itself, for as long as it may believe in that."""
    await take(client, lease, "a")
    await client.execute_command("DEL", lease)
    for _ in range(2):
        word, owner, left = await take(client, lease, "b", ttl=50_000)
        assert (word, owner) == (b"HELD", b"")
        assert 0 < left <= 50_000
    assert (await take(client, lease, "a", absent="a"))[0] == b"HELD"
    assert await RENEW_LEASE(client, (lease,), ("a", "1", 60_000)) == STALE_EPOCH
    await client.execute_command("HSET", lease, "until_ms", 1)
    assert (await take(client, lease, "b"))[:2] == [OK, b"1"]


async def test_a_lost_record_without_readers_is_not(client: Client, lease: str, stream: str) -> None:
    """Nobody else has ever read there: not before the first grant, nor after the group was made again."""
    assert (await take(client, lease, "a"))[0] == OK
    await client.execute_command("DEL", lease)
    assert (await take(client, lease, "a"))[0] == OK
    await client.execute_command("DEL", lease, stream)
    assert (await take(client, lease, "b"))[0] == OK
