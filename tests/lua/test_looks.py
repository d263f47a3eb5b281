"""The script that looks at a group: what it answers, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.script import LOOK_AT_MEMBERS

pytestmark = pytest.mark.anyio


async def look(client: Client, keys: Keys) -> list[Any]:
    """One call of look_at_members."""
    names = (keys.members("t", "g"), keys.group("t", "g"), keys.alive("t", "g", ""))
    return await LOOK_AT_MEMBERS(client, names)


async def test_nobody_is_there(client: Client, keys: Keys) -> None:
    """A group that nobody has joined: the server's clock and nothing else; nothing is made."""
    seconds, micros, paused, *members = await look(client, keys)
    clock = await client.execute_command("TIME")
    assert 0 <= int(clock[0]) - int(seconds) < 600
    assert 0 <= int(micros) < 1_000_000
    assert (paused, members) == (b"", [])
    assert await client.execute_command("EXISTS", keys.members("t", "g"), keys.group("t", "g")) == 0


async def test_members_and_whose_heartbeat_is_there(client: Client, keys: Keys) -> None:
    """One that lives, one whose heartbeat has run out; twice the same; and whether the group is paused."""
    await client.execute_command("SADD", keys.members("t", "g"), "lives", "is gone")
    await client.execute_command("SET", keys.alive("t", "g", "lives"), "{}", "PX", 600_000)
    for paused in (b"", b"1"):
        _, _, told, *members = await look(client, keys)
        assert told == paused
        assert dict(zip(members[::2], members[1::2], strict=True)) == {b"lives": 1, b"is gone": 0}
        await client.execute_command("HSET", keys.group("t", "g"), "paused", "1")
