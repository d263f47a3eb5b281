"""The scripts of schedules: keys before, one call, keys after; called twice, and by another process."""

from __future__ import annotations

from typing import Any

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import LEAD_SCHEDULE, NOTE_RUN, OK, PUBLISH_TICK

TTL = 6000
RULE = '{"every_ms":1000}'


async def lead(client: Client, keys: Keys, owner: str, ttl: int = TTL) -> Any:
    """One call of lead_schedule for `clock`."""
    return await LEAD_SCHEDULE(client, (keys.every("t", 0),), ("clock", owner, ttl, RULE))


async def publish(
    client: Client, keys: Keys, tick: int | str, *fields: str, limit: int = 0, on_full: str = "reject"
) -> Any:
    """One call of publish_tick for `clock`, which a leader has served."""
    await client.execute_command("HSETNX", keys.every("t", 0), "rule|clock", RULE)
    return await PUBLISH_TICK(
        client, (keys.stream("t", 0), keys.every("t", 0)), ("clock", tick, limit, on_full, report(tick), *fields)
    )


def report(tick: int | str, result: str = "published") -> str:
    """A line of the history."""
    return f'{{"tick":{str(tick).lstrip("+")},"at":5,"result":"{result}"}}'


async def state(client: Client, keys: Keys) -> dict[bytes, bytes]:
    """The fields of the schedules hash."""
    flat = await client.execute_command("HGETALL", keys.every("t", 0))
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def length(client: Client, keys: Keys) -> int:
    """The number of entries in the stream."""
    return int(await client.execute_command("XLEN", keys.stream("t", 0)))


async def test_lead_schedule_of_a_new_schedule_begins_now(client: Client, keys: Keys) -> None:
    """The first leader records the present time as the last tick; a second call only renews the lease."""
    word, last, now, run, *_ = await lead(client, keys, "a")
    assert (word, last, run) == (OK, now, 0)
    again = await lead(client, keys, "a")
    assert again[:2] == [OK, last]
    found = await state(client, keys)
    assert (found[b"owner|clock"], int(found[b"last|clock"])) == (b"a", last)
    assert found[b"rule|clock"].decode() == RULE
    assert TTL - 1000 < int(found[b"until|clock"]) - now <= TTL + 1000


async def test_lead_schedule_with_another_rule_begins_now(client: Client, keys: Keys) -> None:
    """A schedule that a deployment has changed was not due before: no tick of the new rule was missed."""
    await lead(client, keys, "a")
    await client.execute_command("HSET", keys.every("t", 0), "last|clock", 1000)
    assert (await lead(client, keys, "a"))[1] == 1000
    changed = ("clock", "a", TTL, '{"rule": "another"}')
    word, last, now, *_ = await LEAD_SCHEDULE(client, (keys.every("t", 0),), changed)
    assert (word, last) == (OK, now)
    assert (await LEAD_SCHEDULE(client, (keys.every("t", 0),), changed))[1] == last


async def test_lead_schedule_while_another_leads_is_refused(client: Client, keys: Keys) -> None:
    """The others wait until the leader releases it; a release by another process changes nothing."""
    await lead(client, keys, "a")
    word, left = await lead(client, keys, "b")
    assert word == b"HELD"
    assert 0 < left <= TTL
    await lead(client, keys, "b", 0)
    assert (await state(client, keys))[b"owner|clock"] == b"a"
    await lead(client, keys, "a", 0)
    assert b"owner|clock" not in await state(client, keys)
    assert (await lead(client, keys, "b"))[0] == OK


async def test_lead_schedule_after_the_lease_is_granted(client: Client, keys: Keys) -> None:
    """The lease is over, or longer than its ttl because the clock was set back."""
    await lead(client, keys, "a")
    for until in (1, 10**15):
        await client.execute_command("HSET", keys.every("t", 0), "until|clock", until, "owner|clock", "a")
        assert (await lead(client, keys, "b"))[0] == OK


async def test_run_that_was_asked_for_is_published_once_and_moves_no_tick(client: Client, keys: Keys) -> None:
    """The leader hears of it; only the run of that time is published, once, and one not asked for is none."""
    await publish(client, keys, 1000, "data", "x")
    await client.execute_command("HSET", keys.every("t", 0), "run|clock", 900)
    assert (await lead(client, keys, "a"))[3] == 900
    assert await publish(client, keys, "+800", "data", "r") == b"DUPLICATE"
    assert await publish(client, keys, "+900", "data", "r", limit=1) == b"FULL"
    assert await publish(client, keys, "+900", "data", "r") == OK
    assert await publish(client, keys, "+900", "data", "r") == b"DUPLICATE"
    assert (await lead(client, keys, "a"))[3] == 0
    assert (await state(client, keys))[b"last|clock"] == b"1000"
    assert await length(client, keys) == 2


async def test_publish_tick_called_twice_publishes_once(client: Client, keys: Keys) -> None:
    """An older tick is never published; another schedule is independent."""
    assert await publish(client, keys, 1000, "data", "x") == OK
    assert await publish(client, keys, 1000, "data", "x") == b"DUPLICATE"
    assert await publish(client, keys, 999, "data", "x") == b"DUPLICATE"
    assert await publish(client, keys, 2000, "data", "y") == OK
    other = (keys.stream("t", 0), keys.every("t", 0))
    await client.execute_command("HSET", keys.every("t", 0), "rule|other", RULE)
    assert await PUBLISH_TICK(client, other, ("other", 1000, 0, "reject", report(1000), "data", "z")) == OK
    assert await length(client, keys) == 3


async def test_publish_tick_without_a_payload_only_records_it(client: Client, keys: Keys) -> None:
    """Nothing is published."""
    assert await publish(client, keys, 1000) == OK
    assert await publish(client, keys, 1000, "data", "x") == b"DUPLICATE"
    assert await length(client, keys) == 0


async def test_publish_tick_to_a_full_topic_is_refused_and_not_recorded(client: Client, keys: Keys) -> None:
    """It can be tried again; with `trim` there is always room."""
    assert await publish(client, keys, 1000, "data", "x", limit=1) == OK
    assert await publish(client, keys, 2000, "data", "y", limit=1) == b"FULL"
    assert await publish(client, keys, 2000, "data", "y", limit=2) == OK
    assert await publish(client, keys, 3000, "data", "z", limit=2, on_full="trim") == OK


async def test_a_schedule_that_was_removed_or_moved_leaves_no_record_behind(client: Client, keys: Keys) -> None:
    """Its leader has read it before: neither its next call nor a tick on its way begins a record in the old hash."""
    names, tick = (keys.stream("t", 0), keys.every("t", 0)), ("clock", 1000, 0, "reject", report(1000), "data", "x")
    assert await PUBLISH_TICK(client, names, tick) == b"GONE"
    assert await LEAD_SCHEDULE(client, (keys.every("t", 0),), ("clock", "a", TTL, RULE, 1)) == [b"GONE", 0]
    assert (await state(client, keys), await length(client, keys)) == ({}, 0)
    await client.execute_command("HSET", keys.every("t", 0), "added|clock", "{}")
    assert (await LEAD_SCHEDULE(client, (keys.every("t", 0),), ("clock", "a", TTL, RULE, 1)))[0] == OK
    assert await PUBLISH_TICK(client, names, tick) == b"DUPLICATE"  # it begins now


async def history(client: Client, keys: Keys) -> list[str]:
    found = await client.execute_command("HGET", keys.every("t", 0), "history|clock")
    return found.decode().split("\n") if found else []


async def test_the_last_runs_are_kept(client: Client, keys: Keys) -> None:
    """Twenty of them; failures of one tick are one line, and count until a run succeeds."""
    await lead(client, keys, "a")
    await client.execute_command("HSET", keys.every("t", 0), "last|clock", 0)
    for tick in range(1, 25):
        await publish(client, keys, tick)
    assert await history(client, keys) == [report(tick) for tick in range(5, 25)]
    for count in (1, 2):
        line = report(25, "failed")
        note = ("clock", "a", line, f"trace {count}")
        assert await NOTE_RUN(client, (keys.every("t", 0),), note) == count
    assert (await history(client, keys))[-2:] == [report(24), line]
    assert (await lead(client, keys, "a"))[6] == 2
    assert (await state(client, keys))[b"trace|clock"] == b"trace 2"
    await publish(client, keys, 25)
    assert (await history(client, keys))[-2:] == [report(24), report(25)]
    assert (await lead(client, keys, "a"))[6] == 0
    assert b"trace|clock" not in await state(client, keys)


async def test_a_failure_of_a_former_leader_is_not_noted(client: Client, keys: Keys) -> None:
    await lead(client, keys, "a")
    assert await NOTE_RUN(client, (keys.every("t", 0),), ("clock", "b", report(1, "failed"), "")) == b"HELD"
    assert await history(client, keys) == []


async def test_the_rule_of_an_operator_takes_the_place_of_that_of_the_code(client: Client, keys: Keys) -> None:
    """It begins when it is served, and the rule of the code again when it is taken back."""
    key = keys.every("t", 0)
    await lead(client, keys, "a")
    await client.execute_command("HSET", key, "last|clock", 1000)
    assert (await lead(client, keys, "a"))[1] == 1000
    await client.execute_command("HSET", key, "set|clock", '{"every_ms":5}', "paused|clock", 77)
    word, last, now, _, paused, rule, _ = await lead(client, keys, "a")
    assert (word, last, paused, rule) == (OK, now, 77, b'{"every_ms":5}')
    assert (await state(client, keys))[b"rule|clock"].decode() == RULE
    await client.execute_command("HDEL", key, "set|clock", "paused|clock")
    await client.execute_command("HSET", key, "last|clock", 1000)
    word, last, now, *rest = await lead(client, keys, "a")
    assert (last, rest) == (now, [0, 0, b"", 0])
