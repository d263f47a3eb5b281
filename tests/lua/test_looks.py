"""The scripts that only look: what they answer, and that they change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.script import LOOK_AT_MEMBERS, OUTLINE_PARTITION

pytestmark = pytest.mark.anyio


async def look(client: Client, keys: Keys) -> list[Any]:
    """One call of look_at_members."""
    names = (keys.members("t", "g"), keys.group("t", "g"), keys.alive("t", "g", ""))
    return await LOOK_AT_MEMBERS(client, names)


async def outline(client: Client, keys: Keys) -> list[Any]:
    """One call of outline_partition."""
    return await OUTLINE_PARTITION(client, (keys.stream("t", 0), keys.delayed("t", 0)))


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


async def test_the_outline_of_a_partition(client: Client, keys: Keys) -> None:
    """Before it exists, empty with a group, and with messages: two ids, and not a byte of a payload."""
    assert await outline(client, keys) == [0, b"", b"", 0]
    stream = keys.stream("t", 0)
    assert await client.execute_command("EXISTS", stream) == 0
    await client.execute_command("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
    await client.execute_command("ZADD", keys.delayed("t", 0), 1, "x")
    assert await outline(client, keys) == [0, b"", b"", 1, b"g"]
    for number in (1, 2, 3):
        await client.execute_command("XADD", stream, f"{number}-0", "data", "x" * 1000)
    assert await outline(client, keys) == [3, b"1-0", b"3-0", 1, b"g"]
