"""The defects of the published design: each is shown there, and shown to be fixed here."""

from __future__ import annotations

import pytest
import redis.exceptions

from benchmarks.published import Gateway, Published, payload_of, published_message
from rsmq import Broker, Settings
from rsmq.errors import ConfigError
from rsmq.persistence.letter import pack_letter, pack_letters, packet_id_of, seal
from rsmq.redis.scripts import ADD_LETTERS
from rsmq.redis.wire.slots import slot_of
from tests.patience import until
from tests.persistence.conftest import Inbox

STRANGE = ["{", "}", "}{", "a}b{c", "{x}", "%", "%7B", "*", "?[a-z]", "line\r\nbreak", "\x00", "기기-😀", "}" * 86]


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker that is not connected."""
    return Broker(settings)


# -- 1. packet ids --------------------------------------------------------------------------------------------------


async def test_published_packet_id_wrap_overwrites_an_old_message(published: Published) -> None:
    """After 65 535 packet ids an unacknowledged message is overwritten."""
    await published.add("c", [published_message(b"old")])
    await published.redis.set(published.last_packet_id_key("c"), 65_535)
    await published.add("c", [published_message(b"new")])
    assert [payload_of(each) for each in await published.read("c")] == [b"new"]


async def test_packet_id_wrap_skips_the_id_of_an_unacknowledged_letter(inbox: Inbox) -> None:
    """No two stored letters share a packet id, however many rounds lie between them; none is dropped for it."""
    await inbox.add("old")
    await inbox.start_at(65_534)
    await inbox.add("before the wrap", "after the wrap")
    epoch, _ = await inbox.open()
    letters = await inbox.letters(epoch)
    assert [letter.payload for letter in letters] == ["old", "before the wrap", "after the wrap"]
    assert [(letter.seq, letter.packet_id) for letter in letters] == [(1, 1), (65_535, 65_535), (65_537, 2)]
    await inbox.start_at(5 * 65_535)
    assert await inbox.add("a", "b") == [2, 0, 0, 0]
    assert [packet_id_of(seq) for seq in await inbox.refs()] == [1, 65_535, 2, 3, 4]
    assert "dropped" not in await inbox.state()


async def test_packet_id_wrap_during_a_handshake_skips_the_held_id(inbox: Inbox) -> None:
    """A received letter keeps its packet id: the seq that would share it is skipped."""
    await inbox.add("held")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    await inbox.start_at(65_534)
    assert await inbox.add("a", "b", "c") == [3, 0, 0, 0]
    assert await inbox.refs() == [1, 65_535, 65_537, 65_538]
    assert len({packet_id_of(seq) for seq in await inbox.refs()}) == 4


# -- 2. and 8. times to live ----------------------------------------------------------------------------------------


async def test_published_keys_never_expire(published: Published) -> None:
    """An update removes the time to live, and the index keys never had one."""
    await published.add("c", [published_message(b"x", expiry=60)])
    await published.update("c", 1)
    names = (published.message_key("c", 1), published.messages_key("c"), published.last_packet_id_key("c"))
    assert [await published.redis.pttl(name) for name in names] == [-1, -1, -1]


async def test_inbox_keys_all_expire_after_their_letters(inbox: Inbox) -> None:
    """After every kind of call each key has a time to live, and none is shorter than that of a letter."""
    await inbox.add("a", "b", "c", ttl=3_600_000)
    await inbox.add("d")
    epoch, _ = await inbox.open()
    await inbox.page(epoch)
    await inbox.receive(epoch, 2)
    await inbox.ack(epoch, 1)
    await inbox.close(epoch)
    await inbox.open(clean=True)
    await inbox.clear()
    await inbox.add("e", ttl=5000)
    ttls = await inbox.ttls()
    assert len(ttls) == 4
    letter = inbox.keys.letter(inbox.device, 5)
    assert 0 < ttls.pop(letter) <= 5000
    assert all(ttl > 5000 for ttl in ttls.values()), ttls


# -- 3. expiries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expiry", [0, -1, 2**63])
async def test_published_bad_expiry_loses_the_rest_of_a_batch(published: Published, expiry: int) -> None:
    """One bad expiry ends the script half way: the later messages of the batch are lost."""
    batch = [published_message(b"a"), published_message(b"b", expiry=expiry), published_message(b"c")]
    with pytest.raises(redis.exceptions.ResponseError):
        await published.add("c", batch)
    assert [payload_of(each) for each in await published.read("c")] == [b"a"]


@pytest.mark.parametrize(
    ("expiry_ms", "is_stored"),
    [(0, False), (-1, False), (1, True), (1000, True), (2**31 * 1000, True), ((2**32 - 1) * 1000, True), (2**63, True)],
)
async def test_extreme_expiry_affects_only_its_letter(inbox: Inbox, expiry_ms: int, is_stored: bool) -> None:
    """Zero, negative, one, 2^31 and 2^32-1 seconds, and beyond: the other letters are stored as usual."""
    await inbox.add("a")
    assert await inbox.add("b", ttl=expiry_ms) in ([1, 0, 0, 0], [0, 0, 1, 0])
    await inbox.add("c")
    epoch, _ = await inbox.open()
    found = await inbox.texts(epoch)
    assert [text for text in found if text != "b"] == ["a", "c"]
    assert is_stored or "b" not in found
    assert expiry_ms < 1000 or (await inbox.client.execute_command("PTTL", inbox.keys.letter("phone", 2))) > 0


async def test_expiry_counts_from_publishing(inbox: Inbox) -> None:
    """A message that waited before it was stored has less time left."""
    now = await inbox.now_ms()
    assert await inbox.add("late", published=now - 50_000, ttl=60_000) == [1, 0, 0, 0]
    assert await inbox.add("too late", published=now - 70_000, ttl=60_000) == [0, 0, 1, 0]
    assert 0 < await inbox.client.execute_command("PTTL", inbox.keys.letter("phone", 1)) <= 10_000


# -- 4. retries -----------------------------------------------------------------------------------------------------


async def test_published_retried_batch_is_stored_twice(published: Published) -> None:
    """A batch whose reply was lost is stored twice."""
    batch = [published_message(b"a"), published_message(b"b")]
    await published.add("c", batch)
    await published.add("c", batch)
    assert len(await published.read("c")) == 4


async def test_retried_batch_is_stored_once(inbox: Inbox) -> None:
    """Also when some of it was acknowledged in between, or more letters follow."""
    assert await inbox.add("a", "b", first=1) == [2, 0, 0, 0]
    epoch, _ = await inbox.open()
    await inbox.ack(epoch, 1)
    assert await inbox.add("a", "b", first=1) == [0, 0, 0, 0]
    assert await inbox.add("a", "b", "c", first=1) == [1, 0, 0, 0]
    assert await inbox.add("other", source="t", first=1) == [1, 0, 0, 0]
    assert await inbox.texts(epoch) == ["b", "c", "other"]


async def test_batch_with_a_repeated_position_stores_it_once(inbox: Inbox) -> None:
    """A position that repeats within one call is stored once, too."""
    assert await inbox.add("a", "b", first=1) == [2, 0, 0, 0]
    envelopes = [("0000000000000003", "c"), ("0000000000000004", "d"), ("0000000000000003", "c")]
    letters = [pack_letter(position, "", "", seal(text.encode())) for position, text in envelopes]
    args = (1000_000, 100, 600_000, pack_letters([("source:s", letters)]))
    assert (await ADD_LETTERS(inbox.client, inbox.keys.device("phone")[:3], args))[1] == 2


# -- 5. the limit ---------------------------------------------------------------------------------------------------


async def none_exists(published: Published, names: list[str]) -> bool:
    """Whether all these keys are gone."""
    return not await published.redis.exists(*names)


async def test_published_expired_references_displace_a_live_message(published: Published) -> None:
    """Expired references count against the limit: a live message is dropped for them."""
    published.limit = 3
    await published.add("c", [published_message(b"live")])
    await published.add("c", [published_message(b"x", expiry=60), published_message(b"y", expiry=60)])
    for packet_id in (2, 3):
        await published.redis.pexpire(published.message_key("c", packet_id), 1)
    names = [published.message_key("c", packet_id) for packet_id in (2, 3)]
    await until(lambda: none_exists(published, names), "both have expired")
    await published.add("c", [published_message(b"new")])
    assert [payload_of(each) for each in await published.read("c")] == [b"new"]


async def test_full_inbox_drops_expired_letters_first(inbox: Inbox) -> None:
    """Expired letters anywhere in the inbox are removed before the oldest live one; each kind has its own counter."""
    inbox.limit = 3
    await inbox.add("live")
    await inbox.add("x", "y", ttl=30)
    await inbox.expired(2, 3)
    assert await inbox.add("new") == [1, 0, 2, 0]
    epoch, _ = await inbox.open()
    assert await inbox.texts(epoch) == ["live", "new"]
    assert await inbox.add("2", "3") == [2, 1, 0, 0]
    assert await inbox.texts(epoch) == ["new", "2", "3"]
    state = await inbox.state()
    assert (state["expired"], state["dropped"]) == ("2", "1")


async def test_lowered_limit_shrinks_an_inbox_in_steps(inbox: Inbox) -> None:
    """An inbox far above a new limit shrinks in bounded steps, and nothing fails."""
    for start in range(0, 3000, 500):
        await inbox.add(*range(start, start + 500))
    inbox.limit = 10
    for _ in range(4):
        await inbox.add("more")
    assert len(await inbox.refs()) == 10


# -- 6. payloads ----------------------------------------------------------------------------------------------------


async def test_published_update_changes_json_payloads(published: Published) -> None:
    """An update through cjson turns `[]` into `{}` and rounds integers above 2^53."""
    await published.add("c", [published_message(b"", tags=[], account=2**53 + 1)])
    await published.update("c", 1)
    (message,) = await published.read("c")
    assert message["tags"] == {}
    assert message["account"] != 2**53 + 1


async def test_payload_arrives_byte_for_byte(broker: Broker) -> None:
    """No script parses the payload."""
    payload = {"tags": [], "account": 2**53 + 1, "nothing": {}}
    async with broker:
        await broker.send("phone", payload)
        await broker.send("phone", bytes(range(256)))
        async with broker.connect("phone", auto_ack=True) as session:
            assert (await anext(session)).payload == payload
            assert (await anext(session)).payload == bytes(range(256))


# -- 7. QoS 2 -------------------------------------------------------------------------------------------------------


async def test_published_trimming_drops_an_open_handshake(published: Published) -> None:
    """Trimming drops a received message and the state of its handshake."""
    published.limit = 2
    await published.add("c", [published_message(b"a")])
    await published.update("c", 1)
    await published.add("c", [published_message(b"b"), published_message(b"c")])
    assert [each["packetType"] for each in await published.read("c")] == ["PUBLISH", "PUBLISH"]


async def test_received_letter_is_never_trimmed(inbox: Inbox) -> None:
    """Only its acknowledgement removes a received letter: the oldest other letters are trimmed."""
    inbox.limit = 2
    await inbox.add("a", "b")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    assert await inbox.add("c", "d") == [2, 2, 0, 0]
    letters = await inbox.letters(epoch)
    assert [(letter.seq, letter.is_received) for letter in letters] == [(1, True), (4, False)]
    assert await inbox.ack(epoch, 1, 4) == [b"OK", 2]
    assert (await inbox.state())["held"] == ""


async def test_ack_of_trimmed_letters_removes_only_the_rest(inbox: Inbox) -> None:
    """An acknowledgement that includes trimmed letters removes the others and nothing else."""
    inbox.limit = 4
    await inbox.add("a", "b", "c", "d")
    epoch, _ = await inbox.open()
    await inbox.page(epoch)
    await inbox.add("e", "f")
    assert await inbox.ack(epoch, 1, 2, 3) == [b"OK", 1]
    assert await inbox.texts(epoch) == ["d", "e", "f"]


# -- 9. ids ---------------------------------------------------------------------------------------------------------


async def test_published_id_with_a_brace_spans_two_slots(published: Published) -> None:
    """An id that begins with a brace puts the keys of one client into different slots."""
    names = published.messages_key("}c"), published.message_key("}c", 1)
    assert slot_of(names[0]) != slot_of(names[1])


@pytest.mark.parametrize("device", STRANGE)
async def test_device_with_a_strange_id_gets_only_its_letters(broker: Broker, device: str, prefix: str) -> None:
    """Its letters arrive, and no other device gets them."""
    async with broker:
        await broker.send(device, "for it")
        await broker.send("phone", "for the phone")
        for name, text in ((device, "for it"), ("phone", "for the phone")):
            async with broker.connect(name, auto_ack=True) as session:
                assert (await anext(session)).payload == text
        assert {each.client_id async for each in broker.devices.iterate()} == {device, "phone"}


@pytest.mark.parametrize("device", ["", "x" * 300, "é" * 129])
async def test_device_id_that_is_empty_or_too_long_is_refused(broker: Broker, device: str) -> None:
    """Empty, or more than 256 bytes: an error before anything is stored."""
    async with broker:
        for attempt in (lambda: broker.send(device, 1), lambda: broker.send_many([(device, 1)])):
            with pytest.raises(ConfigError, match="device id"):
                await attempt()
        with pytest.raises(ConfigError, match="device id"):
            broker.connect(device)


# -- 10. large backlogs ---------------------------------------------------------------------------------------------


async def test_backlog_of_100_mib_is_read_in_pages_of_one_mib(inbox: Inbox) -> None:
    """10 000 letters of 10 KiB. The published design reads all of it in one call."""
    payload = b"x" * 10_240
    for _ in range(100):
        await inbox.add(*[payload] * 100)
    epoch, _ = await inbox.open()
    after, sizes = 0, list[int]()
    while (reply := await inbox.page(epoch, after))[3:]:
        after = int(reply[1])
        sizes.append(sum(map(len, reply[4::2])))
    assert after == 10_000
    assert max(sizes) < 2**20 + 20_000
    assert len(sizes) >= 97
    for start in range(1, 10_001, 500):
        assert await inbox.ack(epoch, *range(start, start + 500)) == [b"OK", 500]


# -- 11. and 12. the way to the device ------------------------------------------------------------------------------


async def test_published_reconnect_race_loses_the_subscription(published: Published) -> None:
    """A live message overtakes the backlog that was read before it."""
    await published.add("c", [published_message(b"%d" % n) for n in range(3)])
    gateway = Gateway(published, "c")
    gateway.connect()
    await gateway.load()
    last = await published.add("c", [published_message(b"3")])
    gateway.deliver(published_message(b"3", packetId=last + 1))
    gateway.deliver_backlog()
    assert [payload_of(each) for each in gateway.sent] == [b"3", b"0", b"1", b"2"]


async def test_reconnect_makes_the_old_session_stale(inbox: Inbox) -> None:
    """A letter stored between two pages is read in its order: the cursor is the only way to the device."""
    await inbox.add(*range(3))
    epoch, _ = await inbox.open()
    first = await inbox.letters(epoch, count=2)
    await inbox.add(3)
    second = await inbox.letters(epoch, after=first[-1].seq)
    assert [letter.payload for letter in (*first, *second)] == ["0", "1", "2", "3"]


async def test_published_reader_sends_everything_at_once(published: Published) -> None:
    """With a small window, messages that do not fit are left out, and later messages overtake them."""
    await published.add("c", [published_message(b"%d" % n) for n in range(10)])
    gateway = Gateway(published, "c", window=2, delayed_limit=3)
    gateway.connect()
    await gateway.load()
    gateway.deliver_backlog()
    for _ in range(3):
        await gateway.acknowledge(gateway.sent[0]["packetId"])
        await gateway.acknowledge(gateway.sent[1]["packetId"])
    last = await published.add("c", [published_message(b"new")])
    gateway.deliver(published_message(b"new", packetId=last + 1))
    got = [payload_of(each) for each in gateway.sent]
    assert b"9" not in got


async def test_session_sends_at_most_its_window(broker: Broker) -> None:
    """A window of 20 over a backlog of 2 000 and live letters: at most 20 are unacknowledged, and all come in order."""
    async with broker:
        await broker.send_many(("phone", n) for n in range(2000))
        got, out = [], []
        async with broker.connect("phone", window=20) as session:
            while len(got) < 2100:
                letter = await anext(session)
                got.append(letter.payload)
                out.append(letter)
                assert len(out) <= 20
                if len(out) == 20 or len(got) > 2050:
                    if len(got) == 1000:
                        await broker.send_many(("phone", n) for n in range(2000, 2100))
                    for each in out:
                        await session.ack(each)
                    out.clear()
        assert got == list(range(2100))


# -- takeover and clear ---------------------------------------------------------------------------------------------


async def test_ack_of_an_old_session_is_refused_after_a_takeover(inbox: Inbox) -> None:
    """The old session cannot acknowledge, read, receive or close; the new one gets all its letters again."""
    await inbox.add("a", "b")
    old, _ = await inbox.open()
    await inbox.page(old)
    new, _ = await inbox.open()
    assert await inbox.ack(old, 1) == [b"STALE_EPOCH"]
    assert await inbox.receive(old, 1) == [b"STALE_EPOCH"]
    assert await inbox.page(old) == [b"STALE_EPOCH"]
    assert await inbox.close(old) == b"STALE_EPOCH"
    assert await inbox.texts(new) == ["a", "b"]
    assert (await inbox.state())["gateway"] == "gateway"


async def test_letters_after_a_clean_start_and_a_clock_that_was_set_back_are_stored(inbox: Inbox) -> None:
    """The server's clock goes an hour back behind a clean start: letters of now are no older ones, with or without a
    time of their own. They were dropped for an hour.
    """
    epoch, _ = await inbox.open(clean=True)
    now = await inbox.now_ms()
    await inbox.client.execute_command("HSET", inbox.session, "since_ms", now + 3_600_000)
    assert await inbox.add("sent") == [1, 0, 0, 0]
    assert await inbox.add("routed", published=now) == [1, 0, 0, 0]
    assert await inbox.texts(epoch) == ["sent", "routed"]


async def test_clear_in_steps_keeps_letters_that_arrive_meanwhile(inbox: Inbox) -> None:
    """A clean start hides all letters at once and removes them in chunks. Letters published before it are refused,
    later ones are kept, in any interleaving of the steps.
    """
    before = await inbox.now_ms() - 10
    await inbox.add(*range(2500))
    epoch, reply = await inbox.open(clean=True)
    assert reply[5] == 2500
    assert await inbox.add("late", published=before) == [0, 0, 0, 1]
    assert await inbox.clear() == [b"OK", 1000, 1500]
    assert await inbox.add("new") == [1, 0, 0, 0]
    assert await inbox.texts(epoch, after=int(reply[4])) == ["new"]
    assert await inbox.clear() == [b"OK", 1000, 500]
    assert await inbox.clear() == [b"OK", 500, 0]
    assert await inbox.refs() == [2501]
    assert len(await inbox.client.execute_command("KEYS", f"{inbox.inbox}_*".replace("[", "\\["))) == 1
