"""The script that reads a group for its members: its reply, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.layouts import note_unfinished
from rsmq.redis.scripts import LOOK_AT_GROUP, LOOK_AT_MEMBERS, PROVE_WATCH

pytestmark = pytest.mark.anyio


async def look(client: Client, keys: Keys, *args: str) -> list[Any]:
    """One call of look_at_members."""
    names = (keys.members("t", "g"), keys.group("t", "g"), keys.alive("t", "g", ""))
    return await LOOK_AT_MEMBERS(client, names, args)


async def test_look_at_members_of_an_unknown_group_returns_only_the_clock(client: Client, keys: Keys) -> None:
    """No key is created."""
    seconds, micros, paused, holds, *members = await look(client, keys)
    clock = await client.execute_command("TIME")
    assert 0 <= int(clock[0]) - int(seconds) < 600
    assert 0 <= int(micros) < 1_000_000
    assert (paused, holds, members) == (b"", b"", [])
    assert await client.execute_command("EXISTS", keys.members("t", "g"), keys.group("t", "g")) == 0


async def test_look_at_members_reports_heartbeats_and_pause(client: Client, keys: Keys) -> None:
    """One member has a heartbeat key, the key of the other has expired; a second call reports the pause."""
    await client.execute_command("SADD", keys.members("t", "g"), "lives", "is gone")
    await client.execute_command("SET", keys.alive("t", "g", "lives"), "{}", "PX", 600_000)
    for paused in (b"", b"1"):
        _, _, found, _, *members = await look(client, keys)
        assert found == paused
        assert dict(zip(members[::2], members[1::2], strict=True)) == {b"lives": 1, b"is gone": 0}
        await client.execute_command("HSET", keys.group("t", "g"), "paused", "1")


async def test_look_at_members_reports_what_members_of_a_cluster_cannot_read(client: Client, keys: Keys) -> None:
    """As they have written it with their heartbeat; what another client has written counts as nothing said."""
    for name, info in (("reads all", '{"unreadable": ""}'), ("some", '{"a": 1, "unreadable": "3,17"}'), ("odd", "{")):
        await client.execute_command("SET", keys.alive("t", "g", name), info)
    await client.execute_command("SADD", keys.alive("t", "g", "a set"), "x")
    await client.execute_command("SADD", keys.members("t", "g"), "reads all", "some", "odd", "a set", "is gone")
    _, _, _, _, *members = await look(client, keys, "unreadable")
    found = dict(zip(members[::2], members[1::2], strict=True))
    assert found == {b"reads all": 1, b"some": b"3,17", b"odd": 1, b"a set": 1, b"is gone": 0}


@pytest.mark.parametrize("words", [("layout",), ("unreadable", "layout")])
async def test_look_at_members_reports_who_knows_a_layout(client: Client, keys: Keys, words: tuple[str, ...]) -> None:
    """Of each heartbeat, behind what it cannot read; what another client has written says nothing."""
    for name, info in (("old", "{}"), ("new", '{"layout": 0, "unreadable": "3"}'), ("spark", '{"layout":9007}')):
        await client.execute_command("SET", keys.alive("t", "g", name), info)
    await client.execute_command("SADD", keys.alive("t", "g", "a set"), "x")
    await client.execute_command("SADD", keys.members("t", "g"), "old", "new", "spark", "a set", "is gone")
    _, _, _, _, noted, *members = await look(client, keys, *words)
    assert noted == b""
    found = dict(zip(members[::3], zip(members[1::3], members[2::3], strict=True), strict=True))
    reads = b"3" if "unreadable" in words else 1
    others = {b"old": (1, 0), b"spark": (1, 1), b"a set": (1, 0), b"is gone": (0, 0)}
    assert found == {b"new": (reads, 1), **others}


async def test_a_note_of_what_is_not_finished_is_written_if_no_other_one_is_there(client: Client, keys: Keys) -> None:
    """Both looks return it to who asks for layouts, and nothing of it to others."""
    group, watched = keys.group("t", "g"), keys.watched("t", "g")
    for known, wanted, noted in ((b"", b"4:0,1", b"4:0,1"), (b"", b"4:", b"4:0,1"), (b"4:0,1", b"4:1", b"4:1")):
        assert await note_unfinished(client, keys, "t", "g", known, wanted) == noted
    assert (await look(client, keys, "layout"))[4:] == [b"4:1"]
    assert (await look(client, keys))[4:] == []
    names = (keys.members("t", "g"), group, watched)
    assert (await LOOK_AT_GROUP(client, names, ("layout",)))[4:] == [0, 0, b"4:1"]
    assert (await LOOK_AT_GROUP(client, names, ()))[4:] == [0, 0]


async def test_look_at_group_counts_members_and_says_whether_one_watches(client: Client, keys: Keys) -> None:
    """Also of a group that is unknown. It creates no key."""
    names = (keys.members("t", "g"), keys.group("t", "g"), keys.watched("t", "g"))
    _, _, *found = await LOOK_AT_GROUP(client, names, ())
    assert found == [b"", b"", 0, 0]
    assert await client.execute_command("EXISTS", *names) == 0
    await client.execute_command("SADD", keys.members("t", "g"), "a", "b", "c")
    await client.execute_command("HSET", keys.group("t", "g"), "paused", "1", "holds", "n 5")
    await client.execute_command("SET", keys.watched("t", "g"), "a", "PX", 600_000)
    seconds, _, *found = await LOOK_AT_GROUP(client, names, ())
    assert found == [b"1", b"n 5", 3, 1]
    assert int((await client.execute_command("TIME"))[0]) - int(seconds) < 600


async def test_prove_watch_lasts_for_its_time_again_with_each_call(client: Client, keys: Keys) -> None:
    """It names the member that looked last."""
    key = keys.watched("t", "g")
    for member, lasts in (("a", 600_000), ("b", 900_000)):
        assert await PROVE_WATCH(client, [key], [member, lasts]) == b"OK"
        assert await client.execute_command("GET", key) == member.encode()
        assert lasts - 300_000 < await client.execute_command("PTTL", key) <= lasts
