"""The scripts of schedules: keys before, one call, keys after; called twice, and by somebody else."""

from __future__ import annotations

from typing import Any

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.script import LEAD_SCHEDULE, OK, PUBLISH_TICK

TTL = 6000
RULE = '{"every_ms":1000}'


async def lead(client: Client, keys: Keys, owner: str, ttl: int = TTL) -> Any:
    """Of schedule `clock`."""
    return await LEAD_SCHEDULE(client, (keys.every("t", 0),), ("clock", owner, ttl, RULE))


async def publish(client: Client, keys: Keys, tick: int, *fields: str, limit: int = 0, on_full: str = "reject") -> Any:
    """A tick of schedule `clock`."""
    return await PUBLISH_TICK(
        client, (keys.stream("t", 0), keys.every("t", 0)), ("clock", tick, limit, on_full, *fields)
    )


async def state(client: Client, keys: Keys) -> dict[bytes, bytes]:
    """The hash of the schedules."""
    flat = await client.execute_command("HGETALL", keys.every("t", 0))
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def length(client: Client, keys: Keys) -> int:
    """Of the stream."""
    return int(await client.execute_command("XLEN", keys.stream("t", 0)))


async def test_a_new_schedule_begins_now(client: Client, keys: Keys) -> None:
    """The first leader notes the present time as the last tick; calling again renews and changes nothing else."""
    word, last, now = await lead(client, keys, "a")
    assert (word, last) == (OK, now)
    again = await lead(client, keys, "a")
    assert again[:2] == [OK, last]
    found = await state(client, keys)
    assert (found[b"owner|clock"], int(found[b"last|clock"])) == (b"a", last)
    assert found[b"rule|clock"].decode() == RULE
    assert TTL - 1000 < int(found[b"until|clock"]) - now <= TTL + 1000


async def test_one_leads(client: Client, keys: Keys) -> None:
    """Others wait until it gives up; giving up what one does not have changes nothing."""
    await lead(client, keys, "a")
    word, left = await lead(client, keys, "b")
    assert word == b"HELD"
    assert 0 < left <= TTL
    await lead(client, keys, "b", 0)
    assert (await state(client, keys))[b"owner|clock"] == b"a"
    await lead(client, keys, "a", 0)
    assert b"owner|clock" not in await state(client, keys)
    assert (await lead(client, keys, "b"))[0] == OK


async def test_a_lease_ends(client: Client, keys: Keys) -> None:
    """Over, or longer than any lease can be (the clock was set back): the next one leads."""
    await lead(client, keys, "a")
    for until in (1, 10**15):
        await client.execute_command("HSET", keys.every("t", 0), "until|clock", until, "owner|clock", "a")
        assert (await lead(client, keys, "b"))[0] == OK


async def test_a_tick_is_published_once(client: Client, keys: Keys) -> None:
    """Twice is once, whoever comes; an older one never; another schedule is another matter."""
    assert await publish(client, keys, 1000, "data", "x") == OK
    assert await publish(client, keys, 1000, "data", "x") == b"DUPLICATE"
    assert await publish(client, keys, 999, "data", "x") == b"DUPLICATE"
    assert await publish(client, keys, 2000, "data", "y") == OK
    other = (keys.stream("t", 0), keys.every("t", 0))
    assert await PUBLISH_TICK(client, other, ("other", 1000, 0, "reject", "data", "z")) == OK
    assert await length(client, keys) == 3


async def test_a_tick_without_a_payload(client: Client, keys: Keys) -> None:
    """It is noted as done and nothing is published."""
    assert await publish(client, keys, 1000) == OK
    assert await publish(client, keys, 1000, "data", "x") == b"DUPLICATE"
    assert await length(client, keys) == 0


async def test_a_full_topic(client: Client, keys: Keys) -> None:
    """Refused, and not noted: it can be tried again; with `trim` there is always room."""
    assert await publish(client, keys, 1000, "data", "x", limit=1) == OK
    assert await publish(client, keys, 2000, "data", "y", limit=1) == b"FULL"
    assert await publish(client, keys, 2000, "data", "y", limit=2) == OK
    assert await publish(client, keys, 3000, "data", "z", limit=2, on_full="trim") == OK
