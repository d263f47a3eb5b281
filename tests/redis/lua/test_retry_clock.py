"""The scripts that look at parked messages, after the server's clock was set back: nothing waits longer than before."""

from __future__ import annotations

import pytest

from tests.redis.lua.test_settle import EPOCH, GROUP, ME, SHARED, Partition, partition

__all__ = ["partition"]  # the fixture

BACK, DELAY = 3_600_000, 60_000


async def set_clock_back(partition: Partition) -> dict[bytes, int]:
    """What was parked is due an hour later now, by the server's clock. Returns what is parked."""
    for member, due in (await partition.parked()).items():
        await partition.call("ZADD", partition.retry, due + BACK, member)
    seen = int(await partition.call("HGET", partition.lease, "clock") or await partition.now_ms())
    await partition.call("HSET", partition.lease, "clock", seen + BACK)
    return await partition.parked()


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_unpark_after_the_clock_was_set_back_moves_all_due_times_once(partition: Partition, epoch: str) -> None:
    """They keep their distance, and a second call moves nothing."""
    first, second = await partition.deliver(2)
    await partition.park(first, 1, DELAY, epoch=epoch)
    await partition.park(second, 1, 2 * DELAY, epoch=epoch)
    before = await set_clock_back(partition)
    status, wait_ms, *messages = await partition.unpark(epoch=epoch)
    assert (status, messages) == (b"OK", [])
    assert 0 < wait_ms <= DELAY + 1000
    after = await partition.parked()
    (moved,) = {before[member] - after[member] for member in before}
    assert moved <= BACK
    await partition.unpark(epoch=epoch)
    assert await partition.parked() == after
    assert abs(int(await partition.call("HGET", partition.lease, "clock")) - await partition.now_ms()) < 30_000


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_claim_after_the_clock_was_set_back_waits_no_longer_than_the_delay(
    partition: Partition, epoch: str
) -> None:
    """A new owner learns the same wait as before."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, DELAY, keep=True, epoch=epoch)
    await set_clock_back(partition)
    ((claimed, attempts, wait_ms, *_),) = (await partition.claim(source=ME, epoch=epoch))[3:]
    assert (claimed, attempts) == (entry_id, 1)
    assert 0 < wait_ms <= DELAY + 1000


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_park_after_the_clock_was_set_back_moves_the_others(partition: Partition, epoch: str) -> None:
    """The new one is due by the new clock, and the older ones follow it."""
    first, second = await partition.deliver(2)
    await partition.park(first, 1, DELAY, epoch=epoch)
    await set_clock_back(partition)
    due = int((await partition.park(second, 1, DELAY, epoch=epoch))[1])
    parked = await partition.parked()
    assert parked[second + b"|1"] == due
    assert parked[first + b"|1"] <= due + 1000


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_due_times_without_a_known_clock_stay(partition: Partition, epoch: str) -> None:
    """A worker of an earlier version has parked the message: the clock is known from the first look on."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, DELAY, epoch=epoch)
    await partition.call("HDEL", partition.lease, "clock")
    before = await partition.parked()
    await partition.unpark(epoch=epoch)
    assert await partition.parked() == before
    assert await partition.call("HEXISTS", partition.lease, "clock")


async def test_looks_without_parked_messages_write_nothing(partition: Partition) -> None:
    """Idle polls leave no key."""
    await partition.call("DEL", partition.lease)
    assert await partition.unpark(epoch=SHARED) == [b"OK", -1]
    await partition.claim(epoch=SHARED)
    assert not await partition.call("EXISTS", partition.lease, partition.retry)
    assert await partition.call("XPENDING", partition.stream, GROUP, "-", "+", 1) == []
