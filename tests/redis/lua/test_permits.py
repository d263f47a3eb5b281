"""The scripts of permits: keys before, one call, keys after; called twice, late, by another member, after a loss."""

from __future__ import annotations

import json
from typing import Any

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import RENEW_PERMITS, TAKE_PERMITS

HOUR = 3_600_000


async def take(client: Client, keys: Keys, member: str, number: int, kept: int, wanted: int, **options: int) -> Any:
    """One call for a limit of 4."""
    token, is_first = options.get("token", 1), options.get("is_first", int(kept == 0))
    args = (member, token, number, is_first, options.get("limit", 4), HOUR, 5000, kept, wanted)
    return await TAKE_PERMITS(client, (keys.permits("t", "g"), keys.holders("t", "g")), args)


async def expire(client: Client, keys: Keys, member: str) -> None:
    """The token of a member has run out."""
    await client.execute_command("HSET", keys.holders("t", "g"), member, f"1|1|{HOUR}")


async def test_take_permits_lends_all_to_one_member_and_gives_each_its_part(client: Client, keys: Keys) -> None:
    """Who holds more than its part learns it while others wait, and gives back; then they get it."""
    assert await take(client, keys, "a", 1, 0, 9) == [b"OK", 0, 4, 4, 0]
    assert await take(client, keys, "b", 1, 0, 9) == [b"OK", 0, 0, 4, 1], "nothing is free"
    assert await take(client, keys, "a", 2, 4, 5) == [b"OK", 4, 0, 2, 1], "it may hold 2 while the other one waits"
    assert await take(client, keys, "a", 3, 3, 5) == [b"OK", 3, 0, 2, 1]
    assert await take(client, keys, "b", 2, 0, 9) == [b"OK", 0, 1, 4, 1]
    assert await take(client, keys, "a", 4, 2, 5) == [b"OK", 2, 0, 4, 1]
    assert await take(client, keys, "b", 3, 1, 8) == [b"OK", 1, 1, 4, 1]
    assert await client.execute_command("PTTL", keys.permits("t", "g")) > HOUR


async def test_take_permits_lends_one_permit_in_turn(client: Client, keys: Keys) -> None:
    """With fewer permits than members: who has given it back comes after those that have waited."""
    assert await take(client, keys, "a", 1, 0, 1, limit=1) == [b"OK", 0, 1, 1, 0]
    for member in ("b", "c"):
        assert (await take(client, keys, member, 1, 0, 1, limit=1))[:3] == [b"OK", 0, 0]
    assert await take(client, keys, "a", 2, 1, 1, limit=1) == [b"OK", 1, 0, 0, 2], "it may hold none"
    assert await take(client, keys, "a", 3, 0, 1, limit=1) == [b"OK", 0, 0, 1, 2]
    assert (await take(client, keys, "a", 4, 0, 1, limit=1))[2] == 0, "others have waited longer"
    given = [(await take(client, keys, member, 2, 0, 1, limit=1))[2] for member in ("b", "c")]
    assert sum(given) == 1, "one of these gets it"


async def test_take_permits_of_a_member_that_is_gone_are_free(client: Client, keys: Keys) -> None:
    """They end with its token. Its record goes, so a renewal that comes late learns it, and so does its next call."""
    await take(client, keys, "a", 1, 0, 4)
    await expire(client, keys, "a")
    assert await take(client, keys, "b", 1, 0, 9) == [b"OK", 0, 4, 4, 0]
    assert await RENEW_PERMITS(client, (keys.holders("t", "g"),), ("a", "1", HOUR)) == b"STALE_EPOCH"
    assert await take(client, keys, "a", 2, 4, 0) == [b"LOST"]
    assert await take(client, keys, "a", 1, 0, 1, token=2) == [b"OK", 0, 0, 4, 1], "under a new token it begins anew"


async def test_renew_permits_prolongs_a_token_that_has_run_out(client: Client, keys: Keys) -> None:
    """After an outage the members go on."""
    await take(client, keys, "a", 1, 0, 4)
    await expire(client, keys, "a")
    assert await RENEW_PERMITS(client, (keys.holders("t", "g"),), ("a", "1", HOUR)) == b"OK"
    assert await take(client, keys, "b", 1, 0, 9) == [b"OK", 0, 0, 4, 0]
    assert await RENEW_PERMITS(client, (keys.holders("t", "g"),), ("a", "2", HOUR)) == b"STALE_EPOCH"


async def test_take_permits_that_comes_late_does_nothing(client: Client, keys: Keys) -> None:
    """An older call of the same token must not put back what a later one has said."""
    await take(client, keys, "a", 2, 0, 4)
    before = await client.execute_command("GET", keys.permits("t", "g"))
    assert await take(client, keys, "a", 1, 0, 1) == [b"LATE"]
    assert await take(client, keys, "a", 2, 0, 4) == [b"LATE"], "the same call twice"
    assert await client.execute_command("GET", keys.permits("t", "g")) == before


async def test_take_permits_after_a_loss_leaves_what_is_free(client: Client, keys: Keys) -> None:
    """The last writes are lost: a member keeps what it holds, unless others have got it meanwhile."""
    await take(client, keys, "a", 1, 0, 4)
    await client.execute_command("DEL", keys.permits("t", "g"))
    assert await take(client, keys, "a", 2, 3, 0) == [b"OK", 3, 0, 4, 0]
    await client.execute_command("DEL", keys.permits("t", "g"))
    assert await take(client, keys, "b", 1, 0, 2) == [b"OK", 0, 2, 4, 0]
    assert await take(client, keys, "a", 3, 3, 0) == [b"OK", 2, 0, 4, 0], "one of them is another member's"
    await client.execute_command("DEL", keys.permits("t", "g"), keys.holders("t", "g"))
    assert await take(client, keys, "a", 4, 2, 0) == [b"LOST"], "its token is lost, too"


async def test_take_permits_begins_anew_where_another_client_has_written(client: Client, keys: Keys) -> None:
    """What cannot be read counts for nothing, and is named once."""
    for text in ("{", "[]", '{"held": {"a": 1}, "waits": {}}', '{"held": {"a": [-1, 1, 1]}, "waits": {}}'):
        await client.execute_command("SET", keys.permits("t", "g"), text)
        await client.execute_command("HSET", keys.holders("t", "g"), "x", "spoiled")
        assert await take(client, keys, "a", 1, 0, 4) == [b"OK", 0, 4, 4, 0, b"FOREIGN"]
        assert json.loads(await client.execute_command("GET", keys.permits("t", "g")))["held"] == {"a": [4, 1, 1]}
        await client.execute_command("DEL", keys.permits("t", "g"), keys.holders("t", "g"))


async def test_take_permits_after_the_clock_was_set_back_waits_no_longer_than_a_token_lives(
    client: Client, keys: Keys
) -> None:
    """A token whose end is further away than it was ever granted ends after its length."""
    await take(client, keys, "a", 1, 0, 4)
    await client.execute_command("HSET", keys.holders("t", "g"), "a", f"1|99999999999999|{HOUR}")
    assert await take(client, keys, "b", 1, 0, 1) == [b"OK", 0, 0, 4, 0]
    ends = int((await client.execute_command("HGET", keys.holders("t", "g"), "a")).split(b"|")[1])
    assert ends < 99999999999999
