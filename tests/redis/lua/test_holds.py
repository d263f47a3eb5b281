"""The script of holds: the group's record before, one call, and after; called twice, and by who is late."""

from __future__ import annotations

from typing import Any

from rsmq.model.held_name import HeldName, read_holds
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import HOLD_NAME

HOUR = 3_600_000


async def hold(
    client: Client, keys: Keys, name: str, ms: int, kind: str, what: str, known: int | str = "", most: int = 10
) -> Any:
    """One call."""
    return await HOLD_NAME(client, (keys.group("t", "g"),), (name, ms, kind, what, known, most))


async def held(client: Client, keys: Keys) -> dict[str, HeldName]:
    """What the record says."""
    found = await client.execute_command("HGET", keys.group("t", "g"), "holds")
    return {each.name: each for each in read_holds(found)}


async def test_hold_name_holds_and_the_longer_hold_of_a_handler_stays(client: Client, keys: Keys) -> None:
    """A command replaces it, and ends it; what is over goes with the next call."""
    word, until = await hold(client, keys, "a", HOUR, "handler", "longer")
    assert word == b"OK"
    assert await hold(client, keys, "a", 1000, "handler", "longer") == [b"OK", until]
    assert (await held(client, keys))["a"].until_ms == until
    since = (await held(client, keys))["a"].since_ms
    word, sooner = await hold(client, keys, "a", 2000, "command", "set")
    assert sooner < until
    assert (await held(client, keys))["a"] == HeldName("a", sooner, since, "command"), "it is held since then"
    assert await hold(client, keys, "a", 0, "command", "end") == [b"OK", 0]
    assert await hold(client, keys, "a", 0, "command", "end") == [b"OK", 0], "twice"
    assert await client.execute_command("EXISTS", keys.group("t", "g")) == 0
    await hold(client, keys, "a", -5, "handler", "set")
    await hold(client, keys, "b", HOUR, "handler", "set")
    assert set(await held(client, keys)) == {"b"}


async def test_hold_name_of_a_breaker_is_tried_by_one_member(client: Client, keys: Keys) -> None:
    """Only after its end, and by the first that asks; the others learn the new end."""
    _, until = await hold(client, keys, "a", HOUR, "breaker", "set")
    assert await hold(client, keys, "a", HOUR, "breaker", "probe", until) == [b"CHANGED", until], "it is not over"
    _, over = await hold(client, keys, "a", -5, "breaker", "set")
    await hold(client, keys, "b", HOUR, "handler", "set")
    assert set(await held(client, keys)) == {"a", "b"}, "the hold of a breaker stays until it is tried"
    word, longer = await hold(client, keys, "a", HOUR, "breaker", "probe", over)
    assert (word, longer > over) == (b"OK", True)
    assert await hold(client, keys, "a", HOUR, "breaker", "probe", over) == [b"CHANGED", longer]
    assert await hold(client, keys, "a", 0, "breaker", "end", over) == [b"CHANGED", longer], "that of an older try"
    assert await hold(client, keys, "a", 0, "breaker", "end", longer) == [b"OK", 0]
    assert await hold(client, keys, "a", HOUR, "breaker", "probe", longer) == [b"CHANGED", 0]


async def test_hold_name_bounds_the_names_and_reads_no_foreign_record(client: Client, keys: Keys) -> None:
    """Those that are held can change; a record that cannot be read holds nothing."""
    for name in ("a", "b"):
        await hold(client, keys, name, HOUR, "handler", "set", most=2)
    assert await hold(client, keys, "c", HOUR, "handler", "set", most=2) == [b"FULL", 0]
    assert (await hold(client, keys, "a", HOUR, "handler", "set", most=2))[0] == b"OK"
    for text in ("{", "[1]", '{"a": 1}', '{"a": ["x", 1, "handler"]}', '{"a": {}}'):
        await client.execute_command("HSET", keys.group("t", "g"), "holds", text)
        assert await held(client, keys) == {}
        assert (await hold(client, keys, "c", HOUR, "handler", "set"))[0] == b"OK"
        assert set(await held(client, keys)) == {"c"}
