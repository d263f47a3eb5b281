"""The scripts of batches: which scripts count members, and what a second run does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rsmq
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import (
    CANCEL_UNREAD,
    COUNT_MEMBERS,
    END_BATCHES,
    ERASE_ENTRIES,
    NOTE_CALLBACK,
    OK,
    OPEN_BATCH,
    SETTLE_OUTPUTS,
)
from tests.redis.lua.refusals import Refusals
from tests.redis.lua.test_read_ahead import read_again
from tests.redis.lua.test_settle import GROUP, ME, Partition
from tests.redis.lua.test_start_call import KEY, start

LUA = Path(rsmq.__file__).parent / "redis" / "lua"
ENDS = re.compile(r"'(?:XACK|XDEL|XTRIM)\b|'ZREM', KEYS\[1\], ARGV")
NO_END = {
    "consumer/adopt_pending": "a message whose body is deleted: its member cannot be known, and is missing",
    "consumer/park_message": "it comes again for its retry",
    "consumer/put_aside": "a message whose body is deleted",
    "consumer/settle_messages": "members are taken out before, by `Outgoing.release`",
    "consumer/unpark_messages": "a message whose body is deleted",
    "dlq/replay_dead_letter": "the dead letter has left before; the replay keeps its field",
    "pipeline/restore_messages": "what the topic has trimmed: batches refuse topics that do",
    "preflight/probe_server": "scratch keys",
    "worker/trim_partition": "what all groups have settled",
    "gateway/beat_gateway": "no messages",
    "gateway/forget_end": "no messages",
}


def test_every_script_that_ends_a_message_leaves_its_batch() -> None:
    """A new script that acknowledges or removes messages says how members leave, or why none do."""
    found = set[str]()
    for path in sorted(LUA.rglob("*.lua")):
        name = path.relative_to(LUA).with_suffix("").as_posix()
        text = path.read_text()
        if name.startswith("shared/") or not (ENDS.search(text) or "acknowledge(" in text):
            continue
        if "leave_batch(" not in text and "end_cancelled(" not in text:
            found.add(name)
    assert sorted(found) == sorted(NO_END)


HOME = "0.b"


async def opened(client: Client, keys: Keys, home: str = HOME, resume: int = 0, on_complete: str = "") -> Any:
    """A batch whose callback goes to partition 0 of `reports`, on this server."""
    names = (keys.batch_names(0), keys.batch_state(home), keys.batch_due(0))
    to = on_complete or f"d{keys.stream('reports', 0)}"
    return await OPEN_BATCH(client, names, ("n", home, resume, 60_000, 1, "group", "g", "on_complete", to))


async def count(client: Client, keys: Keys, word: str, told: str = "", *changes: Any) -> bytes:
    """One call about members."""
    answer: bytes = await COUNT_MEMBERS(client, keys.batch_counts(HOME), (HOME, word, told, *changes))
    return answer


async def calls(client: Client, keys: Keys) -> list[bytes]:
    """The payloads of its callbacks."""
    return [fields[1] for _, fields in await client.execute_command("XRANGE", keys.stream("reports", 0), "-", "+")]


async def test_open_batch_twice_is_one_batch(client: Client, keys: Keys) -> None:
    """Another caller finds the name taken, and resumes it; nothing to resume is said, too."""
    assert await opened(client, keys, resume=1) == [b"GONE"]
    assert await opened(client, keys) == [OK, b"0.b"] == await opened(client, keys)
    assert await opened(client, keys, "0.c") == [b"EXISTS", b"0.b"]
    assert await opened(client, keys, "0.c", 1) == [OK, b"0.b"]
    assert await client.execute_command("EXISTS", keys.batch_state("0.c")) == 0


async def test_count_members_counts_each_once_and_the_higher_outcome(
    client: Client, keys: Keys, refusals: Refusals
) -> None:
    """In any order: who has left counts, and a member that is replayed is done."""
    refusals.is_off = True  # a refused callback waits, and the batch counts: that is no error
    assert await count(client, keys, "added", "", "x", 0, 0, "counted") == b"GONE"
    await opened(client, keys)
    for _ in range(2):
        assert await count(client, keys, "left", "", "y", 7, 7, "failed") == OK
        assert await count(client, keys, "added", "", "x", 0, 2, "counted") == OK
    assert await count(client, keys, "left", "", "y", 7, 7, "expired") == OK
    assert await count(client, keys, "left", "", "y", 7, 7, "done") == OK
    state = keys.batch_state(HOME)
    fields = ("total", "done", "failed", "expired", "total|x", "total|y")
    assert await client.execute_command("HMGET", state, *fields) == [b"4", b"1", b"0", None, b"3", b"1"]


async def test_a_page_that_a_failover_has_lost_keeps_the_batch_open(
    client: Client, keys: Keys, refusals: Refusals
) -> None:
    """`closed` says how many the publisher has stored; the callback comes when so many have left."""
    refusals.is_off = True  # a refused callback waits, and the batch counts: that is no error
    await opened(client, keys)
    assert await count(client, keys, "closed", "x=2") == OK
    assert await calls(client, keys) == []
    await count(client, keys, "left", "", "x", 0, 0, "done")
    assert await calls(client, keys) == []
    await count(client, keys, "left", "", "x", 1, 1, "failed")
    await count(client, keys, "left", "", "x", 1, 1, "failed")
    (data,) = await calls(client, keys)
    assert b'"total":2,"done":1,"failed":1,"cancelled":0,"expired":0,"missing":0,"state":"complete"' in data
    assert await count(client, keys, "added", "", "x", 2, 2, "counted") == b"ENDED"
    assert await count(client, keys, "closed", "x=2") == OK  # its reply was lost


async def test_a_callback_in_another_slot_waits_for_a_worker(client: Client, keys: Keys) -> None:
    """It is named until it is noted; then the state goes when its time is over."""
    await opened(client, keys, on_complete="o" + keys.stream("reports", 0))
    await count(client, keys, "closed")
    names = (keys.batch_due(0), keys.batch_names(0))
    ((home, which, target, data, keep),) = await END_BATCHES(client, names, (10,))
    assert (home, which, target, keep) == (b"0.b", b"on_complete", b"reports.0", b"1")
    assert b'"state":"complete"' in data
    await client.execute_command("ZADD", keys.batch_due(0), 1, HOME)
    assert len(await END_BATCHES(client, names, (10,))) == 1
    note = ((keys.batch_state(HOME), keys.batch_due(0)), (HOME, "on_complete"))
    assert await NOTE_CALLBACK(client, *note) == OK == await NOTE_CALLBACK(client, *note)
    await client.execute_command("ZADD", keys.batch_due(0), 1, HOME)
    assert await END_BATCHES(client, names, (10,)) == []
    assert await client.execute_command("EXISTS", keys.batch_state(HOME), keys.batch_members(HOME), *names) == 0
    assert await NOTE_CALLBACK(client, *note) == b"GONE"


async def test_a_spoiled_batch_stops_no_settlement(client: Client, keys: Keys) -> None:
    """What another client has written into a state, or in its place, costs that batch alone."""
    stream, group = keys.stream("t", 0), "g"
    await client.execute_command("XGROUP", "CREATE", stream, group, "0", "MKSTREAM")
    for at, spoil in enumerate((("HSET", "total", "word", "closed", "x=1", "keep_ms", "?"), ("SET", "word"))):
        await opened(client, keys)
        await client.execute_command("DEL", keys.batch_state(HOME)) if at else None
        await client.execute_command(spoil[0], keys.batch_state(HOME), *spoil[1:])
        entry = await client.execute_command("XADD", stream, "*", "data", "1")
        await client.execute_command("XREADGROUP", "GROUP", group, "me", "STREAMS", stream, ">")
        args = ("me", "", group, 0, 0, 0, 0, entry, f"0|d{HOME} {group} x 0|done|")
        names = (stream, keys.lease("t", 0, group), keys.retry("t", 0, group))
        assert await SETTLE_OUTPUTS(client, names, args) == [OK, 1, 1, 0]
        await client.execute_command("ZADD", keys.batch_due(0), 1, HOME)
        assert await END_BATCHES(client, (keys.batch_due(0), keys.batch_names(0)), (10,)) == []
        assert await count(client, keys, "closed") == b"GONE"


@pytest.mark.parametrize("script", ["read_again", "start_call", "cancel_unread", "erase_entries"])
async def test_a_rare_end_of_a_member_leaves_its_batch(client: Client, keys: Keys, script: str) -> None:
    """A member that is cancelled where its id was kept, or removed unread. Without the record the batch would wait for
    it until it expires; the field in the entry is all that the script knows of it."""
    stream, cancels = keys.stream("orders", 3), keys.cancels("orders", 3, GROUP)
    partition = await Partition(client, keys).prepare()
    await opened(client, keys)
    fields = ("data", "x", "id", "m", "key", KEY, "batch", f"d{HOME} {GROUP} b 7")
    if script in ("read_again", "start_call"):
        (entry_id,) = await partition.deliver(1, ME, *fields)
    else:
        entry_id = await client.execute_command("XADD", stream, "*", *fields)
    if script == "cancel_unread":
        await client.execute_command("XGROUP", "DESTROY", stream, GROUP)
        removed = keys.removed("orders", 3)
        names = (stream, keys.dedup("orders", 3, "m"), keys.dedup("orders", 3, "s"), removed)
        assert await CANCEL_UNREAD(client, names, (entry_id, 60_000)) == b"CANCELLED"
        assert await CANCEL_UNREAD(client, names, (entry_id, 60_000)) == b"CANCELLED"
    else:
        await client.execute_command("HSET", cancels, entry_id, "cancelled")
    if script == "read_again":
        assert await read_again(partition, 1, (entry_id, 1)) == [b"OK", [entry_id, b"CANCELLED"]]
        assert await read_again(partition, 1, (entry_id, 1)) == [b"LATE"]
    elif script == "start_call":
        assert await start(partition, 1, entry_id) == [b"OK", [entry_id, b"CANCELLED"]]
        assert await start(partition, 1, entry_id) == [b"LATE"]
    elif script == "erase_entries":
        names = (stream, keys.removed("orders", 3), partition.retry, partition.errors, cancels)
        assert await ERASE_ENTRIES(client, names, (1, GROUP, entry_id)) == [1, 0]
        await ERASE_ENTRIES(client, names, (1, GROUP, entry_id))
    # not the counts: the trial calls without a right, which these tests make first, have set the bits before
    assert await client.execute_command("BITFIELD", keys.batch_members(HOME), "GET", "u4", "#7") == [4]
