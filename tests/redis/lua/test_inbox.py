"""The scripts of an inbox: keys before, one call, keys after; with a stale epoch; called twice."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.model.keys import Keys
from rsmq.persistence.letter import Letter, pack_letter, pack_letters, seal
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import ACK_LETTERS, ADD_LETTERS, RECEIVE_LETTERS
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
    """1: the next letter has to wake the device."""
    return bytes(await inbox.client.execute_command("HGET", inbox.session, "idle"))


# -- add_letters ----------------------------------------------------------------------------------------------------


async def test_add_letters_to_a_new_inbox_creates_all_keys_with_a_ttl(inbox: Inbox) -> None:
    """The first letters of a device create inbox, envelopes and session."""
    before = await inbox.now_ms()
    assert await inbox.add("a", "b", first=7) == [2, 0, 0, 0]
    after = await inbox.now_ms()
    assert await inbox.refs() == [1, 2]
    letter = Letter(1, await inbox.client.execute_command("GET", inbox.keys.letter("phone", 1)))
    assert (letter.payload, letter.type, letter.packet_id) == ("a", "text/plain", 1)
    published = int(letter.timestamp.timestamp() * 1000)
    assert before <= published <= after
    assert int(letter.expires.timestamp() * 1000) == published + WEEK_MS
    state = await inbox.state()
    assert set(state) == {"seq", "until_ms", "source:s"}
    assert state["seq"] == "2"
    assert state["source:s"].split("@")[0] == "0000000000000008"
    assert all(0 < ttl <= WEEK_MS * 65 // 64 for ttl in (await inbox.ttls()).values())


async def test_add_letters_called_twice_changes_nothing(inbox: Inbox) -> None:
    """No letter, no counter and no mark changes."""
    await inbox.add("a", "b", first=1)
    before = await snapshot(inbox)
    assert await inbox.add("a", "b", first=1) == [0, 0, 0, 0]
    assert await inbox.add("b", first=2) == [0, 0, 0, 0]
    assert await snapshot(inbox) == before


async def test_add_letters_with_their_own_expiry_lists_only_those(inbox: Inbox) -> None:
    """Only a letter that expires before the inbox does is in the expiry list."""
    await inbox.add("a")
    await inbox.add("b", ttl=60_000)
    await inbox.add("c", ttl=2 * WEEK_MS)
    assert await inbox.client.execute_command("ZRANGE", inbox.expiry, 0, -1) == [b"2"]
    score = float(await inbox.client.execute_command("ZSCORE", inbox.expiry, 2))
    assert score == await inbox.client.execute_command("PEXPIRETIME", inbox.keys.letter("phone", 2))


async def test_add_letters_for_several_devices_replies_for_all(client: Client, keys: Keys) -> None:
    """One call returns the numbers of all devices together."""
    one, other = Inbox(client, keys, "one"), Inbox(client, keys, "other")
    await one.add("x", first=1)
    letters = [pack_letter(f"{number:016d}", "", "", seal(b"x")) for number in (1, 2)]
    args = (WEEK_MS, 1, 600_000, pack_letters([("source:s", letters), ("source:s", letters)]))
    assert await ADD_LETTERS(client, (*keys.device("one")[:3], *keys.device("other")[:3]), args) == [b"OK", 3, 2, 0, 0]
    assert (await one.refs(), await other.refs()) == ([2], [2])


async def test_add_letters_wakes_only_an_idle_device(inbox: Inbox) -> None:
    """A page that drained the inbox makes the device idle; the next letter wakes it once."""
    epoch, _ = await inbox.open()
    assert await idle(inbox) == b"0"
    await inbox.page(epoch)
    assert await idle(inbox) == b"1"
    await inbox.add("a")
    assert await idle(inbox) == b"0"
    await inbox.page(epoch, count=1)
    assert await idle(inbox) == b"0", "there may be more"


async def test_add_letters_drops_expired_marks_of_sources(inbox: Inbox) -> None:
    """With more than 48 fields, old marks are deleted; younger ones stay, so that retries are recognized."""
    for number in range(60):
        await inbox.client.execute_command("HSET", inbox.session, f"source:{number}", "0000000000000001@1")
    await inbox.add("a", source="young")
    await inbox.add("b", source="newest", first=1)
    state = await inbox.state()
    assert {name for name in state if name.startswith("source:")} == {"source:young", "source:newest"}
    assert await inbox.add("b", source="newest", first=1) == [0, 0, 0, 0]


async def add_for_mqtt(inbox: Inbox, *stamps: str | int, first: int = 1, waits: bool = False) -> list[Any]:
    """Add a letter of each stamp for an MQTT session; returns the raw reply. `first` is the position of the first."""
    letters = [pack_letter(f"{position:016d}", stamp, "", seal(b"x")) for position, stamp in enumerate(stamps, first)]
    args = (WEEK_MS, inbox.limit, 600_000, pack_letters([("source:&s", letters)]), int(waits), "call.1")
    return list(await ADD_LETTERS(inbox.client, inbox.keys.device("phone")[:3], args))


async def test_add_letters_refuses_those_for_an_mqtt_session_that_has_ended(inbox: Inbox) -> None:
    """There is none, it has no connection and is of no length, or a clean start has not begun a new one yet."""
    for _ in range(2):
        assert await add_for_mqtt(inbox, "", 5) == [b"OK", 0, 0, 0, 2, b"REFUSED:1:1:2"]
    assert await inbox.ttls() == {}
    await inbox.open()
    assert (await add_for_mqtt(inbox, ""))[4:] == [1, b"REFUSED:1:1:1"]
    await inbox.client.execute_command("HSET", inbox.session, "mqtt", "0")
    assert await add_for_mqtt(inbox, "") == [b"OK", 1, 0, 0, 0]
    await inbox.client.execute_command("HDEL", inbox.session, "gateway")
    assert await add_for_mqtt(inbox, "", "") == [b"OK", 0, 0, 0, 1, b"REFUSED:1:2:2"], "the first one is stored"
    assert await inbox.refs() == [1]


async def test_add_letters_refuses_those_that_are_older_than_an_mqtt_session(inbox: Inbox) -> None:
    """Again where the reply was lost, and none behind them is stored meanwhile: its mark would hide them."""
    await inbox.open()
    now = await inbox.now_ms()
    await inbox.client.execute_command("HSET", inbox.session, "mqtt", "60", "since_ms", now)
    for _ in range(2):
        assert await add_for_mqtt(inbox, now - 2, now - 1, now) == [b"OK", 0, 0, 0, 2, b"REFUSED:1:1:2"]
        assert await inbox.refs() == []
    for stored in (1, 0):
        assert await add_for_mqtt(inbox, now, first=3) == [b"OK", stored, 0, 0, 0]


async def test_add_letters_says_what_has_no_room_at_an_mqtt_session(client: Client, keys: Keys) -> None:
    """Its client is connected: the rest waits. Where it does not wait, the oldest ones make room."""
    inbox = Inbox(client, keys, limit=2)
    epoch, _ = await inbox.open()
    await client.execute_command("HSET", inbox.session, "mqtt", "60")
    for stored in (2, 0):
        assert await add_for_mqtt(inbox, "", "", "", waits=True) == [b"OK", stored, 0, 0, 0, b"NO_ROOM:1:2:0"]
    assert await add_for_mqtt(inbox, "", first=3) == [b"OK", 1, 1, 0, 0, b"DROPPED:1:1"]
    await inbox.ack(epoch, 2)
    assert await add_for_mqtt(inbox, "", "", first=4, waits=True) == [b"OK", 1, 0, 0, 0, b"NO_ROOM:1:1:1"]
    assert await inbox.refs() == [3, 4]


# -- open_session and close_session -----------------------------------------------------------------------------------


async def test_open_session_of_an_unknown_device_starts_with_an_epoch_of_the_clock(inbox: Inbox) -> None:
    """Nothing is present and nothing has to be cleared."""
    before = await inbox.now_ms()
    epoch, reply = await inbox.open()
    assert before <= int(epoch) <= await inbox.now_ms()
    assert reply[2:] == [0, b"0", b"0", 0]
    state = await inbox.state()
    assert (state["epoch"], state["gateway"], state["seq"], state["idle"]) == (epoch, "gateway", "0", "0")
    assert list(await inbox.ttls()) == [inbox.session]


async def test_open_session_called_twice_raises_the_epoch(inbox: Inbox) -> None:
    """Each call returns a higher epoch, however fast, and the last seq that was sent."""
    await inbox.add("a", "b")
    first, reply = await inbox.open()
    assert reply[2:] == [1, b"0", b"0", 0]
    await inbox.page(first, count=1)
    second, reply = await inbox.open()
    third, _ = await inbox.open()
    assert int(first) < int(second) < int(third)
    assert reply[2:] == [1, b"1", b"0", 0]
    assert await inbox.texts(third) == ["a", "b"]


async def test_open_session_repeated_gets_the_first_answer_and_changes_nothing(inbox: Inbox) -> None:
    """Also a clean one: letters that came in between stay, and `present` is what it was."""
    epoch, reply = await inbox.open(clean=True, position=1)
    await inbox.add("a")
    before = await snapshot(inbox)
    assert await inbox.open(clean=True, position=1) == (epoch, reply)
    assert await snapshot(inbox) == before
    assert await inbox.texts(epoch) == ["a"]
    await inbox.close(epoch)
    assert (await inbox.open(clean=True, position=1))[1][:3] == reply[:3]
    assert "gateway" not in await inbox.state(), "a repeat does not connect a device that has left"


async def test_open_session_repeated_after_a_newer_one_is_refused(inbox: Inbox) -> None:
    """Through the same gateway or another one; so is a lower position that was never executed."""
    await inbox.open(position=2)
    newest, _ = await inbox.open(position=1, gateway="other")
    before = await snapshot(inbox)
    for position in (1, 2):
        assert (await inbox.open(position=position))[1] == STALE
    assert await snapshot(inbox) == before
    assert (await inbox.open(position=3))[0] > newest


async def test_open_session_after_a_session_of_an_earlier_version_counts_as_newer(inbox: Inbox) -> None:
    """A gateway of the last version knows no marks: it raises the epoch, which a repeat finds."""
    epoch, _ = await inbox.open(position=1)
    await inbox.client.execute_command("HSET", inbox.session, "epoch", int(epoch) + 1)
    assert (await inbox.open(position=1))[1] == STALE
    assert int((await inbox.open(position=2))[0]) > int(epoch) + 1


async def test_open_session_drops_expired_marks_of_gateways(inbox: Inbox) -> None:
    """With more than 48 fields, old marks are deleted, and younger ones stay."""
    for number in range(60):
        await inbox.client.execute_command("HSET", inbox.session, f"source:!{number}", "0000000000000001:5:0@1")
    await inbox.open(gateway="young")
    await inbox.open(gateway="newest")
    state = await inbox.state()
    assert {name for name in state if name.startswith("source:")} == {"source:!young", "source:!newest"}


async def test_open_session_without_its_hash_continues_at_the_letters(inbox: Inbox) -> None:
    """Only the session was lost: no seq is given again, and the letters may have been received."""
    await inbox.add("a", "b")
    await inbox.client.execute_command("DEL", inbox.session)
    epoch, reply = await inbox.open()
    assert reply[2:] == [1, b"2", b"0", 0]
    await inbox.add("c")
    assert await inbox.texts(epoch) == ["a", "b", "c"]


async def test_add_letters_without_their_session_continue_at_the_letters(inbox: Inbox) -> None:
    """The session was lost and a letter comes before the device: no letter is overwritten."""
    await inbox.add("a", "b")
    await inbox.client.execute_command("DEL", inbox.session)
    await inbox.add("c")
    epoch, reply = await inbox.open()
    assert reply[2:] == [1, b"2", b"0", 0]
    assert await inbox.texts(epoch) == ["a", "b", "c"]


async def test_open_session_renews_the_ttl_of_all_keys(inbox: Inbox) -> None:
    """Connecting alone keeps the inbox for another lifetime."""
    await inbox.add("a", ttl=60_000)
    for name in (inbox.inbox, inbox.session, inbox.expiry):
        await inbox.client.execute_command("PEXPIRE", name, 5000)
    await inbox.open()
    letter = inbox.keys.letter("phone", 1)
    assert all(ttl > 5000 for name, ttl in (await inbox.ttls()).items() if name != letter)


async def test_open_session_with_a_clean_start_hides_older_letters(inbox: Inbox) -> None:
    """It reports their number, forgets handshakes, and continues from the newest seq."""
    await inbox.add("a", "b", "c")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    for _ in range(2):
        epoch, reply = await inbox.open(clean=True)
        assert reply[2:] == [1, b"1", b"3", 3]
    assert (await inbox.state())["held"] == ""
    assert await inbox.add("d") == [1, 0, 0, 0]
    assert [letter.seq for letter in await inbox.letters(epoch, after=3)] == [4]


async def test_close_session_keeps_the_letters(inbox: Inbox) -> None:
    """The gateway is removed and no letter wakes it any more; a second call is harmless."""
    await inbox.add("a")
    epoch, _ = await inbox.open()
    for _ in range(2):
        assert await inbox.close(epoch) == b"OK"
        assert not {"gateway", "connected_ms", "idle"} & set(await inbox.state())
    assert await inbox.refs() == [1]


# -- page_letters ---------------------------------------------------------------------------------------------------


async def test_page_letters_returns_a_bounded_page_after_the_cursor(inbox: Inbox) -> None:
    """The reply has the next cursor and whether the inbox is drained; the same call returns the same page."""
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


async def test_page_letters_ends_a_page_at_its_byte_budget(inbox: Inbox) -> None:
    """A page ends with the letter that fills its budget, so even a very large letter is delivered."""
    await inbox.add(*[b"x" * 600] * 4)
    epoch, _ = await inbox.open()
    assert (await inbox.page(epoch, size=1000))[1:4:2] == [b"2", b"1"]
    assert (await inbox.page(epoch, after=2, size=1))[1:3] == [b"3", 0]
    assert (await inbox.page(epoch, after=3, size=1))[1:3] == [b"4", 1]


async def test_page_letters_returns_each_letter_once_whatever_their_sizes(inbox: Inbox) -> None:
    """It reads several at once if those before were small: the budget holds all the same, and none is left out."""
    sizes = [1] * 70 + [5000, 1] * 3 + [1] * 60 + [90_000] * 3 + [1]
    await inbox.add(*[b"x" * size for size in sizes])
    epoch, _ = await inbox.open()
    got, after = list[int](), 0
    while True:
        reply = await inbox.page(epoch, after=after, count=200, size=8000)
        page = [len(each) for each in reply[4::2]]
        assert sum(page[:-1]) < 8000
        got += page
        after = int(reply[1])
        if reply[2]:
            break
    least = len(reply[4])
    assert [each - min(got) + 1 for each in got] == sizes
    assert least == min(got)


async def test_page_letters_removes_expired_letters(inbox: Inbox) -> None:
    """Expired letters are skipped, removed and counted once; a letter in its handshake stays."""
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


async def test_ack_letters_removes_reference_envelope_and_expiry(inbox: Inbox) -> None:
    """A second call removes nothing more; other letters stay."""
    await inbox.add("a", "b", "c", ttl=60_000)
    epoch, _ = await inbox.open()
    for removed in (2, 0):
        assert await inbox.ack(epoch, 1, 3, 99) == [b"OK", removed]
        assert await inbox.refs() == [2]
        assert await inbox.client.execute_command("ZRANGE", inbox.expiry, 0, -1) == [b"2"]
        assert [name for name in await inbox.ttls() if "_messages_" in name] == [inbox.keys.letter("phone", 2)]


async def test_letters_above_all_that_was_sent_are_not_touched(inbox: Inbox) -> None:
    """The server has gone back to an earlier state, and gives these seqs to other letters: see `BEHIND`."""
    await inbox.add("a", "b", "c")
    epoch, _ = await inbox.open()
    await inbox.page(epoch, count=1)
    keys, before = (inbox.inbox, inbox.session, inbox.expiry), await snapshot(inbox)
    for script in (ACK_LETTERS, RECEIVE_LETTERS):
        assert await script(inbox.client, keys, (epoch, 1, 2)) == [b"BEHIND", 1]
    assert await inbox.page(epoch, after=2) == [b"BEHIND", 1]
    assert await snapshot(inbox) == before
    assert await inbox.ack(epoch, 1) == [b"OK", 1]
    epoch, _ = await inbox.open(clean=True)
    assert (await inbox.page(epoch, after=3))[:2] == [b"OK", b"3"]
    assert await inbox.page(epoch, after=4) == [b"BEHIND", 3]


async def test_receive_letters_keeps_the_reference_until_the_ack(inbox: Inbox) -> None:
    """The envelope is deleted; a second call holds it once; unknown letters are not held."""
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


async def test_clear_inbox_removes_letters_up_to_the_floor_in_chunks(inbox: Inbox) -> None:
    """A new inbox has none below the floor. A repeat with the same floor leaves what came in between."""
    await inbox.add("a", "b", "c", ttl=60_000)
    assert await inbox.clear() == [b"OK", 0, 0]
    assert await inbox.clear(floor=3, count=2) == [b"OK", 2, 1]
    await inbox.add("d")
    for removed in (1, 0):
        assert await inbox.clear(floor=3) == [b"OK", removed, 0]
        assert await inbox.refs() == [4]
    assert sorted(await inbox.ttls()) == sorted([inbox.inbox, inbox.session, inbox.keys.letter("phone", 4)])


async def test_clear_inbox_of_an_unknown_device_creates_no_key(inbox: Inbox) -> None:
    """Clearing an inbox that never existed has no effect."""
    for _ in range(2):
        assert await inbox.clear(floor=5) == [b"OK", 0, 0]
        assert await inbox.ttls() == {}


async def test_clear_inbox_repeated_with_its_floor_leaves_later_handshakes(inbox: Inbox) -> None:
    """It forgets the handshakes at or below the floor; a floor above the newest letter hides no letter to come."""
    await inbox.add("a")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    await inbox.clear(floor=1)
    await inbox.add("b")
    await inbox.receive(epoch, 2)
    assert await inbox.clear(floor=1) == [b"OK", 0, 0]
    assert (await inbox.state())["held"] == "2"
    await inbox.clear(floor=500)
    assert (await inbox.state())["floor"] == "2"


# -- a stale epoch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", ["older", "", "0"])
async def test_session_scripts_with_a_stale_epoch_change_nothing(inbox: Inbox, epoch: str) -> None:
    """After another connection has opened, or for an unknown session, no script changes a key."""
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


async def test_session_scripts_without_a_session_say_so(inbox: Inbox) -> None:
    """A session that the server has lost is not taken, and its connection creates no key."""
    epoch, _ = await inbox.open()
    await inbox.client.execute_command("DEL", inbox.session)
    assert await inbox.page(epoch) == [b"NO_SESSION"]
    assert await inbox.ack(epoch, 1) == [b"NO_SESSION"]
    assert await inbox.receive(epoch, 1) == [b"NO_SESSION"]
    assert await inbox.close(epoch) == STALE[0]
    assert await inbox.ttls() == {}
    later, _ = await inbox.open()
    assert int(later) >= int(epoch)
