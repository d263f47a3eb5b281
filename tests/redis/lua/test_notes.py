"""The scripts that keep steps, progress and results: keys before, one call, keys after; stale; and called twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.model.packing import pack_fields, unpack_fields
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import (
    BURY_MESSAGE,
    CANCEL_MESSAGE,
    KEEP_NOTE,
    REPLAY_DEAD_LETTER,
    SETTLE_CANCELLED,
    SETTLE_OUTPUTS,
)
from tests.redis.lua.test_settle import EPOCH, GROUP, ME, OTHER, SHARED, STALE, Partition

LIMITS = (100, 1000)


class Noted(Partition):
    """A partition with the keys of notes."""

    def __init__(self, client: Client, keys: Keys) -> None:
        super().__init__(client, keys)
        self.steps, self.progress = keys.steps("orders", 3, GROUP), keys.progress("orders", 3, GROUP)
        self.keys = keys

    async def keep(self, entry_id: bytes, step: str, value: str, owner: str = ME, epoch: str = EPOCH) -> Any:
        """Keep one note; returns the word."""
        names = (self.stream, self.lease, self.steps, self.progress)
        reply = await KEEP_NOTE(self.client, names, (owner, epoch, GROUP, entry_id, step, value, *LIMITS))
        return reply[0]

    async def notes(self) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """All steps, all progress."""
        found = [await self.call("HGETALL", key) for key in (self.steps, self.progress)]
        first, second = [dict(zip(each[::2], each[1::2], strict=True)) for each in found]
        return first, second

    async def result(self) -> Any:
        """What is kept for the message `m`."""
        raw = await self.call("GET", self.keys.result("orders", 3, GROUP, "m"))
        return None if raw is None else json.loads(raw.partition(b"\n")[0])


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Noted:
    """With a lease of `me`."""
    found = Noted(client, keys)
    await found.prepare()
    return found


@pytest.fixture
async def entry(partition: Noted) -> bytes:
    """A message that is delivered, and has a step and progress."""
    (found,) = await partition.deliver(1, ME, "data", "x", "id", "m", "keep_result", "60000")
    assert await partition.keep(found, "charge", "done") == b"OK"
    assert await partition.keep(found, "", "half") == b"OK"
    return bytes(found)


async def test_a_note_is_fenced_by_the_lease_or_by_the_consumer(partition: Noted, entry: bytes) -> None:
    """A member whose lease is gone writes nothing over what its successor has kept; called twice it is the same."""
    before = await partition.notes()
    assert before == ({entry: b"charge", entry + b"|charge": b"done"}, {entry: b"half"})
    for owner, epoch, word in (
        (ME, "6", b"STALE_EPOCH"),
        (OTHER, EPOCH, b"STALE_EPOCH"),
        (OTHER, SHARED, b"NOT_PENDING"),
    ):
        for step in ("charge", "mail", ""):
            assert await partition.keep(entry, step, "late", owner, epoch) == word
    assert await partition.notes() == before
    assert await partition.keep(entry, "charge", "done") == b"OK"
    assert await partition.notes() == before
    assert await partition.keep(entry, "mail", "sent", ME, SHARED) == b"OK"
    assert (await partition.notes())[0][entry] == b"charge|mail"


async def test_steps_have_limits(partition: Noted, entry: bytes) -> None:
    """In number and in bytes; a step that is overwritten counts once."""
    assert await partition.keep(entry, "charge", "x" * 1001) == b"FULL"
    assert await partition.keep(entry, "charge", "x" * 1000) == b"OK"
    assert await partition.keep(entry, "more", "x") == b"FULL"
    assert await partition.keep(entry, "charge", "") == b"OK"
    for number in range(99):
        assert await partition.keep(entry, f"s{number}", "x") == b"OK"
    assert await partition.keep(entry, "s99", "x") == b"FULL"


@pytest.mark.parametrize("mark", ["", "n"])
async def test_settlement_removes_what_its_attempt_has_kept(partition: Noted, entry: bytes, mark: str) -> None:
    """If it says so: other settlements do not look. The result is stored with it, and by the first call only."""
    key = partition.keys.result("orders", 3, GROUP, "m")
    names = (partition.stream, partition.lease, partition.retry, key)
    args = (ME, EPOCH, GROUP, 0, 0, 0, 0, entry, f"1{mark}", 4, "", 2, "{}\n7", 60_000)
    assert await SETTLE_OUTPUTS(partition.client, names, args) == [b"OK", 1, 1, 0]
    assert await partition.call("GET", key) == b"{}\n7"
    assert 0 < await partition.call("PTTL", key) <= 60_000
    assert bool((await partition.notes())[0]) is (mark == "")
    await partition.call("DEL", key)
    assert await SETTLE_OUTPUTS(partition.client, names, (*args[:3], 1, *args[4:])) == [b"OK", 1, 0, 0]
    assert await partition.call("EXISTS", key) == 0
    assert await SETTLE_OUTPUTS(partition.client, names, (ME, "6", *args[2:])) == STALE


@pytest.mark.parametrize("has_outputs", [False, True])
async def test_a_dead_letter_takes_the_steps_along_and_a_replay_lays_them(
    partition: Noted, entry: bytes, *, has_outputs: bool
) -> None:
    """Under the new stream id, also when it was stored as an output. Progress goes."""
    notes = ("dlq.reason", "failed", "dlq.error", "no paper", "dlq.attempts", 1, "dlq.origin", entry)
    if has_outputs:
        names = (partition.stream, partition.lease, partition.retry, partition.dlq)
        fields = ("data", "x", "id", "m", *notes)
        args = (ME, EPOCH, GROUP, 0, 1, 0, 1, entry, "1l", 4, "100 trim 0 0 ", len(fields), *fields)
        assert await SETTLE_OUTPUTS(partition.client, names, args) == [b"OK", 1, 1, 0]
    else:
        names = (partition.stream, partition.lease, partition.retry, partition.dlq)
        args = (ME, EPOCH, GROUP, entry, 1, 100, 0, *notes)
        assert (await BURY_MESSAGE(partition.client, names, args))[0] == b"OK"
        assert await partition.result() == {"reason": "failed", "error": "no paper"}
        assert (await BURY_MESSAGE(partition.client, names, (*args[:6], 1, *args[7:])))[0] == b"NOT_PENDING"
    assert await partition.notes() == ({}, {})
    ((letter, fields_of),) = await partition.call("XRANGE", partition.dlq, "-", "+")
    packed = dict(zip(fields_of[::2], fields_of[1::2], strict=True))[b"dlq.steps"]
    assert unpack_fields(packed) == [b"charge", b"done"]
    keys = (partition.stream, partition.dlq)
    word, replayed = await REPLAY_DEAD_LETTER(partition.client, keys, (letter, GROUP, 0, "reject"))
    assert word == b"OK"
    laid = {key: value for key, value in (await partition.notes())[0].items() if key.startswith(replayed)}
    assert laid == {replayed: b"charge", replayed + b"|charge": b"done"}
    ((_, stored),) = await partition.call("XRANGE", partition.stream, replayed, replayed)
    assert b"dlq.steps" not in stored


async def test_a_replay_goes_on_with_steps_that_another_client_has_spoiled(partition: Noted) -> None:
    """The message is what counts."""
    for steps, found in ((b"\x00\x00", {}), (pack_fields(["a"]), {}), (pack_fields(["a", "1", "b"]), {b"a"})):
        letter = await partition.call(
            "XADD", partition.dlq, "*", "data", "x", "dlq.reason", "failed", "dlq.steps", steps
        )
        keys = (partition.stream, partition.dlq)
        word, replayed = await REPLAY_DEAD_LETTER(partition.client, keys, (letter, GROUP, 0, "reject"))
        assert word == b"OK"
        assert {
            key.rpartition(b"|")[2] for key in (await partition.notes())[0] if key.startswith(replayed + b"|")
        } == set(found)


async def test_a_cancelled_message_has_no_notes_and_a_reason(partition: Noted, entry: bytes) -> None:
    """Settled by its owner."""
    names = (partition.stream, partition.lease, partition.retry, partition.cancels, partition.cancelled)
    assert await SETTLE_CANCELLED(partition.client, names, (ME, EPOCH, GROUP, entry)) == [b"OK"]
    assert await partition.notes() == ({}, {})
    assert (await partition.result())["reason"] == "cancelled"


async def test_a_parked_message_that_is_cancelled_has_no_notes_and_a_reason(partition: Noted, entry: bytes) -> None:
    """Cancelled by the caller's process."""
    await partition.call("ZADD", partition.retry, 1, entry + b"|1")
    await partition.call("XACK", partition.stream, GROUP, entry)
    names = (
        partition.stream, partition.retry, partition.cancels, partition.cancelled,
        partition.keys.waits("orders", 3, GROUP),
    )  # fmt: skip
    assert (await CANCEL_MESSAGE(partition.client, names, (GROUP, entry, "asked", 10)))[0] == b"CANCELLED"
    assert await partition.notes() == ({}, {})
    assert (await partition.result())["reason"] == "cancelled"


@pytest.mark.parametrize("spoiled", [("SET", "x"), ("RPUSH", "x")])
async def test_notes_of_another_type_stop_nothing_that_ends_a_message(
    partition: Noted, spoiled: tuple[str, str]
) -> None:
    """Another client has written over them."""
    for key in (partition.steps, partition.progress):
        await partition.call(spoiled[0], key, spoiled[1])
    (entry,) = await partition.deliver(1, ME, "data", "x")
    names = (partition.stream, partition.lease, partition.retry, partition.dlq)
    args = (ME, EPOCH, GROUP, entry, 1, 100, 0, "dlq.reason", "failed", "dlq.error", "no paper")
    assert (await BURY_MESSAGE(partition.client, names, args))[0] == b"OK"
