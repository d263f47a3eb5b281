"""The scripts that settle and redeliver: keys before, one call, keys after; with a stale epoch; and called twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.message import unpack_fields
from rsmq.script import (
    BURY_MESSAGE,
    CLAIM_PENDING,
    HAND_BACK,
    PARK_MESSAGE,
    SETTLE_MESSAGES,
    START_MESSAGE,
    TOUCH_MESSAGES,
    UNPARK_MESSAGES,
)

ME, OTHER, GROUP, EPOCH = "me", "other", "billing", "7"
SHARED = ""
STALE = [b"STALE_EPOCH"]
BIG = 1 << 30


class Partition:
    """One partition of a topic with a lease of `me`, epoch 7, and what a test asks of its keys."""

    def __init__(self, client: Client, keys: Keys, number: int = 3) -> None:
        self.client = client
        self.stream, self.lease = keys.stream("orders", number), keys.lease("orders", number, GROUP)
        self.retry, self.dlq = keys.retry("orders", number, GROUP), keys.dlq("orders", number, GROUP)

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
        """For how many ms nobody has touched a pending message."""
        return int((await self.call("XPENDING", self.stream, GROUP, entry_id, entry_id, 1))[0][2])

    async def age(self, entry_id: bytes, owner: str, ms: int) -> None:
        """Let a pending message look as if its owner had not touched it for so long."""
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
        """Everything a refused call must leave alone."""
        lease = await self.call("HGETALL", self.lease)
        return await self.pending(), await self.parked(), await self.dead(), lease, await self.call("XLEN", self.stream)

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    # the scripts, with the arguments that a test varies

    async def settle(self, ids: Sequence[bytes], epoch: str = EPOCH) -> Any:
        return (await SETTLE_MESSAGES(self.client, [self.stream, self.lease], [ME, GROUP, epoch, len(ids), *ids]))[0]

    async def start(self, entry_id: bytes, attempts: int, epoch: str = EPOCH) -> Any:
        keys = [self.stream, self.lease, self.retry]
        return await START_MESSAGE(self.client, keys, [ME, epoch, GROUP, entry_id, attempts])

    async def park(
        self, entry_id: bytes, attempts: int, delay_ms: int, *, keep: bool = False, epoch: str = EPOCH
    ) -> Any:
        keys = [self.stream, self.lease, self.retry]
        return await PARK_MESSAGE(self.client, keys, [ME, epoch, GROUP, entry_id, attempts, delay_ms, int(keep)])

    async def unpark(self, limit: int = 100, epoch: str = EPOCH) -> Any:
        return await UNPARK_MESSAGES(self.client, [self.stream, self.lease, self.retry], [ME, epoch, GROUP, limit])

    async def bury(self, entry_id: bytes, attempts: int = 1, *, keep: int = 1000, epoch: str = EPOCH) -> Any:
        keys = [self.stream, self.lease, self.retry, self.dlq]
        fields = ["dlq.reason", "failed", "dlq.origin", entry_id]
        return await BURY_MESSAGE(self.client, keys, [ME, epoch, GROUP, entry_id, attempts, keep, *fields])

    async def hand_back(self, ids: Sequence[tuple[bytes, int]], epoch: str = EPOCH) -> Any:
        pairs = [part for pair in ids for part in pair]
        return await HAND_BACK(self.client, [self.stream, self.lease], [ME, epoch, GROUP, *pairs])

    async def touch(self, ids: Sequence[bytes]) -> Any:
        return await TOUCH_MESSAGES(self.client, [self.stream], [ME, GROUP, *ids])

    async def claim(
        self, cursor: bytes = b"0-0", count: int = 100, *, idle_ms: int = 0, source: str = "", budget: int = BIG,
        epoch: str = EPOCH,
    ) -> Any:  # fmt: skip
        keys = [self.stream, self.lease, self.retry]
        arguments = [ME, epoch, GROUP, cursor, count, idle_ms, source, budget, "12 127.0.0.1:5000" if epoch else ""]
        return await CLAIM_PENDING(self.client, keys, arguments)


@pytest.fixture
async def place(client: Client, keys: Keys) -> Partition:
    return await Partition(client, keys).prepare()


CALLS: dict[str, Callable[[Partition, bytes, str], Awaitable[Any]]] = {
    "settle": lambda place, entry_id, epoch: place.settle([entry_id], epoch),
    "start": lambda place, entry_id, epoch: place.start(entry_id, 1, epoch),
    "park": lambda place, entry_id, epoch: place.park(entry_id, 1, 0, epoch=epoch),
    "unpark": lambda place, entry_id, epoch: place.unpark(epoch=epoch),
    "bury": lambda place, entry_id, epoch: place.bury(entry_id, epoch=epoch),
    "hand_back": lambda place, entry_id, epoch: place.hand_back([(entry_id, 0)], epoch),
    "claim": lambda place, entry_id, epoch: place.claim(epoch=epoch),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_stale_epoch_changes_nothing(place: Partition, name: str) -> None:
    """A member whose lease has a newer epoch, or another owner, is refused by every script, and no key changes."""
    waiting, pending = await place.deliver(2)
    await place.park(waiting, 1, 0)
    before = await place.state()
    assert await CALLS[name](place, pending, "6") == STALE
    assert await place.state() == before
    await place.call("HSET", place.lease, "owner", OTHER)
    before = await place.state()
    assert await CALLS[name](place, pending, EPOCH) == STALE
    assert await place.state() == before


@pytest.mark.parametrize("name", ["start", "park", "bury"])
@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_what_another_holds_is_not_pending(place: Partition, name: str, epoch: str) -> None:
    """What another consumer holds, or nobody, cannot be started, parked or buried."""
    (theirs,) = await place.deliver(1, OTHER)
    before = await place.state()
    for entry_id in (theirs, b"1-1"):
        assert await CALLS[name](place, entry_id, epoch) == [b"NOT_PENDING"]
    assert await place.state() == before


# -- settle_messages


async def test_settle(place: Partition) -> None:
    """Settled messages leave the pending list and stay in the stream; settled twice they count once."""
    first, second, third = await place.deliver(3)
    assert await place.settle([first, third]) == [b"OK", 2]
    assert await place.pending() == {second: (ME, 1)}
    assert await place.call("XLEN", place.stream) == 3
    assert await place.settle([first, third]) == [b"OK", 0]


async def test_settle_thousands_at_once(place: Partition) -> None:
    """More ids than one command takes are settled in one call."""
    for number in range(2500):
        await place.call("XADD", place.stream, f"{number + 1}-0", "data", "x")
    await place.call("XREADGROUP", "GROUP", GROUP, ME, "STREAMS", place.stream, ">")
    assert await place.settle([b"%d-0" % (number + 1) for number in range(2500)]) == [b"OK", 2500]
    assert await place.pending() == {}


async def test_settle_shared(place: Partition) -> None:
    """Without a lease only what is still mine is settled."""
    (mine,) = await place.deliver(1)
    (theirs,) = await place.deliver(1, OTHER)
    assert await place.settle([mine, theirs], SHARED) == [b"OK", 1]
    assert await place.pending() == {theirs: (OTHER, 1)}
    assert await place.settle([mine, theirs], SHARED) == [b"OK", 0]


async def test_settle_several_partitions(place: Partition, client: Client, keys: Keys) -> None:
    """Each partition's lease is checked for itself: what one has lost stays pending, the others are settled."""
    places = [place, *[await Partition(client, keys, number).prepare() for number in (4, 5)]]
    ids = [await each.deliver(2) for each in places]
    await place.call("HSET", places[1].lease, "epoch", "8")
    args = [part for some in ids for part in (EPOCH, len(some), *some)]
    paired = [key for each in places for key in (each.stream, each.lease)]
    assert await SETTLE_MESSAGES(client, paired, [ME, GROUP, *args]) == [[b"OK", 2], STALE, [b"OK", 2]]
    assert [len(await each.pending()) for each in places] == [0, 2, 0]
    assert await SETTLE_MESSAGES(client, paired, [ME, GROUP, *args]) == [[b"OK", 0], STALE, [b"OK", 0]]


# -- start_message


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_start(place: Partition, epoch: str) -> None:
    """A start charges one attempt and ends the wait for a retry; called twice it charges once."""
    first, second = await place.deliver(2)
    await place.park(first, 1, 0, keep=True)
    for _ in range(2):
        assert await place.start(first, 1, epoch) == [b"OK"]
        assert await place.pending() == {first: (ME, 2), second: (ME, 1)}
        assert await place.parked() == {}


async def test_start_of_what_is_pending_no_more(place: Partition) -> None:
    """Somebody has deleted our consumer: the owner of the partition takes its message back, a sharer cannot know."""
    first, waits = await place.deliver(2)
    await place.park(waits, 1, 0, keep=True)
    await place.call("XGROUP", "DELCONSUMER", place.stream, GROUP, ME)
    for entry_id in (first, waits):
        assert await place.start(entry_id, 1, SHARED) == [b"NOT_PENDING"]
        assert await place.start(entry_id, 1) == [b"OK"]
    assert (await place.pending(), await place.parked()) == ({first: (ME, 2), waits: (ME, 2)}, {})
    await place.settle([first])
    await place.call("XDEL", place.stream, first)
    assert await place.start(first, 1) == [b"NOT_PENDING"]


# -- park_message and unpark_messages


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_park(place: Partition, epoch: str) -> None:
    """Without key order a parked message leaves the pending list; parked twice it is there once."""
    (entry_id,) = await place.deliver(1)
    before = await place.now_ms()
    reply = await place.park(entry_id, 2, 5000, epoch=epoch)
    assert reply[0] == b"OK"
    assert before + 5000 <= int(reply[1]) <= await place.now_ms() + 5000
    assert await place.parked() == {entry_id + b"|2": int(reply[1])}
    assert await place.pending() == {}
    assert await place.park(entry_id, 2, 5000, epoch=epoch) == [b"NOT_PENDING"]
    assert await place.parked() == {entry_id + b"|2": int(reply[1])}


async def test_park_in_its_place(place: Partition) -> None:
    """With key order a parked message stays pending; parked twice it waits once, for the later time."""
    (entry_id,) = await place.deliver(1)
    await place.park(entry_id, 1, 1000, keep=True)
    reply = await place.park(entry_id, 1, 9000, keep=True)
    assert await place.parked() == {entry_id + b"|1": int(reply[1])}
    assert await place.pending() == {entry_id: (ME, 1)}


@pytest.mark.parametrize("keep", [False, True])
async def test_park_what_is_pending_no_more(place: Partition, keep: bool) -> None:
    """Somebody has deleted our consumer: what fails is tried again all the same, and once."""
    (entry_id,) = await place.deliver(1)
    await place.call("XGROUP", "DELCONSUMER", place.stream, GROUP, ME)
    assert await place.park(entry_id, 1, 0, epoch=SHARED, keep=keep) == [b"NOT_PENDING"]
    for _ in range(2):
        await place.park(entry_id, 1, 0, keep=keep)
        assert list(await place.parked()) == [entry_id + b"|1"]
        assert await place.pending() == ({entry_id: (ME, 1)} if keep else {})


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_unpark(place: Partition, epoch: str) -> None:
    """What is due comes back under its id with its attempts and its body; asked twice it comes once."""
    due, later, _ = await place.deliver(3)
    await place.park(due, 3, 0, epoch=epoch)
    await place.park(later, 1, 60_000, epoch=epoch)
    await place.settle([_], epoch)
    status, wait_ms, *messages = await place.unpark(epoch=epoch)
    assert (status, messages) == (b"OK", [[due, 3, [b"data", b"x"], 0]])
    assert 0 < wait_ms <= 60_000
    assert await place.pending() == {due: (ME, 3)}
    assert list(await place.parked()) == [later + b"|1"]
    assert (await place.unpark(epoch=epoch))[2:] == []


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_unpark_leaves_alone_what_was_started_since(place: Partition, epoch: str) -> None:
    """A failover can bring back the wait that a start had ended: it is dropped, the attempt stays charged."""
    mine, others = (await place.deliver(1))[0], (await place.deliver(1, to=OTHER))[0]
    for entry_id, owner in ((mine, ME), (others, OTHER)):
        await place.call("XCLAIM", place.stream, GROUP, owner, 0, entry_id, "RETRYCOUNT", 2, "JUSTID")
        await place.call("ZADD", place.retry, 1, entry_id + b"|1")
    assert await place.unpark(epoch=epoch) == [b"OK", -1]
    assert await place.pending() == {mine: (ME, 2), others: (OTHER, 2)}
    assert await place.parked() == {}


async def test_unpark_brings_what_waits_in_its_place(place: Partition) -> None:
    """It says that it was pending: its owner knows whether there is a timer. Without the row nobody else brings it."""
    (entry_id,) = await place.deliver(1)
    for is_deleted in (False, True):
        await place.park(entry_id, 1, 0, keep=True)
        if is_deleted:
            await place.call("XGROUP", "DELCONSUMER", place.stream, GROUP, ME)
        assert await place.unpark() == [b"OK", -1, [entry_id, 1, [b"data", b"x"], int(not is_deleted)]]
        assert (await place.pending(), await place.parked()) == ({entry_id: (ME, 1)}, {})


async def test_unpark_in_pages(place: Partition) -> None:
    """A page holds up to the limit, oldest due first, and says that the next is due now."""
    ids = await place.deliver(3)
    for entry_id in ids:
        await place.park(entry_id, 1, -1000)
    status, wait_ms, *messages = await place.unpark(2)
    assert (status, wait_ms, [row[0] for row in messages]) == (b"OK", 0, ids[:2])
    assert await place.unpark(2) == [b"OK", -1, [ids[2], 1, [b"data", b"x"], 0]]
    assert await place.unpark(2) == [b"OK", -1]


async def test_unpark_without_a_body(place: Partition) -> None:
    """An entry that somebody deleted meanwhile is told, and waits no longer."""
    (entry_id,) = await place.deliver(1)
    await place.park(entry_id, 2, 0)
    await place.call("XDEL", place.stream, entry_id)
    assert await place.unpark() == [b"OK", -1, [entry_id, 2, b"", 0]]
    assert (await place.parked(), await place.pending()) == ({}, {})


# -- bury_message


@pytest.mark.parametrize("epoch", [EPOCH, SHARED])
async def test_bury(place: Partition, epoch: str) -> None:
    """A buried message is a dead letter with its own fields and the reason; buried twice it is there once."""
    (entry_id,) = await place.deliver(1, ME, "data", b"\x00\xff", "key", "c-42")
    await place.park(entry_id, 4, 0, keep=True, epoch=epoch)
    assert (await place.bury(entry_id, 4, epoch=epoch))[0] == b"OK"
    letter = {b"data": b"\x00\xff", b"key": b"c-42", b"dlq.reason": b"failed", b"dlq.origin": entry_id}
    assert await place.dead() == [letter]
    assert (await place.pending(), await place.parked()) == ({}, {})
    assert await place.bury(entry_id, 4, epoch=epoch) == [b"NOT_PENDING"]
    assert await place.dead() == [letter]


async def test_bury_a_very_wide_entry(place: Partition) -> None:
    """An entry of 10 000 fields is kept packed, and nothing of it is lost."""
    fields = [part for number in range(10_000) for part in (f"f{number}", f"v{number}")]
    (entry_id,) = await place.deliver(1, ME, *fields)
    assert (await place.bury(entry_id))[0] == b"OK"
    (letter,) = await place.dead()
    assert set(letter) == {b"dlq.packed", b"dlq.reason", b"dlq.origin"}
    assert unpack_fields(letter[b"dlq.packed"]) == [field.encode() for field in fields]


async def test_bury_without_a_body(place: Partition) -> None:
    """Of an entry that somebody deleted the reason is left."""
    (entry_id,) = await place.deliver(1)
    await place.call("XDEL", place.stream, entry_id)
    assert (await place.bury(entry_id))[0] == b"OK"
    assert await place.dead() == [{b"dlq.reason": b"failed", b"dlq.origin": entry_id}]
    assert await place.pending() == {}


async def test_the_dead_letters_are_bounded(place: Partition) -> None:
    """The oldest dead letters go when there are many more than are kept."""
    for entry_id in await place.deliver(300):
        await place.bury(entry_id, keep=10)
    letters = await place.dead()
    assert 10 <= len(letters) < 300


# -- hand_back


async def test_hand_back(place: Partition) -> None:
    """What is handed back stays pending with the attempts it is left; what another holds is not touched."""
    first, second = await place.deliver(2)
    (theirs,) = await place.deliver(1, OTHER)
    for _ in range(2):
        assert await place.hand_back([(first, 0), (second, 2), (theirs, 0)]) == [b"OK", 2]
        assert await place.pending() == {first: (ME, 0), second: (ME, 2), theirs: (OTHER, 1)}


async def test_hand_back_shared(place: Partition) -> None:
    """Without a lease it is made old, so that anybody may claim it at once."""
    (entry_id,) = await place.deliver(1)
    assert await place.hand_back([(entry_id, 0)], SHARED) == [b"OK", 1]
    assert await place.idle(entry_id) >= 86_400_000
    assert await place.pending() == {entry_id: (ME, 0)}
    assert await place.hand_back([(entry_id, 0)], SHARED) == [b"OK", 1]


# -- touch_messages


async def test_touch(place: Partition) -> None:
    """A touch makes mine young without an attempt, tells what is not mine, and steals nothing; also a second time."""
    (mine,), (theirs,) = await place.deliver(1), await place.deliver(1, OTHER)
    await place.age(theirs, OTHER, 60_000)
    for _ in range(2):
        await place.age(mine, ME, 60_000)
        assert await place.touch([mine, theirs, b"1-1"]) == [theirs, b"1-1"]
        assert await place.idle(mine) < 60_000
        assert await place.idle(theirs) >= 60_000
        assert await place.pending() == {mine: (ME, 1), theirs: (OTHER, 1)}


# -- claim_pending


async def test_claim(place: Partition) -> None:
    """All that is pending comes in order, uncharged, with attempts and whether we had it; the reader is noted."""
    ids = await place.deliver(2, OTHER) + await place.deliver(1)
    for before in ((0, 0, 1), (1, 1, 1)):
        status, cursor, lost, *rows = await place.claim()
        assert (status, cursor, lost) == (b"OK", b"0-0", [])
        assert rows == [
            [entry_id, 1, 0, [b"data", b"x"], is_ours] for entry_id, is_ours in zip(ids, before, strict=True)
        ]
        assert await place.pending() == dict.fromkeys(ids, (ME, 1))
    assert await place.call("HGET", place.lease, "reader") == b"12 127.0.0.1:5000"


async def test_claim_tells_when_a_retry_is_due(place: Partition) -> None:
    """A message that waits in its place for a retry comes with the time that is left."""
    waiting, due = await place.deliver(2)
    await place.park(waiting, 1, 60_000, keep=True)
    await place.park(due, 1, -1000, keep=True)
    *_, first, second = await place.claim()
    assert first[0] == waiting
    assert 0 < first[2] <= 60_000
    assert second == [due, 1, 0, [b"data", b"x"], 1]


async def pages(place: Partition, **options: Any) -> tuple[list[bytes], int]:
    """The ids that come over all pages, and how many pages there were."""
    cursor, ids, count = b"0-0", [], 0
    while count == 0 or cursor != b"0-0":
        _, cursor, _, *rows = await place.claim(cursor, **options)
        ids += [row[0] for row in rows]
        count += 1
        assert count < 50
    return ids, count


@pytest.mark.parametrize("source", ["", OTHER])
@pytest.mark.parametrize("limit", [{"count": 3}, {"budget": 20}])
async def test_claim_in_pages(place: Partition, source: str, limit: dict[str, int]) -> None:
    """Pages are bounded by count and by bytes, and together hold everything once, in order."""
    ids = await place.deliver(10, OTHER)
    seen, count = await pages(place, source=source, **limit)
    assert seen == ids
    assert count >= 2
    assert await place.pending() == dict.fromkeys(ids, (ME, 1))


async def test_claim_shared_in_pages(place: Partition) -> None:
    """A page cut short by its bytes leaves the rest old enough for the next page."""
    ids = await place.deliver(10, OTHER)
    for entry_id in ids:
        await place.age(entry_id, OTHER, 60_000)
    seen, _ = await pages(place, idle_ms=30_000, budget=20, epoch=SHARED)
    assert seen == ids


async def test_claim_shared_leaves_the_young(place: Partition) -> None:
    """Without a lease nobody takes what its owner has touched lately."""
    old, young = await place.deliver(2, OTHER)
    await place.age(old, OTHER, 60_000)
    *_, row = await place.claim(idle_ms=30_000, epoch=SHARED)
    assert row[0] == old
    assert await place.pending() == {old: (ME, 1), young: (OTHER, 1)}


async def test_claim_of_one_consumer(place: Partition) -> None:
    """Asked for one consumer's, it leaves everybody else's."""
    (theirs,), (others,) = await place.deliver(1, OTHER), await place.deliver(1, "third")
    *_, row = await place.claim(source=OTHER, epoch=SHARED)
    assert row[0] == theirs
    assert await place.pending() == {theirs: (ME, 1), others: ("third", 1)}


@pytest.mark.parametrize("source", ["", OTHER])
async def test_claim_tells_what_was_deleted(place: Partition, source: str) -> None:
    """A pending entry that somebody deleted is told once as lost, and pending no more."""
    gone, there = await place.deliver(2, OTHER)
    await place.call("XDEL", place.stream, gone)
    _, _, lost, *rows = await place.claim(source=source)
    assert (lost, [row[0] for row in rows]) == ([gone], [there])
    assert await place.pending() == {there: (ME, 1)}
    assert (await place.claim())[2] == []
