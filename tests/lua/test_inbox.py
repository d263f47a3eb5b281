"""The scripts of an inbox: keys before, one call, keys after; with a stale epoch; called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.persistence.letter import Letter, seal
from rsmq.script import ADD_LETTERS
from tests.persistence.conftest import WEEK_MS, Inbox

STALE = [b"STALE_EPOCH"]


@pytest.fixture
def inbox(client: Client, keys: Keys) -> Inbox:
    """The inbox of `phone`."""
    return Inbox(client, keys)


async def snapshot(inbox: Inbox) -> dict[str, Any]:
    """Everything that the keys of the device hold, without times to live."""
    names = sorted(await inbox.ttls())
    return {name: await inbox.client.execute_command("DUMP", name) for name in names}


async def idle(inbox: Inbox) -> bytes:
    """1: the next letter has to ring."""
    return bytes(await inbox.client.execute_command("HGET", inbox.session, "idle"))


# -- add_letters ----------------------------------------------------------------------------------------------------


async def test_add_letters(inbox: Inbox) -> None:
    """The first letters of a device: inbox, envelopes and session appear, each with a time to live."""
    before = await inbox.now_ms()
    assert await inbox.add("a", "b", first=7) == [2, 0, 0, 0]
    after = await inbox.now_ms()
    assert await inbox.refs() == [1, 2]
    letter = Letter(1, await inbox.client.execute_command("GET", inbox.keys.letter("phone", 1)))
    assert (letter.payload, letter.type, letter.packet_id) == ("a", "text/plain", 1)
    published = int(letter.timestamp.timestamp() * 1000)
    assert before <= published <= after
    assert int(letter.expires_at.timestamp() * 1000) == published + WEEK_MS
    state = await inbox.state()
    assert set(state) == {"seq", "until_ms", "source:s"}
    assert state["seq"] == "2"
    assert state["source:s"].split("@")[0] == "0000000000000008"
    assert all(0 < ttl <= WEEK_MS * 65 // 64 for ttl in (await inbox.ttls()).values())


async def test_add_letters_twice(inbox: Inbox) -> None:
    """A repeated call changes nothing: no letter, no counter, no mark."""
    await inbox.add("a", "b", first=1)
    before = await snapshot(inbox)
    assert await inbox.add("a", "b", first=1) == [0, 0, 0, 0]
    assert await inbox.add("b", first=2) == [0, 0, 0, 0]
    assert await snapshot(inbox) == before


async def test_add_letters_of_own_expiry(inbox: Inbox) -> None:
    """Only a letter with an expiry of its own, shorter than the device's, is in the list of those that expire."""
    await inbox.add("a")
    await inbox.add("b", ttl=60_000)
    await inbox.add("c", ttl=2 * WEEK_MS)
    assert await inbox.client.execute_command("ZRANGE", inbox.expiry, 0, -1) == [b"2"]
    score = float(await inbox.client.execute_command("ZSCORE", inbox.expiry, 2))
    assert score == await inbox.client.execute_command("PEXPIRETIME", inbox.keys.letter("phone", 2))


async def test_add_letters_for_several_devices(client: Client, keys: Keys) -> None:
    """One call, one reply of four numbers for each device."""
    one, other = Inbox(client, keys, "one"), Inbox(client, keys, "other")
    await one.add("x", first=1)
    parts = ("source:s", 2, "0000000000000001", "", "", seal(b"1"), "0000000000000002", "", "", seal(b"2"))
    args = (WEEK_MS, 1, 600_000, *parts, *parts)
    assert await ADD_LETTERS(client, (*keys.device("one"), *keys.device("other")), args) == [
        b"OK", 1, 1, 0, 0, 2, 1, 0, 0,
    ]  # fmt: skip
    assert (await one.refs(), await other.refs()) == ([2], [2])


async def test_add_letters_wakes_only_who_waits(inbox: Inbox) -> None:
    """After a page that drained the inbox the device is idle; the next letter takes that away, and only once."""
    epoch, _ = await inbox.open()
    assert await idle(inbox) == b"0"
    await inbox.page(epoch)
    assert await idle(inbox) == b"1"
    await inbox.add("a")
    assert await idle(inbox) == b"0"
    await inbox.page(epoch, count=1)
    assert await idle(inbox) == b"0", "there may be more"


async def test_add_letters_forgets_old_sources(inbox: Inbox) -> None:
    """Beyond 48 fields marks go that are older than their time; younger ones stay, so that their retries are known."""
    for number in range(60):
        await inbox.client.execute_command("HSET", inbox.session, f"source:{number}", "0000000000000001@1")
    await inbox.add("a", source="young")
    await inbox.add("b", source="newest", first=1)
    state = await inbox.state()
    assert {name for name in state if name.startswith("source:")} == {"source:young", "source:newest"}
    assert await inbox.add("b", source="newest", first=1) == [0, 0, 0, 0]


# -- open_session and close_session -----------------------------------------------------------------------------------


async def test_open_session(inbox: Inbox) -> None:
    """An unknown device: a session with an epoch from the clock, nothing present, nothing to clear."""
    before = await inbox.now_ms()
    epoch, reply = await inbox.open()
    assert before <= int(epoch) <= await inbox.now_ms()
    assert reply[2:] == [0, b"0", b"0", 0]
    state = await inbox.state()
    assert (state["epoch"], state["gateway"], state["seq"], state["idle"]) == (epoch, "gateway", "0", "0")
    assert list(await inbox.ttls()) == [inbox.session]


async def test_open_session_twice(inbox: Inbox) -> None:
    """Each open is a new epoch, higher than all before, however fast; what was sent is told."""
    await inbox.add("a", "b")
    first, reply = await inbox.open()
    assert reply[2:] == [1, b"0", b"0", 0]
    await inbox.page(first, count=1)
    second, reply = await inbox.open()
    third, _ = await inbox.open()
    assert int(first) < int(second) < int(third)
    assert reply[2:] == [1, b"1", b"0", 0]
    assert await inbox.texts(third) == ["a", "b"]


async def test_open_session_renews_all_keys(inbox: Inbox) -> None:
    """Connecting alone keeps everything that is there for another life."""
    await inbox.add("a", ttl=60_000)
    for name in (inbox.inbox, inbox.session, inbox.expiry):
        await inbox.client.execute_command("PEXPIRE", name, 5000)
    await inbox.open()
    letter = inbox.keys.letter("phone", 1)
    assert all(ttl > 5000 for name, ttl in (await inbox.ttls()).items() if name != letter)


async def test_open_session_clean(inbox: Inbox) -> None:
    """A clean start hides what is there, says how much, forgets handshakes, and counts on from the newest seq."""
    await inbox.add("a", "b", "c")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    for _ in range(2):
        epoch, reply = await inbox.open(clean=True)
        assert reply[2:] == [1, b"0", b"3", 3]
    assert (await inbox.state())["held"] == ""
    assert await inbox.add("d") == [1, 0, 0, 0]
    assert [letter.seq for letter in await inbox.letters(epoch, after=3)] == [4]


async def test_close_session(inbox: Inbox) -> None:
    """Its gateway goes, its letters stay, nobody rings for it; closing again is harmless."""
    await inbox.add("a")
    epoch, _ = await inbox.open()
    for _ in range(2):
        assert await inbox.close(epoch) == b"OK"
        assert not {"gateway", "connected_ms", "idle"} & set(await inbox.state())
    assert await inbox.refs() == [1]


# -- page_letters ---------------------------------------------------------------------------------------------------


async def test_page_letters(inbox: Inbox) -> None:
    """At most so many after the cursor; the reply says where to go on and whether there is more; twice the same."""
    await inbox.add("a", "b", "c")
    epoch, _ = await inbox.open()
    for _ in range(2):
        reply = await inbox.page(epoch, count=2)
        assert reply[:3] == [b"OK", b"2", 0]
        assert reply[3::2] == [b"1", b"2"]
        assert (await inbox.state())["sent"] == "2"
    assert (await inbox.page(epoch, after=2, count=2))[:4] == [b"OK", b"3", 1, b"3"]
    assert await inbox.page(epoch, after=3) == [b"OK", b"3", 1]
    assert (await inbox.state())["sent"] == "3"
    assert (await inbox.page(epoch, count=1))[3::2] == [b"1"]
    assert (await inbox.state())["sent"] == "3", "what was sent once is sent for good"
    assert await inbox.page(epoch, after=0, count=0) == [b"OK", b"0", 0]


async def test_page_letters_has_a_byte_budget(inbox: Inbox) -> None:
    """A page ends with the letter that fills its budget, so a large letter is alone and yet comes."""
    await inbox.add(*[b"x" * 600] * 4)
    epoch, _ = await inbox.open()
    assert (await inbox.page(epoch, size=1000))[1:4:2] == [b"2", b"1"]
    assert (await inbox.page(epoch, after=2, size=1))[1:3] == [b"3", 0]
    assert (await inbox.page(epoch, after=3, size=1))[1:3] == [b"4", 1]


async def test_page_letters_removes_the_dead(inbox: Inbox) -> None:
    """What has expired is passed over, removed and counted, once; a letter in its handshake is not dead."""
    await inbox.add("a", "b", "c", ttl=60_000)
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 3)
    await inbox.client.execute_command("DEL", inbox.keys.letter("phone", 1))
    for _ in range(2):
        reply = await inbox.page(epoch)
        assert reply[3::2] == [b"2", b"3"]
        assert reply[6] == b""
        assert await inbox.refs() == [2, 3]
        assert (await inbox.state())["expired"] == "1"
    assert await inbox.client.execute_command("ZRANGE", inbox.expiry, 0, -1) == [b"2"]


# -- ack_letters and receive_letters ----------------------------------------------------------------------------------


async def test_ack_letters(inbox: Inbox) -> None:
    """Reference, envelope and expiry go, of what is there; twice removes nothing more; other letters stay."""
    await inbox.add("a", "b", "c", ttl=60_000)
    epoch, _ = await inbox.open()
    for removed in (2, 0):
        assert await inbox.ack(epoch, 1, 3, 99) == [b"OK", removed]
        assert await inbox.refs() == [2]
        assert await inbox.client.execute_command("ZRANGE", inbox.expiry, 0, -1) == [b"2"]
        assert [name for name in await inbox.ttls() if "_messages_" in name] == [inbox.keys.letter("phone", 2)]


async def test_receive_letters(inbox: Inbox) -> None:
    """The envelope goes, the reference stays until the ack; twice holds once; what is not there is not held."""
    await inbox.add("a", "b", ttl=60_000)
    epoch, _ = await inbox.open()
    for _ in range(2):
        assert await inbox.receive(epoch, 2, 2, 99) == [b"OK", 1]
        assert (await inbox.state())["held"] == "2"
        assert await inbox.refs() == [1, 2]
        assert await inbox.client.execute_command("EXISTS", inbox.keys.letter("phone", 2)) == 0
        assert await inbox.client.execute_command("ZRANGE", inbox.expiry, 0, -1) == [b"1"]
    for removed in (1, 0):
        assert await inbox.ack(epoch, 2) == [b"OK", removed]
        assert (await inbox.state())["held"] == ""
    assert await inbox.receive(epoch, 2) == [b"OK", 0]


# -- clear_inbox ----------------------------------------------------------------------------------------------------


async def test_clear_inbox(inbox: Inbox) -> None:
    """Nothing is under the floor of a new inbox; `all` raises it to the newest letter, and the rest goes in chunks."""
    await inbox.add("a", "b", "c", ttl=60_000)
    assert await inbox.clear() == [b"OK", 0, 0]
    assert await inbox.clear(everything=True, count=2) == [b"OK", 2, 1]
    await inbox.add("d")
    for removed in (1, 0):
        assert await inbox.clear() == [b"OK", removed, 0]
        assert await inbox.refs() == [4]
    assert sorted(await inbox.ttls()) == sorted([inbox.inbox, inbox.session, inbox.keys.letter("phone", 4)])


async def test_clear_inbox_of_nobody(inbox: Inbox) -> None:
    """Clearing what was never there makes nothing."""
    for _ in range(2):
        assert await inbox.clear(everything=True) == [b"OK", 0, 0]
        assert await inbox.ttls() == {}


# -- a stale epoch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", ["older", "", "0"])
async def test_a_stale_epoch_changes_nothing(inbox: Inbox, epoch: str) -> None:
    """Once another connection is open, or for a session that never was, no script of a session touches a key."""
    await inbox.add("a", "b", ttl=60_000)
    older, _ = await inbox.open()
    new, _ = await inbox.open()
    await inbox.receive(new, 2)
    before, stale = await snapshot(inbox), older if epoch == "older" else epoch
    assert await inbox.page(stale) == STALE
    assert await inbox.ack(stale, 1, 2) == STALE
    assert await inbox.receive(stale, 1) == STALE
    assert await inbox.close(stale) == STALE[0]
    assert await snapshot(inbox) == before


async def test_no_session_at_all(inbox: Inbox) -> None:
    """A session that the server has forgotten is stale, and its connection brings nothing back."""
    epoch, _ = await inbox.open()
    await inbox.client.execute_command("DEL", inbox.session)
    assert await inbox.page(epoch) == STALE
    assert await inbox.ack(epoch, 1) == STALE
    assert await inbox.receive(epoch, 1) == STALE
    assert await inbox.close(epoch) == STALE[0]
    assert await inbox.ttls() == {}
    later, _ = await inbox.open()
    assert int(later) >= int(epoch)
