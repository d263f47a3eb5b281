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


async def take(client: Client, lease: str, owner: str, ttl: int = 60_000, absent: str = "", channel: str = "") -> list:
    """One call of take_lease."""
    return await TAKE_LEASE(client, (lease,), (owner, ttl, f"reader-of-{owner}", absent, channel))


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
    assert await RELEASE_LEASE(client, (lease,), ("a", "1")) == OK
    assert await RELEASE_LEASE(client, (lease,), ("a", "1")) == STALE_EPOCH
    assert (await take(client, lease, "b"))[:2] == [OK, b"2"]


async def test_a_stale_release_is_refused(client: Client, lease: str) -> None:
    """A late goodbye must not free the lease of the next owner."""
    await take(client, lease, "a", ttl=0)
    await take(client, lease, "b")
    assert await RELEASE_LEASE(client, (lease,), ("a", "1")) == STALE_EPOCH
    assert await field(client, lease, "owner") == b"b"
