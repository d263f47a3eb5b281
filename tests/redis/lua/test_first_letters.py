"""First letters of several devices in one call of `add_letters`, beside letters for devices that are known."""

from __future__ import annotations

import pytest

from rsmq.model.keys import Keys
from rsmq.persistence.letter import pack_letter, pack_letters, seal
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import ADD_LETTERS
from tests.persistence.conftest import WEEK_MS, Inbox


async def add_to_all(inboxes: list[Inbox], *, source: str = "s", published: str = "") -> list[int]:
    """One call with a letter for each device; the payload is its number."""
    keys = [key for each in inboxes for key in each.keys.device(each.device)[:3]]
    batches = [
        (f"source:{source}", [pack_letter("0000000000000007", published, "", seal(b"%d" % number, "text/plain"))])
        for number, _ in enumerate(inboxes)
    ]
    reply = await ADD_LETTERS(inboxes[0].client, keys, (WEEK_MS, 10_000, 600_000, pack_letters(batches)))
    assert reply[0] == b"OK"
    return list(reply[1:])


@pytest.mark.parametrize("published", ["", "1700000000000"])
async def test_add_letters_for_new_devices_in_one_call_are_written_alike(
    client: Client, keys: Keys, published: str
) -> None:
    """Behind a new device the next new one is written in a shorter way: all keys are the same."""
    inboxes = [Inbox(client, keys, name) for name in ("one", "two", "three")]
    assert await add_to_all(inboxes, published=published) == [3, 0, 0, 0]
    first, *others = [
        (
            await each.state(),
            await client.execute_command("ZRANGE", each.inbox, 0, -1, "WITHSCORES"),
            (await client.execute_command("GET", keys.letter(each.device, 1)))[:-1],
            [
                await client.execute_command("PEXPIRETIME", name)
                for name in (each.inbox, each.session, keys.letter(each.device, 1))
            ],
        )
        for each in inboxes
    ]
    assert others == [first, first]
    assert len(await inboxes[0].ttls()) == 9
    epoch, _ = await inboxes[2].open()
    assert await inboxes[2].texts(epoch) == ["2"]


async def test_add_letters_for_known_devices_behind_new_ones_continue(client: Client, keys: Keys) -> None:
    """Also where only the session is left, or only the letters; and a repeated call stores nothing."""
    new, known, drained, lost, other = (
        Inbox(client, keys, name) for name in ("new", "known", "drained", "lost", "other")
    )
    for each in (known, drained, lost):
        await each.add("a", "b", source="earlier")
    await client.execute_command("DEL", drained.inbox)
    await client.execute_command("DEL", lost.session)
    mixed = [each for old in (known, drained, lost) for each in (Inbox(client, keys, f"before {old.device}"), old)]
    for _ in range(2):
        stored = await add_to_all([new, *mixed, other])
    assert stored == [0, 0, 0, 0]
    assert [await each.refs() for each in (new, known, drained, lost, other)] == [[1], [1, 2, 3], [3], [1, 2, 3], [1]]
    assert (await lost.state())["sent"] == "2"


async def test_add_letters_of_two_sources_for_a_new_device_in_one_call_keeps_both(client: Client, keys: Keys) -> None:
    """The second source meets a known device."""
    keys_of = [key for name in ("first", "phone", "phone") for key in keys.device(name)[:3]]
    batches = [
        (f"source:{source}", [pack_letter("0000000000000001", "", "", seal(source.encode(), "text/plain"))])
        for source in ("a", "a", "b")
    ]
    reply = await ADD_LETTERS(client, keys_of, (WEEK_MS, 10_000, 600_000, pack_letters(batches)))
    assert reply[:2] == [b"OK", 3]
    phone = Inbox(client, keys)
    epoch, _ = await phone.open()
    assert await phone.texts(epoch) == ["a", "b"]
