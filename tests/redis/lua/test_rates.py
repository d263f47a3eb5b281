"""The script of rates over a group: keys before, one call, keys after; called twice, and by another member."""

from __future__ import annotations

import json
from typing import Any

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import TAKE_STARTS

HOUR = 3_600_000
AHEAD = 1000


async def take(client: Client, keys: Keys, member: str, kept: int, wanted: int, *used: int) -> Any:
    """One call for 10 starts an hour."""
    args = (member, 10, HOUR, AHEAD, HOUR, kept, wanted, 0, *used)
    return await TAKE_STARTS(client, (keys.rate("t", "g", "acme"),), args)


async def state(client: Client, keys: Keys) -> Any:
    """What the key holds."""
    return json.loads(await client.execute_command("GET", keys.rate("t", "g", "acme")))


async def change(client: Client, keys: Keys, **changed: Any) -> None:
    """Write something else into the key."""
    text = json.dumps(await state(client, keys) | changed)
    await client.execute_command("SET", keys.rate("t", "g", "acme"), text)


async def test_take_starts_never_gives_more_than_the_limit(client: Client, keys: Keys) -> None:
    """What members hold counts as what they have used does. What one gives back is there for another."""
    assert await take(client, keys, "a", 0, 6) == [0, 0, 6]
    assert await take(client, keys, "b", 0, 100) == [0, 0, 4]
    assert await take(client, keys, "a", 3, 3, 0, 3) == [3], "it holds 3 and has used 3: nothing is left"
    assert await take(client, keys, "a", 0, 0) == [0], "it gives back 3"
    assert await take(client, keys, "b", 4, 100) == [4, 0, 3]
    used = (await state(client, keys))["used"]
    assert [number for _, number in used] == [3], "only uses are left of the first member"
    assert await client.execute_command("PTTL", keys.rate("t", "g", "acme")) > HOUR


async def test_take_starts_after_a_loss_says_what_a_member_may_still_hold(client: Client, keys: Keys) -> None:
    """The server has lost its data: what was granted before must not be used, because others get it."""
    await take(client, keys, "a", 0, 6)
    await client.execute_command("DEL", keys.rate("t", "g", "acme"))
    assert await take(client, keys, "b", 0, 10) == [0, 0, 10]
    assert await take(client, keys, "a", 6, 1) == [0]


async def test_take_starts_divides_what_is_left_among_those_that_wait(client: Client, keys: Keys) -> None:
    """A member that asks while another one waits gets its part, not all."""
    await take(client, keys, "a", 0, 10)
    assert await take(client, keys, "b", 0, 5) == [0]
    assert await take(client, keys, "a", 0, 8, 0, 2) == [0, 0, 4], "8 are free, and two members wait"
    assert await take(client, keys, "b", 0, 5) == [0, 0, 2], "so do two now"


async def test_take_starts_gives_in_advance_what_becomes_free_soon(client: Client, keys: Keys) -> None:
    """With the time until then, and not before."""
    await take(client, keys, "a", 0, 10)
    await take(client, keys, "a", 0, 0, 0, 10)
    now = (await state(client, keys))["seen"]
    await change(client, keys, used=[[now + 900, 4], [now + HOUR, 6]])
    _, wait, number = await take(client, keys, "a", 0, 10)
    assert number == 4
    assert 0 < wait <= 900


async def test_take_starts_of_a_dead_member_end(client: Client, keys: Keys) -> None:
    """What it held counts until it can have used it no more, and for the time of the rate after that."""
    await take(client, keys, "dead", 0, 10)
    assert await take(client, keys, "a", 0, 1) == [0]
    now = (await state(client, keys))["seen"]
    await change(client, keys, held={"dead": [10, now, 0, now]})
    assert await take(client, keys, "a", 0, 100) == [0, 0, 10]


async def test_take_starts_after_the_clock_was_set_back_waits_no_longer(client: Client, keys: Keys) -> None:
    """All times move back with it."""
    await take(client, keys, "a", 0, 10)
    await take(client, keys, "a", 0, 0, 0, 10)
    (at, number), now = (await state(client, keys))["used"][0], (await state(client, keys))["seen"]
    await change(client, keys, seen=now + 5 * HOUR, used=[[at + 5 * HOUR, number]])
    await take(client, keys, "a", 0, 1)
    found = await state(client, keys)
    assert abs(found["used"][0][0] - at) <= 1000
    assert found["seen"] < now + HOUR


async def test_take_starts_with_a_burst_gives_the_others_evenly(client: Client, keys: Keys) -> None:
    """Ten a second, two at once: the others come a hundred milliseconds apart, over all members."""

    async def even(member: str, kept: int, wanted: int, *used: int) -> Any:
        args = (member, 10, 1000, 350, 60_000, kept, wanted, 2, *used)
        return await TAKE_STARTS(client, (keys.rate("t", "g", "even"),), args)

    kept, *granted = await even("a", 0, 4)
    assert (kept, granted[::2][0], granted[1]) == (0, 0, 2), "two at once"
    assert list(granted[3::2]) == [1, 1]
    assert all(50 <= wait <= 200 + 100 * at for at, wait in enumerate(granted[2::2]))
    assert sum((await even("b", 0, 9))[2::2]) <= 1, "the moments of the others are taken"
    given_back = await even("a", 0, 0, 0, 2)
    assert given_back == [0]
    assert sum((await even("b", 0, 9))[2::2]) >= 1, "what is given back has its moment again"


async def test_take_starts_takes_back_what_was_not_used(client: Client, keys: Keys) -> None:
    """A message has cost less than it had said. More than was counted does not come back."""
    assert await take(client, keys, "a", 0, 9) == [0, 0, 9]
    assert await take(client, keys, "a", 0, 0, 0, 9) == [0]
    assert await take(client, keys, "a", 0, 10, 0, -4) == [0, 0, 5]
    assert await take(client, keys, "a", 0, 10, 0, 5, 0, -99) == [0, 0, 10]
    assert await take(client, keys, "a", 0, 10, 0, 25) == [0], "more than it had said: a debt"
