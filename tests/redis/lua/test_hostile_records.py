"""What is read back is never trusted to be what was written: one bad record costs itself, and is named.

Each kind of record, spoiled in each way, beside a good one: the script does its work for the good one, and its answer
names the bad one. No script fails, for what fails once fails for ever.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from rsmq.gateway.fleet.scripts import (
    BEGIN_MQTT_SESSION,
    CLAIM_SUBSCRIPTIONS,
    CLOSE_MQTT_SESSION,
    RETAIN_MESSAGE,
    SUBSCRIBE_CLIENT,
)
from rsmq.model.keys import Keys
from rsmq.model.mqtt_subscription import Subscription, unpack, unpack_subscribers
from rsmq.model.packing import pack_fields
from rsmq.persistence.letter import pack_letter, pack_letters, seal
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import (
    ACK_LETTERS,
    ADD_LETTERS,
    COUNT_REMOVED,
    FORGET_NAMES,
    KEEP_WAITS,
    LEAD_SCHEDULE,
    LEAD_WORK,
    PUBLISH_MARKED,
    PUBLISH_TICK,
    PUBLISH_UNIQUE,
    RECEIVE_LETTERS,
    RELAY_OUTPUTS,
    RELAY_ROWS,
    RELEASE_DELAYED,
    RESET_GROUP,
    TAKE_LEASE,
    TAKE_STARTS,
    TRIM_PARTITION,
)
from tests.persistence.conftest import WEEK_MS, Inbox
from tests.redis.lua.test_settle import EPOCH, GROUP, ME, Partition
from tests.worker.test_retention import pack_record

SPOILED: Final = [b"", b"word", b"\xff\xfe\x80", b"\x94\x01", b"\x81\xa1a\x01", b"9" * 400, b"x" * 100_000]
"""Empty, a word, no UTF-8, MessagePack that is cut off, of another shape, a huge number, a huge text."""

MEMBERS: Final = [*SPOILED, b"|", b"|1", b"word|1", b"1-1", b"1-1-1|1", b"9" * 40 + b"-1|1", b"\xff-1|1"]
"""For a retry: also ids that are none."""

NAMES: Final = [
    *SPOILED,
    b"\x94\x01\x02\x03\x04",
    pack_record(["settled", "id"]),
    pack_record(["word", "id", "1-1", ""]),
    pack_record(["settled", "id", "word", ""]),
    pack_record(["settled", "id", "9" * 30 + "-1", ""]),
    pack_record(["9" * 30, "id", "1-1", ""]),
]
"""For a unique name: also fields that are numbers, too few, or of another kind."""

RATES: Final = [
    *SPOILED,
    b"null",
    b"17",
    b"[]",
    b'{"seen":0}',
    b'{"seen":"word","used":[],"held":{}}',
    b'{"seen":0,"used":[17],"held":{}}',
    b'{"seen":0,"used":[["word",1]],"held":{}}',
    b'{"seen":0,"used":[[9e999,1]],"held":{}}',
    b'{"seen":0,"used":[],"held":{"a":[]}}',
    b'{"seen":0,"used":[],"held":{"a":[1,"word",0,0]}}',
    b'{"seen":0,"used":[],"held":[[1,9000000000000,0,0]]}',
    b"[" * 5000,
]
"""For a rate: also JSON of another shape."""


@pytest.fixture
async def partition(client: Client, keys: Keys) -> Partition:
    """A partition with a lease of `me`."""
    return await Partition(client, keys).prepare()


# -- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", MEMBERS)
async def test_a_retry_that_is_none_stops_no_other(partition: Partition, member: bytes) -> None:
    """It is removed and named; the message that is due beside it comes."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, -1000)
    await partition.call("ZADD", partition.retry, 1, member)
    word, wait, bad, good = await partition.unpark()
    assert (word, wait, bad[:2]) == (b"OK", -1, [member, -1])
    assert good == [entry_id, 1, [b"data", b"x"], 0]
    assert await partition.parked() == {}
    assert await partition.dead() == []


@pytest.mark.parametrize("attempts", [b"", b"word", b"-1", b"1.5", b"9" * 40, b"\xff"])
async def test_a_retry_without_a_count_still_comes(partition: Partition, attempts: bytes) -> None:
    """Its message is nowhere else: it comes as one that was tried once."""
    (entry_id,) = await partition.deliver(1)
    await partition.call("XACK", partition.stream, "billing", entry_id)
    await partition.call("ZADD", partition.retry, 1, entry_id + b"|" + attempts)
    assert await partition.unpark() == [b"OK", -1, [entry_id, 1, [b"data", b"x"], 0]]
    assert await partition.pending() == {entry_id: (ME, 1)}


async def test_a_retry_that_is_never_due_gives_a_wait_that_is_a_number(partition: Partition) -> None:
    """Of another client, due at +inf: what is asked again in a day at the latest."""
    await partition.call("ZADD", partition.retry, "+inf", "1-1|1")
    assert await partition.unpark() == [b"OK", 86_400_000]


@pytest.mark.parametrize("clock", [*SPOILED, b"inf", b"nan", b"1e300"])
async def test_a_clock_that_is_no_time_stops_no_retry(partition: Partition, clock: bytes) -> None:
    """It is written anew, and moves no due time."""
    (entry_id,) = await partition.deliver(1)
    await partition.park(entry_id, 1, 3_600_000)
    await partition.call("HSET", partition.lease, "clock", clock)
    parked = await partition.parked()
    assert (await partition.unpark())[0] == b"OK"
    assert await partition.parked() == parked
    assert abs(int(await partition.call("HGET", partition.lease, "clock")) - await partition.now_ms()) < 60_000


@pytest.mark.parametrize("clock", [*SPOILED, b"inf", b"nan", b"1e300"])
async def test_a_clock_that_is_no_time_moves_nothing_that_waits_for_a_time(partition: Partition, clock: bytes) -> None:
    """The field of the lease is written anew."""
    (entry_id,) = await partition.deliver(1)
    keys, due = (partition.lease, f"{partition.stream}:{GROUP}:waits"), 4_000_000_000_000
    await partition.call("HSET", partition.lease, "waits_clock", clock)
    assert (await KEEP_WAITS(partition.client, keys, (ME, EPOCH, 10, 0, entry_id, due)))[0] == b"OK"
    assert int(await partition.call("ZSCORE", keys[1], entry_id)) == due
    assert abs(int(await partition.call("HGET", partition.lease, "waits_clock")) - await partition.now_ms()) < 60_000


# -- retention --------------------------------------------------------------------------------------------------------


async def trim(partition: Partition, keys: Keys, archive: str = "off", keep_length: int = 0) -> Any:
    """One call, with all that one partition has."""
    own = [part("orders", 3) for part in (keys.marks, keys.archived, keys.removed)]
    notes = [part("orders", 3, "billing") for part in (keys.errors, keys.cancels, keys.cancelled)]
    names = (partition.stream, *own, partition.retry, *notes)
    return await TRIM_PARTITION(partition.client, names, (86_400_000, keep_length, 1, archive, "billing"))


@pytest.mark.parametrize("member", MEMBERS)
async def test_a_retry_that_is_none_keeps_no_entry(partition: Partition, keys: Keys, member: bytes) -> None:
    """What is settled goes; what waits for a good retry stays."""
    settled, parked = await partition.deliver(2)
    await partition.call("XACK", partition.stream, "billing", settled)
    await partition.park(parked, 1, 3_600_000)
    await partition.call("ZADD", partition.retry, 1, member)
    assert (await trim(partition, keys))[:3] == [b"OK", 1, parked]


@pytest.mark.parametrize("mark", [*SPOILED, b"9" * 40 + b"-1"])
async def test_a_mark_that_is_none_trims_nothing_else(partition: Partition, keys: Keys, mark: bytes) -> None:
    """The next good mark counts, and nothing fails after the first write."""
    ids = await partition.deliver(10)
    await partition.call("XACK", partition.stream, "billing", *ids)
    await partition.call("ZADD", keys.marks("orders", 3), 3, ids[2], 6, ids[5], 7, mark)
    assert (await trim(partition, keys, keep_length=2))[:2] == [b"OK", 2]


@pytest.mark.parametrize("own", SPOILED)
async def test_a_count_of_removed_entries_that_is_none(partition: Partition, keys: Keys, own: bytes) -> None:
    """It is counted anew."""
    (settled,) = await partition.deliver(1)
    await partition.call("XACK", partition.stream, "billing", settled)
    await partition.call("HSET", keys.removed("orders", 3), "own", own)
    assert (await trim(partition, keys))[:2] == [b"OK", 1]


@pytest.mark.parametrize("field", ["cut", "left"])
@pytest.mark.parametrize("value", [*SPOILED, b"9" * 40 + b"-1"])
async def test_a_position_of_a_cut_that_is_none(partition: Partition, keys: Keys, field: str, value: bytes) -> None:
    """What is settled behind a message that waits is removed, and the position is written anew."""
    waiting, *settled = await partition.deliver(4)
    await partition.call("XACK", partition.stream, "billing", *settled)
    await partition.call("HSET", keys.removed("orders", 3), "cut", waiting, "left", 0)
    await partition.call("HSET", keys.removed("orders", 3), field, value)
    assert (await trim(partition, keys))[:3] == [b"OK", 3, waiting]
    assert await partition.call("HGET", keys.removed("orders", 3), "left") == b"0"


@pytest.mark.parametrize("position", [*SPOILED, b"9" * 40 + b"-1"])
async def test_an_archive_without_a_position_keeps_all_and_is_named(
    partition: Partition, keys: Keys, position: bytes
) -> None:
    """It is not known what it has: nothing goes that it may need."""
    (settled,) = await partition.deliver(1)
    await partition.call("XACK", partition.stream, "billing", settled)
    await partition.call("HSET", keys.archived("orders", 3), "good", settled, "bad", position)
    assert await trim(partition, keys, "required") == [b"NO_POSITION", b"bad"]
    assert await partition.call("XLEN", partition.stream) == 1


# -- unique names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", NAMES)
async def test_a_delayed_message_whose_name_has_no_record_comes_once(
    partition: Partition, keys: Keys, record: bytes
) -> None:
    """The record is read after the message was stored: it must not fail, or the message comes in each round."""
    names = (partition.stream, keys.delayed("orders", 3), keys.unique("orders", 3))
    for number in (1, 2):
        packed = pack_fields(["unique", f"n{number}", "data", "x", "id", f"{number}"])
        await partition.call("ZADD", names[1], number, packed)
        await partition.call("HSET", names[2], f"n{number}", record)
    assert await RELEASE_DELAYED(partition.client, names, (100, 0, "reject")) == [2, -1, 0]
    assert await RELEASE_DELAYED(partition.client, names, (100, 0, "reject")) == [0, -1, 0]
    assert await partition.call("XLEN", partition.stream) == 2


async def test_a_delayed_message_that_is_never_due_gives_a_wait_that_is_a_number(
    partition: Partition, keys: Keys
) -> None:
    """Of another client, due at +inf."""
    names = (partition.stream, keys.delayed("orders", 3), keys.unique("orders", 3))
    await partition.call("ZADD", names[1], "+inf", "x")
    assert await RELEASE_DELAYED(partition.client, names, (100, 0, "reject")) == [0, 86_400_000, 0]


@pytest.mark.parametrize("record", NAMES)
async def test_a_name_with_a_record_that_is_none_is_free(partition: Partition, keys: Keys, record: bytes) -> None:
    """The publish takes it, and says what it has replaced; the next one finds its record."""
    unique = keys.unique("orders", 3)
    await partition.call("HSET", unique, "n", record)
    names = [partition.stream, keys.dedup("orders", 3, "a"), unique, keys.delayed("orders", 3)]
    args = (0, "reject", 60_000, "", "n", "settled", "", "keep")
    word, entry, bad = await PUBLISH_UNIQUE(partition.client, names, (*args, "a", 0, "data", "x", "id", "a"))
    assert (word, bad) == (b"OK", record)
    names[1] = keys.dedup("orders", 3, "b")
    held = await PUBLISH_UNIQUE(partition.client, names, (*args, "b", 0, "data", "x", "id", "b"))
    assert (held[0], held[5], held[6]) == (b"HELD", entry, 1)


@pytest.mark.parametrize("record", NAMES)
async def test_a_sweep_of_names_goes_on_behind_a_record_that_is_none(
    partition: Partition, keys: Keys, record: bytes
) -> None:
    """It is removed and named; what has ended goes, what is there stays."""
    (entry_id,) = await partition.deliver(1)
    unique = keys.unique("orders", 3)
    good = pack_record(["settled", "id", entry_id.decode(), ""])
    gone = pack_record(["settled", "id", "1-1", ""])
    await partition.call("HSET", unique, "bad", record, "good", good, "gone", gone)
    names = (partition.stream, unique, keys.delayed("orders", 3))
    assert await FORGET_NAMES(partition.client, names, ("0", 100)) == [b"0", 2, [b"bad"]]
    assert await partition.call("HKEYS", unique) == [b"good"]


# -- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", RATES)
async def test_a_rate_that_is_none_begins_anew(client: Client, keys: Keys, state: bytes) -> None:
    """As after a loss: what a member holds is given again. The answer says so, once."""
    key, args = keys.rate("t", "g", "acme"), (ME, 10, 3_600_000, 1000, 3_600_000, 0, 6, 0)
    await client.execute_command("SET", key, state)
    assert await TAKE_STARTS(client, (key,), args) == [0, 0, 6, b"FOREIGN"]
    assert await TAKE_STARTS(client, (key,), args) == [0, 0, 6]
    assert list(json.loads(await client.execute_command("GET", key))["held"]) == [ME]


# -- leases, leaders, schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", SPOILED)
async def test_a_lease_of_words_is_free(partition: Partition, value: bytes) -> None:
    """The partition would have no owner any more: the next owner takes it under an epoch of the clock."""
    await partition.call("DEL", partition.lease)
    fields = [part for name in ("epoch", "until_ms", "ttl", "run") for part in (name, value)]
    await partition.call("HSET", partition.lease, "owner", "other", *fields)
    now, args = await partition.now_ms(), (ME, 6000, "reader", "", "", "billing", 6000)
    word, epoch, _, _, run = await TAKE_LEASE(partition.client, (partition.lease, partition.stream), args)
    assert (word, run) == (b"OK", b"0")
    assert int(epoch) >= now


@pytest.mark.parametrize("value", SPOILED)
async def test_a_leader_of_words_leads_no_more(client: Client, keys: Keys, value: bytes) -> None:
    """The next bid leads, under an epoch of the clock, and is renewed."""
    key = keys.every("t", 1)
    await client.execute_command("HSET", key, "owner", "other", "until_ms", value, "epoch", value)
    word, epoch = await LEAD_WORK(client, (key,), (ME, 6000, 0))
    assert (word, epoch > 10**12) == (b"OK", True)
    assert await LEAD_WORK(client, (key,), (ME, 6000, epoch)) == [b"OK", epoch]


@pytest.mark.parametrize("value", SPOILED)
async def test_a_schedule_of_words_begins_now(client: Client, keys: Keys, value: bytes) -> None:
    """It has a leader again, and its next tick is published."""
    key, args = keys.every("t", 0), ("clock", ME, 6000, "{}")
    spoiled = [
        part for name in ("until", "last", "run", "paused", "failures", "history") for part in (f"{name}|clock", value)
    ]
    await client.execute_command("HSET", key, "owner|clock", "other", "rule|clock", "{}", *spoiled)
    names, tick = (keys.stream("t", 0), key), ("clock", 4102444800000, 0, "reject", "{}", "data", "x")
    assert await PUBLISH_TICK(client, names, tick) == b"OK"
    assert await PUBLISH_TICK(client, names, tick) == b"DUPLICATE"
    await client.execute_command("HSET", key, *spoiled)
    word, last, now, run, *_ = await LEAD_SCHEDULE(client, (key,), args)
    assert (word, last, run) == (b"OK", now, 0)
    assert (await LEAD_SCHEDULE(client, (key,), args))[1] == last


@pytest.mark.parametrize("value", SPOILED)
async def test_counts_of_removed_entries_that_are_none(partition: Partition, keys: Keys, value: bytes) -> None:
    """A group asks whether others have removed entries: it compares with now."""
    removed = keys.removed("orders", 3)
    await partition.call("HSET", removed, "own", value, "seen|billing", value)
    assert (await COUNT_REMOVED(partition.client, (partition.stream, removed), ("billing", ME)))[0] == 0


@pytest.mark.parametrize("value", SPOILED)
async def test_a_reset_of_a_group_with_a_lease_of_words(partition: Partition, keys: Keys, value: bytes) -> None:
    """It has a new epoch, so that what the old run settles is refused."""
    at = ("orders", 3, "billing")
    names = (
        partition.stream,
        partition.lease,
        partition.retry,
        keys.cancels(*at),
        keys.cancelled(*at),
        keys.waits(*at),
        keys.calls(*at),
    )
    await partition.call("HSET", partition.lease, "epoch", value, "run", value)
    now = await partition.now_ms()
    assert await RESET_GROUP(partition.client, names, ("billing", "0")) == b"OK"
    assert min(map(int, await partition.call("HMGET", partition.lease, "epoch", "run"))) >= now


# -- marks of sources --------------------------------------------------------------------------------------------------


MARKS: Final = [*(each for each in SPOILED if each), b"9" * 41, b"z" * 41]
"""For a mark: also texts of the right width."""


@pytest.mark.parametrize("mark", MARKS)
async def test_a_mark_of_outputs_that_is_none_loses_no_output(client: Client, keys: Keys, mark: bytes) -> None:
    """It would compare as higher than every position: outputs that come again are stored again, and it is named."""
    names = (keys.stream("out", 0), keys.jobs("out", 0), keys.delayed("out", 0))
    position = f"{7:020d}-{0:020d}"
    args = ("out|in.1|g", 0, "reject", position, 0, 0, "", 2, "data", "x")
    await client.execute_command("HSET", names[1], "out|in.1|g", mark)
    assert await RELAY_OUTPUTS(client, names, args) == [b"OK", 1, b"FOREIGN"]
    assert await client.execute_command("XLEN", names[0]) == 1
    assert await RELAY_OUTPUTS(client, names, args) == [b"OK", 1]


@pytest.mark.parametrize("mark", MARKS)
async def test_a_mark_of_a_job_that_is_none_loses_no_message(client: Client, keys: Keys, mark: bytes) -> None:
    """As with outputs."""
    names = (keys.stream("orders", 0), keys.jobs("orders", 0))
    args = (0, "reject", "job|a.0", f"{7:020d}-{0:020d}", 2, "data", "x")
    await client.execute_command("HSET", names[1], "job|a.0", mark)
    assert await PUBLISH_MARKED(client, names, args) == [b"OK", 1, 0, b"FOREIGN"]
    assert await PUBLISH_MARKED(client, names, args) == [b"OK", 0, 1]


@pytest.mark.parametrize("value", [each for each in SPOILED if each])
async def test_a_relay_of_rows_goes_on_behind_records_that_are_none(client: Client, keys: Keys, value: bytes) -> None:
    """A turn that no call can be later than, and rows without whole ids."""
    names = [part("orders", 3) for part in (keys.stream, keys.delayed, keys.relayed, keys.unique)]
    row = b"\x01" * 16
    await client.execute_command("HSET", names[2], "turn|db", value, "rows|db", value)
    args = ("db", f"{7:032d}", 0, "reject", b"", row, "", 2, "data", "x")
    word, appended, skipped, kept, *foreign = await RELAY_ROWS(client, names, args)
    assert (word, appended, skipped, foreign) == (b"OK", 1, 0, [b"FOREIGN"])
    assert kept.endswith(row)
    assert await RELAY_ROWS(client, names, args) == [b"STALE"]


# -- inboxes and MQTT sessions -----------------------------------------------------------------------------------------


STATE: Final = (
    "epoch", "seq", "sent", "floor", "since_ms", "held", "until_ms", "seen_ms", "mqtt", "dropped", "expired",
    "source:s", "source:!g",
)  # fmt: skip
"""The fields of a session from which scripts read numbers."""


@pytest.mark.parametrize("value", SPOILED)
async def test_a_session_of_words_begins_anew(client: Client, keys: Keys, value: bytes) -> None:
    """Letters for it are stored, also beside those for others in one call; its device connects, reads and confirms."""
    spoiled, good = Inbox(client, keys), Inbox(client, keys, "other")
    await spoiled.add("a")
    await client.execute_command("HSET", spoiled.session, *(part for name in STATE for part in (name, value)))
    await client.execute_command("ZADD", spoiled.inbox, 7, value, 8, b"x" + value)
    letters = [pack_letter(f"{number:016d}", "", "", seal(b"x")) for number in (8, 9)]
    args = (WEEK_MS, 100, 600_000, pack_letters([("source:s", letters), ("source:&s", letters), ("source:s", letters)]))
    three = [part for each in (spoiled, spoiled, good) for part in keys.device(each.device)[:3]]
    assert (await ADD_LETTERS(client, three, args))[:2] == [b"OK", 6]
    assert await good.refs() == [1, 2]
    epoch, _ = await spoiled.open()
    assert int(epoch) > 10**12
    reply = await spoiled.page(epoch)
    seqs = [int(each) for each in reply[3::2]]
    assert (reply[0], len(seqs) >= 4) == (b"OK", True)
    own = keys.device("phone")[:3]
    assert (await RECEIVE_LETTERS(client, own, (epoch, seqs[0])))[0] == b"OK"
    assert await ACK_LETTERS(client, own, (epoch, *seqs)) == [b"OK", len(seqs)]
    assert (await spoiled.clear(floor=seqs[-1]))[0] == b"OK"
    assert await spoiled.refs() == []


@pytest.mark.parametrize("value", SPOILED)
async def test_an_mqtt_session_of_words_begins_and_ends(client: Client, keys: Keys, value: bytes) -> None:
    """Its will is published or dropped by those who read it, and what is no packet id is removed."""
    inbox = Inbox(client, keys)
    will, received = keys.will("phone"), keys.received("phone")
    for clean in (0, 1):
        epoch, _ = await inbox.open()
        fields = ("seq", "floor", "mqtt", "until_ms", "held")
        await client.execute_command("HSET", inbox.session, *(part for name in fields for part in (name, value)))
        await client.execute_command("HSET", will, value, value, "1", value, epoch, value)
        await client.execute_command("HSET", received, b"p" + value, value, "7", "topic")
        begun = await BEGIN_MQTT_SESSION(
            client, (inbox.session, received, inbox.inbox, will), (epoch, clean, 60, 0, b"0|w\n")
        )
        assert (begun[0], begun[6:]) == (b"OK", [] if clean else [b"7", b"topic"])
        assert all(each.isdigit() for each in begun[5][::2])
        await client.execute_command("HSET", inbox.session, "until_ms", value)
        await client.execute_command("HSET", will, epoch, value)
        closing = (inbox.session, inbox.inbox, inbox.expiry, received, will)
        assert await CLOSE_MQTT_SESSION(client, closing, (epoch, 60, 60_000, 1)) == [b"OK", 0]


@pytest.mark.parametrize("value", [each for each in SPOILED if each])
async def test_subscriptions_that_are_none_are_replaced(client: Client, keys: Keys, value: bytes) -> None:
    """They count as none. Routers read everything again, because the change before has no number."""
    kinds = ("subscriptions", "changes", "names", "followed", "mark", "new:1")
    names, wanted = [keys.mqtt(3, kind) for kind in kinds], b'[["a/b",1,false,true,2,7],["a/+",1,false,false,0,0]]'
    await client.execute_command("HSET", names[0], "phone", value)
    await client.execute_command("XADD", names[1], "*", "n", value, "c", value)
    await client.execute_command("HSET", names[2], "a/b", value)
    await client.execute_command("HSET", names[3], "phone", value)
    await client.execute_command("SET", names[4], value)
    assert await CLAIM_SUBSCRIPTIONS(client, names[:1], ("phone", "7")) == b"FOREIGN"
    assert await SUBSCRIBE_CLIENT(client, names, ("phone", "7", wanted, 100, b"", "1", 1000, 1)) == b"OK"
    assert await CLAIM_SUBSCRIPTIONS(client, names[:1], ("phone", "8")) == wanted
    ((_, change),) = await client.execute_command("XREVRANGE", names[1], "+", "-", "COUNT", 1)
    assert change[:2] == [b"n", b"1"]
    assert (await client.execute_command("HGET", names[2], "a/b")).endswith(b"phone\x001" + b"0127\0")
    assert unpack(await client.execute_command("HGET", names[3], "phone")) == ([Subscription("a/+", 1)], True)
    assert (await client.execute_command("GET", names[4])).startswith(b"1:")


@pytest.mark.parametrize("value", SPOILED)
def test_subscribers_that_are_none_are_left_out(value: bytes) -> None:
    """Also beside others that are some."""
    raw = b"phone\x001000\0" + value + b"\0" + value + b"\0"
    assert unpack_subscribers("a/b", raw)[0] == ("phone", Subscription("a/b", 1), "")
    for each in unpack_subscribers("a/b", value):
        assert each[0]


@pytest.mark.parametrize("value", SPOILED)
@pytest.mark.parametrize("by_clock", [0, 1])
async def test_a_retained_message_that_is_none_is_replaced(
    client: Client, keys: Keys, value: bytes, by_clock: int
) -> None:
    """It has no stamp, so it is older than every message."""
    names = [keys.retained(3, name) for name in ("messages", "names", "expiries")]
    await client.execute_command("HSET", names[0], "a/b", value)
    stamp = f"{7:060d}"
    assert await RETAIN_MESSAGE(client, names, ("a/b", stamp, b"x", b"", 60_000, 10, by_clock)) == b"OK"
    assert (await client.execute_command("HGET", names[0], "a/b")).startswith(stamp.encode() + b"|")
    older = ("a/b", f"{6:060d}", b"x", b"", 60_000, 10, 0)
    assert await RETAIN_MESSAGE(client, names, older) == b"OLDER"


# -- dead letters that another client has sealed -----------------------------------------------------------------------


async def test_sealed_dead_letters_stop_no_retry_and_no_take_over(partition: Partition) -> None:
    """A message whose body is gone becomes no dead letter there; it is named, and the others come."""
    gone, parked = await partition.deliver(2)
    for entry_id in (gone, parked):
        await partition.park(entry_id, 1, -1000)
    lost, pending = await partition.deliver(2)
    await partition.call("XDEL", partition.stream, gone, lost)
    largest = f"{2**64 - 1}-{2**64 - 1}"
    await partition.call("XADD", partition.dlq, largest, "data", "of another client")
    word, _, *came = await partition.unpark()
    assert (word, [(each[0], each[2]) for each in came]) == (b"OK", [(gone, b""), (parked, [b"data", b"x"])])
    word, _, named, *taken = await partition.claim()
    assert (word, named, [each[0] for each in taken]) == (b"OK", [lost], [parked, pending])
    assert await partition.call("XLEN", partition.dlq) == 1
