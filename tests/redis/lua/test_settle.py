"""The scripts that settle and redeliver: keys before, one call, keys after; with a stale epoch; and called twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from rsmq.model.failed_attempt import PAST, failed_attempts
from rsmq.model.keys import Keys
from rsmq.model.packing import unpack_fields
from rsmq.model.reason import lost_body
from rsmq.model.stream_id import parse_stream_id
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import (
    ADOPT_PENDING,
    BURY_MESSAGE,
    CLAIM_PENDING,
    HAND_BACK,
    PARK_MESSAGE,
    SETTLE_CANCELLED,
    SETTLE_MESSAGES,
    START_MESSAGE,
    TOUCH_MESSAGES,
    UNPARK_MESSAGES,
)
from tests.redis.lua.refusals import Refusals

ME, OTHER, GROUP, EPOCH = "me", "other", "billing", "7"
SHARED = ""
STALE = [b"STALE_EPOCH"]
BIG = 1 << 30


class Partition:
    """One partition of a topic with a lease of `me`, epoch 7, and questions about its keys."""

    def __init__(self, client: Client, keys: Keys, number: int = 3) -> None:
        self.client = client
        self.stream, self.lease = keys.stream("orders", number), keys.lease("orders", number, GROUP)
        self.retry, self.dlq = keys.retry("orders", number, GROUP), keys.dlq("orders", number, GROUP)
        self.errors = keys.errors("orders", number, GROUP)
        self.cancels, self.cancelled = keys.cancels("orders", number, GROUP), keys.cancelled("orders", number, GROUP)

    async def call(self, *command: Any) -> Any:
        return await self.client.execute_command(*command)

    async def prepare(self) -> Partition:
        await self.call("HSET", self.lease, "owner", ME, "epoch", EPOCH, "until_ms", 0)
        await self.call("XGROUP", "CREATE", self.stream, GROUP, "0", "MKSTREAM")
        return self

    async def deliver(self, count: int, to: str = ME, *fields: Any) -> list[bytes]:
        """Publish messages and let a consumer read them."""
        fields = fields or ("data", "x")
        ids = [await self.call("XADD", self.stream, "*", *fields) for _ in range(count)]
        await self.call("XREADGROUP", "GROUP", GROUP, to, "STREAMS", self.stream, ">")
        return ids

    async def pending(self) -> dict[bytes, tuple[str, int]]:
        """Owner and attempts of each pending message."""
        rows = await self.call("XPENDING", self.stream, GROUP, "-", "+", 1000)
        return {entry_id: (owner.decode(), attempts) for entry_id, owner, _, attempts in rows}

    async def idle(self, entry_id: bytes) -> int:
        """The idle time of a pending message in ms."""
        return int((await self.call("XPENDING", self.stream, GROUP, entry_id, entry_id, 1))[0][2])

    async def age(self, entry_id: bytes, owner: str, ms: int) -> None:
        """Set the idle time of a pending message."""
        await self.call("XCLAIM", self.stream, GROUP, owner, 0, entry_id, "IDLE", ms, "JUSTID")

    async def parked(self) -> dict[bytes, int]:
        """`id|attempts` and due time of each parked message."""
        flat = await self.call("ZRANGE", self.retry, 0, -1, "WITHSCORES")
        return {member: int(due) for member, due in zip(flat[::2], flat[1::2], strict=True)}

    async def dead(self) -> list[dict[bytes, bytes]]:
        """The dead letters."""
        entries = await self.call("XRANGE", self.dlq, "-", "+")
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in entries]

    async def state(self) -> tuple[Any, ...]:
        """All state that a refused call must not change."""
        lease = await self.call("HGETALL", self.lease)
        return await self.pending(), await self.parked(), await self.dead(), lease, await self.call("XLEN", self.stream)

    async def lost(self) -> list[bytes]:
        """The ids of the dead letters of deleted entries."""
        return [each[b"dlq.origin"] for each in await self.dead() if each[b"dlq.reason"] == b"lost-body"]

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    # the scripts, with the arguments that a test varies

    async def settle(self, ids: Sequence[bytes], epoch: str = EPOCH) -> Any:
        keys = [self.stream, self.lease, self.retry]
        return (await SETTLE_MESSAGES(self.client, keys, [ME, GROUP, epoch, len(ids), 0, *ids]))[0]

    async def start(self, entry_id: bytes, attempts: int, epoch: str = EPOCH, *, must_be_due: bool = False) -> Any:
        keys = [self.stream, self.lease, self.retry, self.cancels, self.cancelled]
        args = [ME, epoch, GROUP, entry_id, attempts, int(must_be_due)]
        return await START_MESSAGE(self.client, keys, args)

    async def park(
        self,
        entry_id: bytes,
        attempts: int,
        delay_ms: int,
        *,
        keep: bool = False,
        epoch: str = EPOCH,
        counts: bool = True,
        error: str = "",
    ) -> Any:
        keys, rules = [self.stream, self.lease, self.retry, self.errors], [delay_ms, int(keep), int(counts), error]
        return await PARK_MESSAGE(self.client, keys, [ME, epoch, GROUP, entry_id, attempts, *rules])

    async def failed(self, entry_id: bytes) -> list[tuple[int, str]]:
        """Number and error of each failed attempt that is noted."""
        notes = await self.call("HMGET", self.errors, entry_id, entry_id + PAST)
        return [(each.attempt, each.error) for each in failed_attempts(*notes)]

    async def unpark(self, limit: int = 100, epoch: str = EPOCH) -> Any:
        names = [self.stream, self.lease, self.retry, self.dlq]
        return await UNPARK_MESSAGES(self.client, names, [ME, epoch, GROUP, limit, *LOST])

    async def bury(
        self, entry_id: bytes, attempts: int = 1, *, keep: int = 1000, epoch: str = EPOCH, again: bool = False
    ) -> Any:
        keys = [self.stream, self.lease, self.retry, self.dlq]
        fields = ["dlq.reason", "failed", "dlq.origin", entry_id]
        return await BURY_MESSAGE(self.client, keys, [ME, epoch, GROUP, entry_id, attempts, keep, int(again), *fields])

    async def hand_back(self, ids: Sequence[tuple[bytes, int]], epoch: str = EPOCH) -> Any:
        pairs = [part for pair in ids for part in pair]
        return await HAND_BACK(self.client, [self.stream, self.lease, self.dlq], [ME, epoch, GROUP, *LOST, *pairs])

    async def touch(self, ids: Sequence[bytes]) -> Any:
        return await TOUCH_MESSAGES(self.client, [self.stream, self.dlq], [ME, GROUP, *LOST, *ids])

    async def claim(
        self, cursor: bytes = b"0-0", count: int = 100, *, idle_ms: int = 0, source: str = "", budget: int = BIG,
        epoch: str = EPOCH, leases: Sequence[str | int] = (), trims: int = 0,
    ) -> Any:  # fmt: skip
        """A page of all in a leased partition; with a source of what that one has; without a lease of what is idle."""
        keys = [self.stream, self.lease, self.retry, self.dlq]
        if epoch and not source:
            arguments = [ME, epoch, GROUP, cursor, count, budget, "12 127.0.0.1:5000"]
            return await CLAIM_PENDING(self.client, keys, [*arguments, *LOST, trims])
        seconds, micros = await self.call("TIME")
        now = int(seconds) * 1000 + int(micros) // 1000
        arguments = [ME, GROUP, cursor, count, budget, source, idle_ms, now]
        return await ADOPT_PENDING(self.client, keys, [*arguments, *LOST, *leases])


LOST = (1000, *lost_body(GROUP, ME))
"""How many dead letters are kept, and what is in that of a deleted entry."""


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    return await Partition(client, keys).prepare()


CALLS: dict[str, Callable[[Partition, bytes, str], Awaitable[Any]]] = {
    "settle": lambda partition, entry_id, epoch: partition.settle([entry_id], epoch),
    "start": lambda partition, entry_id, epoch: partition.start(entry_id, 1, epoch),
    "park": lambda partition, entry_id, epoch: partition.park(entry_id, 1, 0, epoch=epoch),
    "unpark": lambda partition, entry_id, epoch: partition.unpark(epoch=epoch),
    "bury": lambda partition, entry_id, epoch: partition.bury(entry_id, epoch=epoch),
    "hand_back": lambda partition, entry_id, epoch: partition.hand_back([(entry_id, 0)], epoch),
    "claim": lambda partition, entry_id, epoch: partition.claim(epoch=epoch),
}


@pytest.mark.parametrize("name", CALLS)
async def test_settling_scripts_with_a_stale_epoch_change_nothing(partition: Partition, name: str) -> None:
    """Every script refuses a member whose lease has a newer epoch or another owner."""
    waiting, pending = await partition.deliver(2)
    await partition.park(waiting, 1, 0)
    before = await partition.state()
    assert await CALLS[name](partition, pending, "6") == STALE
    assert await partition.state() == before
    await partition.call("HSET", partition.lease, "owner", OTHER)
    before = await partition.state()
    assert await CALLS[name](partition, pending, EPOCH) == STALE
    assert await partition.state() == before


@pytest.mark.parametrize("name", ["start", "park", "bury"])
@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_message_of_another_consumer_is_not_pending(partition: Partition, name: str, epoch: str) -> None:
    """A message that another consumer holds cannot be started, parked or buried."""
    (theirs,) = await partition.deliver(1, OTHER)
    before = await partition.state()
    for entry_id in (theirs, b"1-1") if epoch == SHARED else (theirs,):
        assert await CALLS[name](partition, entry_id, epoch) == [b"NOT_PENDING"]
    assert await partition.state() == before


@pytest.mark.parametrize("name", ["start", "park"])
@pytest.mark.parametrize("is_pending", [True, False])
async def test_deleted_message_can_only_be_buried(partition: Partition, name: str, is_pending: bool) -> None:
    """Nothing changes before its dead letter is written, so that it is not lost if this process dies now."""
    (deleted,) = await partition.deliver(1)
    await partition.call("XDEL", partition.stream, deleted)
    if not is_pending:
        await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    before = await partition.state()
    for _ in range(2):
        assert await CALLS[name](partition, deleted, EPOCH) == [b"LOST_BODY", int(is_pending)]
        assert await partition.state() == before
    status, _, is_deleted = await partition.bury(deleted)
    assert (status, is_deleted, await partition.pending()) == (b"OK", 1, {})
    assert len(await partition.dead()) == 1


async def test_bury_of_a_message_of_a_deleted_consumer_writes_the_dead_letter(partition: Partition) -> None:
    """Only the owner settles, so it was not settled. A call that may have been executed before is not repeated."""
    (entry_id,) = await partition.deliver(1)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    assert await partition.bury(entry_id, epoch=SHARED) == [b"NOT_PENDING"]
    assert await partition.bury(entry_id, again=True) == [b"NOT_PENDING"]
    assert (await partition.bury(entry_id))[0] == b"OK"
    assert len(await partition.dead()) == 1


# -- settle_messages


async def test_settle_removes_messages_from_the_pending_list(partition: Partition) -> None:
    """They stay in the stream; settled twice they count once."""
    first, second, third = await partition.deliver(3)
    assert await partition.settle([first, third]) == [b"OK", 2]
    assert await partition.pending() == {second: (ME, 1)}
    assert await partition.call("XLEN", partition.stream) == 3
    assert await partition.settle([first, third]) == [b"OK", 0]


async def test_settle_of_thousands_takes_one_call(partition: Partition) -> None:
    """More ids than one XACK takes are settled in one call."""
    for number in range(2500):
        await partition.call("XADD", partition.stream, f"{number + 1}-0", "data", "x")
    await partition.call("XREADGROUP", "GROUP", GROUP, ME, "STREAMS", partition.stream, ">")
    assert await partition.settle([b"%d-0" % (number + 1) for number in range(2500)]) == [b"OK", 2500]
    assert await partition.pending() == {}


async def test_settle_shared_settles_only_own_messages(partition: Partition) -> None:
    """Without a lease, messages of other consumers stay pending."""
    (mine,) = await partition.deliver(1)
    (theirs,) = await partition.deliver(1, OTHER)
    assert await partition.settle([mine, theirs], SHARED) == [b"OK", 1]
    assert await partition.pending() == {theirs: (OTHER, 1)}
    assert await partition.settle([mine, theirs], SHARED) == [b"OK", 0]


async def test_settle_several_partitions_checks_each_lease(partition: Partition, client: Client, keys: Keys) -> None:
    """Messages under a lost lease stay pending; those of the other partitions are settled."""
    partitions = [partition, *[await Partition(client, keys, number).prepare() for number in (4, 5)]]
    ids = [await each.deliver(2) for each in partitions]
    await partition.call("HSET", partitions[1].lease, "epoch", "8")
    args = [part for some in ids for part in (EPOCH, len(some), 0, *some)]
    paired = [key for each in partitions for key in (each.stream, each.lease, each.retry)]
    assert await SETTLE_MESSAGES(client, paired, [ME, GROUP, *args]) == [[b"OK", 2], STALE, [b"OK", 2]]
    assert [len(await each.pending()) for each in partitions] == [0, 2, 0]
    assert await SETTLE_MESSAGES(client, paired, [ME, GROUP, *args]) == [[b"OK", 0], STALE, [b"OK", 0]]


async def test_settle_of_a_retry_whose_start_a_failover_has_lost_leaves_nothing_parked(partition: Partition) -> None:
    """Otherwise the settled message would be delivered again. A lease that is lost removes nothing."""
    (mine,) = await partition.deliver(1)
    await partition.call("ZADD", partition.retry, 1, mine + b"|1")
    keys = [partition.stream, partition.lease, partition.retry]
    for epoch, reply, left in (("8", STALE, 1), (EPOCH, [b"OK", 1], 0)):
        assert await SETTLE_MESSAGES(partition.client, keys, [ME, GROUP, epoch, 1, 1, mine, mine + b"|1"]) == [reply]
        assert await partition.call("ZCARD", partition.retry) == left


# -- start_message


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_start_charges_one_attempt_and_ends_the_retry_wait(partition: Partition, epoch: str) -> None:
    """Called twice it charges once."""
    first, second = await partition.deliver(2)
    await partition.park(first, 1, 0, keep=True)
    for _ in range(2):
        assert await partition.start(first, 1, epoch) == [b"OK"]
        assert await partition.pending() == {first: (ME, 2), second: (ME, 1)}
        assert await partition.parked() == {}


async def test_start_of_a_message_no_longer_pending_restores_it_for_its_owner(partition: Partition) -> None:
    """The consumer was deleted; under shared distribution the message is not pending."""
    first, waits = await partition.deliver(2)
    await partition.park(waits, 1, 0, keep=True)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    for entry_id in (first, waits):
        assert await partition.start(entry_id, 1, SHARED) == [b"NOT_PENDING"]
        assert await partition.start(entry_id, 1) == [b"OK"]
    assert (await partition.pending(), await partition.parked()) == ({first: (ME, 2), waits: (ME, 2)}, {})


async def test_start_that_must_be_due_is_refused_until_then(partition: Partition) -> None:
    """The owner has no timer for it. What has a timer starts by that."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, 3_600_000, keep=True)
    for _ in range(2):
        word, wait_ms = await partition.start(entry_id, 1, must_be_due=True)
        assert word == b"NOT_DUE"
        assert 3_000_000 < wait_ms <= 3_600_000
    assert await partition.pending() == {entry_id: (ME, 1)}
    assert list(await partition.parked()) == [entry_id + b"|1"]
    await partition.call("ZADD", partition.retry, 5, entry_id + b"|1")
    assert await partition.start(entry_id, 1, must_be_due=True) == [b"OK"]
    assert (await partition.pending(), await partition.parked()) == ({entry_id: (ME, 2)}, {})


async def test_start_that_must_be_due_follows_a_clock_that_was_set_back(partition: Partition) -> None:
    """By an hour, since the message was parked for a second."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, 1000 + 3_600_000, keep=True)
    seen = int(await partition.call("HGET", partition.lease, "clock"))
    await partition.call("HSET", partition.lease, "clock", seen + 3_600_000)
    reply = await partition.start(entry_id, 1, must_be_due=True)
    assert reply == [b"OK"] or reply[1] <= 1000


async def test_start_that_must_be_due_gives_a_wait_that_is_a_number(partition: Partition) -> None:
    """Another client has written that it is never due."""
    (entry_id,) = await partition.deliver(1)
    await partition.call("ZADD", partition.retry, "+inf", entry_id + b"|1")
    assert await partition.start(entry_id, 1, must_be_due=True) == [b"NOT_DUE", 10**15]


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
@pytest.mark.parametrize("is_settled", [False, True])
async def test_start_of_a_cancelled_message_is_refused(partition: Partition, epoch: str, is_settled: bool) -> None:
    """It has a mark, or it was settled as cancelled, and something has made it pending again."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, 0, keep=True)
    if is_settled:
        await partition.call("ZADD", partition.cancelled, 1, entry_id)
    else:
        await partition.call("HSET", partition.cancels, entry_id, "asked")
    assert await partition.start(entry_id, 1, epoch) == [b"CANCELLED"]
    assert await partition.pending() == {entry_id: (ME, 1)}
    keys = [partition.stream, partition.lease, partition.retry, partition.cancels, partition.cancelled]
    for _ in range(2):
        args = [ME, epoch, GROUP, entry_id]
        assert (await SETTLE_CANCELLED(partition.client, keys, args))[0] in (b"OK", b"NOT_PENDING")
        assert (await partition.pending(), await partition.parked()) == ({}, {})
        assert await partition.call("ZRANGE", partition.cancelled, 0, -1) == [entry_id]
        assert await partition.call("EXISTS", partition.cancels) == 0


# -- park_message and unpark_messages


async def test_park_notes_the_most_attempts_of_what_is_parked(partition: Partition) -> None:
    """Retention looks for a message by it. Without a note nothing is known about what is parked already."""
    one, other = await partition.deliver(2)
    for entry, attempts, counts, noted in ((one, 2, True, b"2"), (other, 1, True, b"2"), (one, 5, False, b"4")):
        assert (await partition.park(entry, attempts, 1000, keep=True, counts=counts))[0] == b"OK"
        assert await partition.call("HGET", partition.lease, "most_charged") == noted
    await partition.call("HDEL", partition.lease, "most_charged")
    await partition.park(other, 2, 1000, keep=True)
    assert await partition.call("HGET", partition.lease, "most_charged") is None
    await partition.call("DEL", partition.retry)
    await partition.park(other, 3, 1000, keep=True)
    assert await partition.call("HGET", partition.lease, "most_charged") == b"3"


async def test_park_that_comes_after_the_next_start_parks_nothing(partition: Partition) -> None:
    """A call that was late in the network, and was repeated meanwhile: the message runs again already."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, 0, keep=True)
    await partition.start(entry_id, 1)
    assert await partition.park(entry_id, 1, 0, keep=True) == [b"NOT_PENDING"]
    assert (await partition.pending(), await partition.parked()) == ({entry_id: (ME, 2)}, {})


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_park_without_key_order_leaves_the_pending_list(partition: Partition, epoch: str) -> None:
    """Parked twice the message is there once."""
    (entry_id,) = await partition.deliver(1)
    before = await partition.now_ms()
    reply = await partition.park(entry_id, 2, 5000, epoch=epoch)
    assert reply[0] == b"OK"
    assert before + 5000 <= int(reply[1]) <= await partition.now_ms() + 5000
    assert await partition.parked() == {entry_id + b"|2": int(reply[1])}
    assert await partition.pending() == {}
    assert await partition.park(entry_id, 2, 5000, epoch=epoch) == [b"NOT_PENDING"]
    assert await partition.parked() == {entry_id + b"|2": int(reply[1])}


async def test_park_with_key_order_stays_pending(partition: Partition) -> None:
    """Parked twice the message waits once, for the later time."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, 1000, keep=True)
    reply = await partition.park(entry_id, 1, 9000, keep=True)
    assert await partition.parked() == {entry_id + b"|1": int(reply[1])}
    assert await partition.pending() == {entry_id: (ME, 1)}


async def test_park_keeps_the_errors_of_the_last_ten_attempts(partition: Partition) -> None:
    """A call that is repeated notes its attempt once. The newest note is where an older version reads it."""
    (entry_id,) = await partition.deliver(1)
    for attempt in range(1, 14):
        for _ in range(2):
            await partition.park(entry_id, attempt, 0, keep=True, error=f'try {attempt}: no\npaper, "ö"')
        await partition.start(entry_id, attempt)
        newest = await partition.call("HGET", partition.errors, entry_id)
        assert newest.decode().split(" ", 2)[::2] == [str(attempt), f'try {attempt}: no\npaper, "ö"']
    assert await partition.failed(entry_id) == [(n, f'try {n}: no\npaper, "ö"') for n in range(4, 14)]
    assert await partition.call("HLEN", partition.errors) == 2


@pytest.mark.parametrize("text", ["ASCII", "Größe", "数量错误", "🙂", "a数量错误", "ab数量错误"])
async def test_park_cuts_no_error_within_a_character(partition: Partition, text: str) -> None:
    """Notes of earlier attempts are cut to 300 bytes; what is half a character would spoil the whole list."""
    (entry_id,) = await partition.deliver(1)
    for attempt in range(1, 6):
        await partition.park(entry_id, attempt, 0, keep=True, error=text * 100)
        await partition.start(entry_id, attempt)
    failed = await partition.failed(entry_id)
    assert [attempt for attempt, _ in failed] == [1, 2, 3, 4, 5]
    assert all(text * 100 == error or (text * 100).startswith(error) for _, error in failed)
    assert all(len(error) > 60 for _, error in failed)


async def test_park_beside_an_older_version_and_other_clients(partition: Partition) -> None:
    """An older version writes only the newest note; what another client has written there is no obstacle."""
    ids = await partition.deliver(3)
    for entry_id, past in zip(ids, (b"no list", b"17", b'{"a": 1}'), strict=True):
        await partition.call("HSET", partition.errors, entry_id, "1 1718000000000 old")
        await partition.call("HSET", partition.errors, entry_id + PAST, past)
        assert await partition.failed(entry_id) == [(1, "old")]
        assert (await partition.park(entry_id, 2, 0, keep=True, error="x" * 500))[0] == b"OK"
        await partition.start(entry_id, 2)
        await partition.park(entry_id, 3, 0, keep=True, error="new")
        assert [attempt for attempt, _ in await partition.failed(entry_id)] == [1, 2, 3]
        assert await partition.call("HSTRLEN", partition.errors, entry_id + PAST) < 400


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_park_that_does_not_count_takes_the_attempt_back(partition: Partition, keep: bool, epoch: str) -> None:
    """Parked twice it takes one back; the next start charges it again."""
    (entry_id,) = await partition.deliver(1)
    await partition.start(entry_id, 1, epoch)
    for _ in range(2):
        await partition.park(entry_id, 2, 0, keep=keep, counts=False, epoch=epoch)
        assert list(await partition.parked()) == [entry_id + b"|1"]
        assert await partition.pending() == ({entry_id: (ME, 1)} if keep else {})
    if not keep:
        assert (await partition.unpark(epoch=epoch))[2:] == [[entry_id, 1, [b"data", b"x"], 0]]
    await partition.start(entry_id, 1, epoch)
    assert (await partition.pending(), await partition.parked()) == ({entry_id: (ME, 2)}, {})


@pytest.mark.parametrize("keep", [False, True])
async def test_park_of_a_message_whose_charge_was_lost_writes_the_count(partition: Partition, keep: bool) -> None:
    """A failover has lost the start of the second attempt. The next start must find the parked message, or it comes
    again after it was settled."""
    (entry_id,) = await partition.deliver(1)
    assert (await partition.park(entry_id, 2, -1000, keep=keep))[0] == b"OK"
    if keep:
        assert await partition.pending() == {entry_id: (ME, 2)}
        assert (await partition.claim())[3][:2] == [entry_id, 2]
    else:
        assert (await partition.unpark())[2][:2] == [entry_id, 2]
    await partition.start(entry_id, 2)
    await partition.settle([entry_id])
    assert (await partition.unpark())[2:] == []


@pytest.mark.parametrize("keep", [False, True])
async def test_park_of_a_message_no_longer_pending_retries_it_once(partition: Partition, keep: bool) -> None:
    """The consumer was deleted, and the failed message is retried anyway."""
    (entry_id,) = await partition.deliver(1)
    await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
    assert await partition.park(entry_id, 1, 0, epoch=SHARED, keep=keep) == [b"NOT_PENDING"]
    for _ in range(2):
        await partition.park(entry_id, 1, 0, keep=keep)
        assert list(await partition.parked()) == [entry_id + b"|1"]
        assert await partition.pending() == ({entry_id: (ME, 1)} if keep else {})


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_unpark_delivers_due_messages_under_their_id(partition: Partition, epoch: str) -> None:
    """They come with their attempts and body; asked twice they come once."""
    due, later, _ = await partition.deliver(3)
    await partition.park(due, 3, 0, epoch=epoch)
    await partition.park(later, 1, 60_000, epoch=epoch)
    await partition.settle([_], epoch)
    status, wait_ms, *messages = await partition.unpark(epoch=epoch)
    assert (status, messages) == (b"OK", [[due, 3, [b"data", b"x"], 0]])
    assert 0 < wait_ms <= 60_000
    assert await partition.pending() == {due: (ME, 3)}
    assert list(await partition.parked()) == [later + b"|1"]
    assert (await partition.unpark(epoch=epoch))[2:] == []


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_unpark_drops_the_wait_of_a_message_started_since(partition: Partition, epoch: str) -> None:
    """A failover may restore a wait that a start had ended: it is dropped and the attempt stays charged."""
    mine, others = (await partition.deliver(1))[0], (await partition.deliver(1, to=OTHER))[0]
    for entry_id, owner in ((mine, ME), (others, OTHER)):
        await partition.call("XCLAIM", partition.stream, GROUP, owner, 0, entry_id, "RETRYCOUNT", 2, "JUSTID")
        await partition.call("ZADD", partition.retry, 1, entry_id + b"|1")
    assert await partition.unpark(epoch=epoch) == [b"OK", -1]
    assert await partition.pending() == {mine: (ME, 2), others: (OTHER, 2)}
    assert await partition.parked() == {}


async def test_unpark_of_a_pending_message_says_that_it_was_pending(partition: Partition) -> None:
    """Its owner knows whether a timer runs. Without the pending entry no other path delivers it."""
    (entry_id,) = await partition.deliver(1)
    for is_deleted in (False, True):
        await partition.park(entry_id, 1, 0, keep=True)
        if is_deleted:
            await partition.call("XGROUP", "DELCONSUMER", partition.stream, GROUP, ME)
        assert await partition.unpark() == [b"OK", -1, [entry_id, 1, [b"data", b"x"], int(not is_deleted)]]
        assert (await partition.pending(), await partition.parked()) == ({entry_id: (ME, 1)}, {})


async def test_unpark_returns_at_most_its_limit(partition: Partition) -> None:
    """Oldest due first; the reply says that the next one is due now."""
    ids = await partition.deliver(3)
    for entry_id in ids:
        await partition.park(entry_id, 1, -1000)
    status, wait_ms, *messages = await partition.unpark(2)
    assert (status, wait_ms, [row[0] for row in messages]) == (b"OK", 0, ids[:2])
    assert await partition.unpark(2) == [b"OK", -1, [ids[2], 1, [b"data", b"x"], 0]]
    assert await partition.unpark(2) == [b"OK", -1]


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
@pytest.mark.parametrize("keep", [True, False])
async def test_unpark_of_a_deleted_entry_makes_it_a_dead_letter_once(
    partition: Partition, epoch: str, *, keep: bool
) -> None:
    """Also one that was still pending; one that another consumer has is left to it."""
    (mine,), (theirs,) = await partition.deliver(1), await partition.deliver(1, OTHER)
    await partition.park(mine, 1, 0, keep=keep, epoch=epoch)
    await partition.call("ZADD", partition.retry, 1, theirs + b"|1")
    await partition.call("XDEL", partition.stream, mine, theirs)
    was_pending = int(keep and epoch != SHARED)
    assert await partition.unpark(epoch=epoch) == [b"OK", -1, [mine, 1, b"", was_pending]]
    assert await partition.unpark(epoch=epoch) == [b"OK", -1]
    assert (await partition.pending(), await partition.parked()) == ({theirs: (OTHER, 1)}, {})
    assert await partition.lost() == [mine]


async def test_unpark_of_a_deleted_entry_returns_no_fields(partition: Partition) -> None:
    """It no longer waits afterwards."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 2, 0)
    await partition.call("XDEL", partition.stream, entry_id)
    assert await partition.unpark() == [b"OK", -1, [entry_id, 2, b"", 0]]
    assert (await partition.parked(), await partition.pending()) == ({}, {})


# -- bury_message


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_bury_writes_one_dead_letter_with_fields_and_reason(partition: Partition, epoch: str) -> None:
    """Buried twice the message is there once."""
    (entry_id,) = await partition.deliver(1, ME, "data", b"\x00\xff", "key", "c-42")
    await partition.park(entry_id, 4, 0, keep=True, epoch=epoch)
    assert (await partition.bury(entry_id, 4, epoch=epoch))[0] == b"OK"
    letter = {b"data": b"\x00\xff", b"key": b"c-42", b"dlq.reason": b"failed", b"dlq.origin": entry_id}
    assert await partition.dead() == [letter]
    assert (await partition.pending(), await partition.parked()) == ({}, {})
    assert await partition.bury(entry_id, 4, epoch=epoch, again=True) == [b"NOT_PENDING"]
    assert await partition.dead() == [letter]


async def test_bury_of_a_very_wide_entry_packs_all_fields(partition: Partition) -> None:
    """10 000 fields are packed into one, and none is lost."""
    fields = [part for number in range(10_000) for part in (f"f{number}", f"v{number}")]
    (entry_id,) = await partition.deliver(1, ME, *fields)
    assert (await partition.bury(entry_id))[0] == b"OK"
    (letter,) = await partition.dead()
    assert set(letter) == {b"dlq.packed", b"dlq.reason", b"dlq.origin"}
    assert unpack_fields(letter[b"dlq.packed"]) == [field.encode() for field in fields]


async def test_bury_of_a_deleted_entry_keeps_the_reason(partition: Partition) -> None:
    """The dead letter says that it has no body."""
    (entry_id,) = await partition.deliver(1)
    await partition.call("XDEL", partition.stream, entry_id)
    assert (await partition.bury(entry_id))[0] == b"OK"
    assert await partition.dead() == [{b"dlq.body": b"deleted", b"dlq.reason": b"failed", b"dlq.origin": entry_id}]
    assert await partition.pending() == {}


async def test_bury_beyond_the_limit_drops_the_oldest_dead_letters(partition: Partition) -> None:
    """The limit is approximate."""
    for entry_id in await partition.deliver(300):
        await partition.bury(entry_id, keep=10)
    letters = await partition.dead()
    assert 10 <= len(letters) < 300


# -- hand_back


async def test_hand_back_keeps_messages_pending_with_their_attempts(partition: Partition) -> None:
    """Messages of another consumer are not touched."""
    first, second = await partition.deliver(2)
    (theirs,) = await partition.deliver(1, OTHER)
    for _ in range(2):
        assert await partition.hand_back([(first, 0), (second, 2), (theirs, 0)]) == [b"OK", 2]
        assert await partition.pending() == {first: (ME, 0), second: (ME, 2), theirs: (OTHER, 1)}


async def test_hand_back_shared_makes_messages_claimable_at_once(partition: Partition) -> None:
    """Without a lease their idle time is raised, so that any member may claim them."""
    (entry_id,) = await partition.deliver(1)
    assert await partition.hand_back([(entry_id, 0)], SHARED) == [b"OK", 1]
    assert await partition.idle(entry_id) >= 86_400_000
    assert await partition.pending() == {entry_id: (ME, 0)}
    assert await partition.hand_back([(entry_id, 0)], SHARED) == [b"OK", 1]


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_hand_back_of_a_deleted_entry_makes_it_a_dead_letter_once(partition: Partition, epoch: str) -> None:
    """XCLAIM drops it from the pending list, so no other member could find it."""
    gone, there = await partition.deliver(2)
    await partition.call("XDEL", partition.stream, gone)
    assert await partition.hand_back([(gone, 0), (there, 0)], epoch) == [b"OK", 1, gone]
    assert await partition.hand_back([(gone, 0), (there, 0)], epoch) == [b"OK", 1]
    assert await partition.pending() == {there: (ME, 0)}
    assert await partition.lost() == [gone]


# -- touch_messages


async def test_touch_of_a_deleted_entry_makes_it_a_dead_letter_once(partition: Partition) -> None:
    """Its handler may still succeed; if it does not, the message is not lost without a word."""
    gone, there = await partition.deliver(2)
    await partition.call("XDEL", partition.stream, gone)
    assert await partition.touch([gone, there]) == [[], [gone]]
    assert await partition.touch([gone, there]) == [[], []]
    assert await partition.pending() == {there: (ME, 1)}
    assert await partition.lost() == [gone]


async def test_touch_resets_the_idle_time_of_own_messages(partition: Partition) -> None:
    """It charges no attempt, returns the ids of other consumers and steals none; also a second time."""
    (mine,), (theirs,) = await partition.deliver(1), await partition.deliver(1, OTHER)
    await partition.age(theirs, OTHER, 60_000)
    for _ in range(2):
        await partition.age(mine, ME, 60_000)
        assert await partition.touch([mine, theirs, b"1-1"]) == [[theirs], []]
        assert await partition.idle(mine) < 60_000
        assert await partition.idle(theirs) >= 60_000
        assert await partition.pending() == {mine: (ME, 1), theirs: (OTHER, 1)}


# -- claim_pending


async def test_claim_returns_all_pending_messages_in_order(partition: Partition) -> None:
    """They are not charged; the reply has attempts and former ownership; the reader is stored."""
    ids = await partition.deliver(2, OTHER) + await partition.deliver(1)
    for before in ((0, 0, 1), (1, 1, 1)):
        status, cursor, lost, *rows = await partition.claim()
        assert (status, cursor, lost) == (b"OK", b"0-0", [])
        assert rows == [
            [entry_id, 1, 0, [b"data", b"x"], is_ours] for entry_id, is_ours in zip(ids, before, strict=True)
        ]
        assert await partition.pending() == dict.fromkeys(ids, (ME, 1))
    assert await partition.call("HGET", partition.lease, "reader") == b"12 127.0.0.1:5000"


async def test_claim_of_a_parked_message_returns_the_time_left(partition: Partition) -> None:
    """With key order a message that waits for its retry stays pending."""
    waiting, due = await partition.deliver(2)
    await partition.park(waiting, 1, 60_000, keep=True)
    await partition.park(due, 1, -1000, keep=True)
    *_, first, second = await partition.claim()
    assert first[0] == waiting
    assert 0 < first[2] <= 60_000
    assert second == [due, 1, 0, [b"data", b"x"], 1]


async def pages(partition: Partition, **options: Any) -> tuple[list[bytes], int]:
    """The ids that come over all pages, and how many pages there were."""
    cursor, ids, count = b"0-0", [], 0
    while count == 0 or cursor != b"0-0":
        _, cursor, _, *rows = await partition.claim(cursor, **options)
        ids += [row[0] for row in rows]
        count += 1
        assert count < 50
    return ids, count


@pytest.mark.parametrize("source", ["", OTHER])
@pytest.mark.parametrize("limit", [{"count": 3}, {"budget": 20}])
async def test_claim_in_pages_returns_each_message_once(
    partition: Partition, source: str, limit: dict[str, int]
) -> None:
    """Pages are bounded by count and by bytes, and keep the order."""
    ids = await partition.deliver(10, OTHER)
    seen, count = await pages(partition, source=source, **limit)
    assert seen == ids
    assert count >= 2
    assert await partition.pending() == dict.fromkeys(ids, (ME, 1))


@pytest.mark.parametrize(("count", "budget"), [(1, BIG), (3, BIG), (7, 25), (100, 0), (100, 40), (100, BIG)])
async def test_claim_page_is_that_of_xpending_with_the_deleted_ids(
    partition: Partition, count: int, budget: int
) -> None:
    """Deleted entries count like the others, and the next page begins with the first id that has no body yet."""
    ids = await partition.deliver(40, OTHER)
    settled, deleted = ids[5:9] + ids[20:30:3], ids[:2] + ids[11:14] + ids[-1:]
    await partition.call("XACK", partition.stream, GROUP, *settled)
    await partition.call("XDEL", partition.stream, *deleted)
    cursor, held, gone = b"0-0", list[bytes](), list[bytes]()
    while cursor != b"0-0" or not held:
        rows = await partition.call("XPENDING", partition.stream, GROUP, cursor, "+", count)
        _, cursor, lost, *found = await partition.claim(cursor, count, budget=budget)
        page = sorted([*lost, *[row[0] for row in found]], key=parse_stream_id)
        assert page == [row[0] for row in rows[: len(page)]]
        assert len(page) == min(count, len(rows)) or budget < BIG
        assert len(page) > 0
        left = await partition.call("XPENDING", partition.stream, GROUP, "-", "+", 100, OTHER)
        assert cursor == (left[0][0] if left else b"0-0"), "nothing is claimed behind the cursor"
        held += [row[0] for row in found]
        gone += lost
    assert (gone, await partition.lost()) == (deleted, deleted)
    assert held == [each for each in ids if each not in {*settled, *deleted}]
    assert await partition.pending() == dict.fromkeys(held, (ME, 1))


async def test_claim_page_does_not_load_far_more_than_its_budget(partition: Partition, refusals: Refusals) -> None:
    """Portions of large bodies are small: the script must not fill the server's memory with what it does not return."""
    refusals.is_off = True
    await partition.deliver(60, OTHER, "data", "x" * 100_000)
    await partition.call("CONFIG", "RESETSTAT")
    _, _, _, *found = await partition.claim(budget=250_000)
    assert len(found) == 3
    stats = await partition.call("INFO", "commandstats")
    calls = int(stats.decode().split("cmdstat_xrange:calls=")[1].split(",")[0])
    assert calls <= len(found)


async def test_claim_shared_cut_by_bytes_leaves_the_rest_claimable(partition: Partition) -> None:
    """The next page finds the messages that the byte limit left out."""
    ids = await partition.deliver(10, OTHER)
    for entry_id in ids:
        await partition.age(entry_id, OTHER, 60_000)
    seen, _ = await pages(partition, idle_ms=30_000, budget=20, epoch=SHARED)
    assert seen == ids


async def test_claim_shared_leaves_recently_touched_messages(partition: Partition) -> None:
    """Without a lease only idle messages are claimed."""
    old, young = await partition.deliver(2, OTHER)
    await partition.age(old, OTHER, 60_000)
    *_, row = await partition.claim(idle_ms=30_000, epoch=SHARED)
    assert row[0] == old
    assert await partition.pending() == {old: (ME, 1), young: (OTHER, 1)}


async def test_claim_of_one_consumer_leaves_the_others(partition: Partition) -> None:
    """Messages of other consumers stay with them."""
    (theirs,), (others,) = await partition.deliver(1, OTHER), await partition.deliver(1, "third")
    *_, row = await partition.claim(source=OTHER, epoch=SHARED)
    assert row[0] == theirs
    assert await partition.pending() == {theirs: (ME, 1), others: ("third", 1)}


@pytest.mark.parametrize("options", [{}, {"source": OTHER}, {"idle_ms": 30_000, "epoch": SHARED}])
async def test_claim_of_a_deleted_entry_makes_it_a_dead_letter_once(
    partition: Partition, options: dict[str, Any]
) -> None:
    """In the same step: the reply may be lost, and a second claim finds it no longer pending."""
    gone, there = await partition.deliver(2, OTHER)
    for entry_id in (gone, there):
        await partition.age(entry_id, OTHER, 60_000)
    await partition.call("XDEL", partition.stream, gone)
    _, _, lost, *rows = await partition.claim(**options)
    assert (lost, [row[0] for row in rows]) == ([gone], [there])
    assert await partition.pending() == {there: (ME, 1)}
    assert (await partition.claim(**options))[2] == []
    assert await partition.lost() == [gone]


async def test_claim_shared_waits_for_the_lease_of_the_member_that_has_the_message(partition: Partition) -> None:
    """A member with a longer lease touches its messages less often; those of others are claimed after the own lease."""
    slow, fast, mine = [(await partition.deliver(1, owner))[0] for owner in ("slow", "fast", ME)]
    for entry_id, owner in ((slow, "slow"), (fast, "fast"), (mine, ME)):
        await partition.age(entry_id, owner, 60_000)
    options = {"idle_ms": 30_000, "epoch": SHARED}
    *_, first, second = await partition.claim(**options, leases=("slow", 90_000))
    assert [first[0], second[0]] == [fast, mine]
    assert await partition.pending() == {slow: ("slow", 1), fast: (ME, 1), mine: (ME, 1)}
    await partition.age(slow, "slow", 90_000)
    *_, row = await partition.claim(**options, leases=("slow", 90_000))
    assert row[0] == slow


async def test_claim_shared_finds_an_idle_message_behind_many_that_are_not(partition: Partition) -> None:
    """A page looks at ten times as many messages as it claims, and the cursor goes on behind them."""
    ids = await partition.deliver(50, OTHER)
    for entry_id in ids[-3:]:
        await partition.age(entry_id, OTHER, 60_000)
    seen, count = await pages(partition, count=2, idle_ms=30_000, epoch=SHARED)
    assert (seen, count) == (ids[-3:], 4)
