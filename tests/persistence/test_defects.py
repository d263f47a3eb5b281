"""The defects of the published design, each shown on it and mended here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import redis.exceptions

from bench.published import Gateway, Published, payload_of, published_message
from rsmq import Broker, Settings
from rsmq.connect import Client
from rsmq.errors import ConfigError
from rsmq.persistence.letter import packet_id_of, seal
from rsmq.script import ADD_LETTERS
from rsmq.slot import slot_of
from tests.persistence.conftest import Inbox

STRANGE = ["{", "}", "}{", "a}b{c", "{x}", "%", "%7B", "*", "?[a-z]", "line\r\nbreak", "\x00", "기기-😀", "}" * 86]


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """Not connected yet."""
    return Broker(settings)


# -- 1. packet ids --------------------------------------------------------------------------------------------------


async def test_packet_id_wrap_published(published: Published) -> None:
    """An old unacknowledged message is overwritten when the packet ids have gone round."""
    await published.add("c", [published_message(b"old")])
    await published.redis.set(published.last_packet_id_key("c"), 65_535)
    await published.add("c", [published_message(b"new")])
    assert [payload_of(each) for each in await published.read("c")] == [b"new"]


async def test_packet_id_wrap(inbox: Inbox) -> None:
    """No two live letters share a packet id: what is a whole round old gives way, and that is counted."""
    await inbox.add("old")
    await inbox.start_at(65_534)
    await inbox.add("before the wrap")
    epoch, _ = await inbox.open()
    assert await inbox.texts(epoch) == ["old", "before the wrap"]
    await inbox.add("after the wrap")
    letters = await inbox.letters(epoch)
    assert [(letter.seq, letter.packet_id) for letter in letters] == [(65_535, 65_535), (65_536, 1)]
    assert (await inbox.state())["dropped"] == "1"


async def test_packet_id_wrap_during_a_handshake(inbox: Inbox) -> None:
    """A letter half way through its handshake keeps its packet id: the seq that would share it is left out."""
    await inbox.add("held")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    await inbox.start_at(65_534)
    assert await inbox.add("a", "b", "c") == [3, 0, 0, 0]
    assert await inbox.refs() == [1, 65_535, 65_537, 65_538]
    assert len({packet_id_of(seq) for seq in await inbox.refs()}) == 4


# -- 2. and 8. times to live ----------------------------------------------------------------------------------------


async def test_lives_for_ever_published(published: Published) -> None:
    """An update takes the time to live away, and the index keys never had one."""
    await published.add("c", [published_message(b"x", expiry=60)])
    await published.update("c", 1)
    names = (published.message_key("c", 1), published.messages_key("c"), published.last_packet_id_key("c"))
    assert [await published.redis.pttl(name) for name in names] == [-1, -1, -1]


async def test_every_key_expires(inbox: Inbox) -> None:
    """Whatever was done with an inbox, each of its keys has a time to live, and none is shorter than a letter's."""
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
async def test_bad_expiry_published(published: Published, expiry: int) -> None:
    """One bad expiry ends the script half way: what comes after it in the batch is lost."""
    batch = [published_message(b"a"), published_message(b"b", expiry=expiry), published_message(b"c")]
    with pytest.raises(redis.exceptions.ResponseError):
        await published.add("c", batch)
    assert [payload_of(each) for each in await published.read("c")] == [b"a"]


@pytest.mark.parametrize(
    ("expiry_ms", "is_stored"),
    [(0, False), (-1, False), (1, True), (1000, True), (2**31 * 1000, True), ((2**32 - 1) * 1000, True), (2**63, True)],
)
async def test_any_expiry_touches_only_its_letter(inbox: Inbox, expiry_ms: int, is_stored: bool) -> None:
    """Zero, negative, one, 2^31 and 2^32-1 seconds, and beyond: the letters beside it do not notice."""
    await inbox.add("a")
    assert await inbox.add("b", ttl=expiry_ms) in ([1, 0, 0, 0], [0, 0, 1, 0])
    await inbox.add("c")
    epoch, _ = await inbox.open()
    found = await inbox.texts(epoch)
    assert [text for text in found if text != "b"] == ["a", "c"]
    assert is_stored or "b" not in found
    assert expiry_ms < 1000 or (await inbox.client.execute_command("PTTL", inbox.keys.letter("phone", 2))) > 0


async def test_expiry_counts_from_publishing(inbox: Inbox) -> None:
    """A message that waited elsewhere has less time left here."""
    now = await inbox.now_ms()
    assert await inbox.add("late", published=now - 50_000, ttl=60_000) == [1, 0, 0, 0]
    assert await inbox.add("too late", published=now - 70_000, ttl=60_000) == [0, 0, 1, 0]
    assert 0 < await inbox.client.execute_command("PTTL", inbox.keys.letter("phone", 1)) <= 10_000


# -- 4. retries -----------------------------------------------------------------------------------------------------


async def test_retried_batch_published(published: Published) -> None:
    """A batch whose reply was lost is stored twice."""
    batch = [published_message(b"a"), published_message(b"b")]
    await published.add("c", batch)
    await published.add("c", batch)
    assert len(await published.read("c")) == 4


async def test_retried_batch(inbox: Inbox) -> None:
    """The same batch is stored once, also when some of it was acknowledged in between, and more may follow it."""
    assert await inbox.add("a", "b", first=1) == [2, 0, 0, 0]
    epoch, _ = await inbox.open()
    await inbox.ack(epoch, 1)
    assert await inbox.add("a", "b", first=1) == [0, 0, 0, 0]
    assert await inbox.add("a", "b", "c", first=1) == [1, 0, 0, 0]
    assert await inbox.add("other", source="t", first=1) == [1, 0, 0, 0]
    assert await inbox.texts(epoch) == ["b", "c", "other"]


async def test_a_batch_that_holds_something_twice(inbox: Inbox) -> None:
    """Positions that go back within one call are repetitions, too."""
    assert await inbox.add("a", "b", first=1) == [2, 0, 0, 0]
    envelopes = [("0000000000000003", "c"), ("0000000000000004", "d"), ("0000000000000003", "c")]
    parts = [part for position, text in envelopes for part in (position, "", "", seal(text.encode()))]
    args = (1000_000, 100, 600_000, "source:s", 3, *parts)
    assert (await ADD_LETTERS(inbox.client, inbox.keys.device("phone"), args))[1] == 2


# -- 5. the limit ---------------------------------------------------------------------------------------------------


async def test_expired_count_published(published: Published) -> None:
    """Expired references fill the inbox: a live message is dropped for them."""
    published.limit = 3
    await published.add("c", [published_message(b"live")])
    await published.add("c", [published_message(b"x", expiry=60), published_message(b"y", expiry=60)])
    for packet_id in (2, 3):
        await published.redis.pexpire(published.message_key("c", packet_id), 1)
    while await published.redis.exists(published.message_key("c", 2), published.message_key("c", 3)):
        pass
    await published.add("c", [published_message(b"new")])
    assert [payload_of(each) for each in await published.read("c")] == [b"new"]


async def test_expired_go_first(inbox: Inbox) -> None:
    """At the limit the expired make room, wherever they stand; only then the oldest, and each is counted for itself."""
    inbox.limit = 3
    await inbox.add("live")
    await inbox.add("x", "y", ttl=30)
    while await inbox.client.execute_command("EXISTS", *(inbox.keys.letter("phone", seq) for seq in (2, 3))):
        pass
    assert await inbox.add("new") == [1, 0, 2, 0]
    epoch, _ = await inbox.open()
    assert await inbox.texts(epoch) == ["live", "new"]
    assert await inbox.add("2", "3") == [2, 1, 0, 0]
    assert await inbox.texts(epoch) == ["new", "2", "3"]
    state = await inbox.state()
    assert (state["expired"], state["dropped"]) == ("2", "1")


async def test_a_lowered_limit(inbox: Inbox) -> None:
    """An inbox far above a new limit shrinks in bounded steps, and nothing fails."""
    for start in range(0, 3000, 500):
        await inbox.add(*range(start, start + 500))
    inbox.limit = 10
    for _ in range(4):
        await inbox.add("more")
    assert len(await inbox.refs()) == 10


# -- 6. payloads ----------------------------------------------------------------------------------------------------


async def test_cjson_published(published: Published) -> None:
    """An update through cjson makes `{}` of `[]`, and rounds what is above 2^53."""
    await published.add("c", [published_message(b"", tags=[], account=2**53 + 1)])
    await published.update("c", 1)
    (message,) = await published.read("c")
    assert message["tags"] == {}
    assert message["account"] != 2**53 + 1


async def test_payloads_are_bytes(broker: Broker) -> None:
    """What is sent is what arrives: nobody parses it on the way."""
    payload = {"tags": [], "account": 2**53 + 1, "nothing": {}}
    async with broker:
        await broker.send("phone", payload)
        await broker.send("phone", bytes(range(256)))
        async with broker.connect("phone", auto_ack=True) as session:
            assert (await anext(session)).payload == payload
            assert (await anext(session)).payload == bytes(range(256))


# -- 7. QoS 2 -------------------------------------------------------------------------------------------------------


async def test_trimmed_handshake_published(published: Published) -> None:
    """Trimming drops what is half way through its handshake, and its state with it."""
    published.limit = 2
    await published.add("c", [published_message(b"a")])
    await published.update("c", 1)
    await published.add("c", [published_message(b"b"), published_message(b"c")])
    assert [each["packetType"] for each in await published.read("c")] == ["PUBLISH", "PUBLISH"]


async def test_a_handshake_outlives_trimming(inbox: Inbox) -> None:
    """A received letter is dropped by nothing but its acknowledgement: the oldest others go."""
    inbox.limit = 2
    await inbox.add("a", "b")
    epoch, _ = await inbox.open()
    await inbox.receive(epoch, 1)
    assert await inbox.add("c", "d") == [2, 2, 0, 0]
    letters = await inbox.letters(epoch)
    assert [(letter.seq, letter.is_received) for letter in letters] == [(1, True), (4, False)]
    assert await inbox.ack(epoch, 1, 4) == [b"OK", 2]
    assert (await inbox.state())["held"] == ""


async def test_trimming_half_way_through_an_acknowledgement(inbox: Inbox) -> None:
    """An acknowledgement of what was trimmed meanwhile acknowledges the rest, and removes nothing else."""
    inbox.limit = 4
    await inbox.add("a", "b", "c", "d")
    epoch, _ = await inbox.open()
    await inbox.page(epoch)
    await inbox.add("e", "f")
    assert await inbox.ack(epoch, 1, 2, 3) == [b"OK", 1]
    assert await inbox.texts(epoch) == ["d", "e", "f"]


# -- 9. ids ---------------------------------------------------------------------------------------------------------


async def test_hash_tag_published(published: Published) -> None:
    """An id that begins with a brace takes the keys of one client into different slots."""
    names = published.messages_key("}c"), published.message_key("}c", 1)
    assert slot_of(names[0]) != slot_of(names[1])


@pytest.mark.parametrize("device", STRANGE)
async def test_strange_ids(broker: Broker, device: str, prefix: str) -> None:
    """Any id is one device: its letters arrive, and no other device sees them."""
    async with broker:
        await broker.send(device, "for it")
        await broker.send("phone", "for the phone")
        for name, text in ((device, "for it"), ("phone", "for the phone")):
            async with broker.connect(name, auto_ack=True) as session:
                assert (await anext(session)).payload == text
        assert {each.client_id async for each in broker.devices.iterate()} == {device, "phone"}


@pytest.mark.parametrize("device", ["", "x" * 300, "é" * 129])
async def test_ids_that_are_refused(broker: Broker, device: str) -> None:
    """No text, or more than 256 bytes: an error before anything is stored."""
    async with broker:
        for attempt in (lambda: broker.send(device, 1), lambda: broker.send_many([(device, 1)])):
            with pytest.raises(ConfigError, match="device id"):
                await attempt()
        with pytest.raises(ConfigError, match="device id"):
            broker.connect(device)


# -- 10. large backlogs ---------------------------------------------------------------------------------------------


async def durations(client: Client, act: Callable[[], Awaitable[object]]) -> list[float]:
    """What each script call during `act` took of the server, in ms and in order, by its own slow log."""
    await client.execute_command("CONFIG", "SET", "slowlog-log-slower-than", 0, "slowlog-max-len", 10_000)
    await client.execute_command("SLOWLOG", "RESET")
    try:
        await act()
        entries = await client.execute_command("SLOWLOG", "GET", -1)
    finally:
        await client.execute_command("CONFIG", "SET", "slowlog-log-slower-than", 10_000, "slowlog-max-len", 128)
    return [entry[2] / 1000 for entry in reversed(entries) if entry[3][0] == b"EVALSHA"]


async def test_large_backlog(client: Client, inbox: Inbox, published: Published) -> None:
    """10 000 letters of 10 KiB are read and acknowledged without one call that holds the server up for more than 5 ms;
    reading a third of it at once takes more than ten times as long."""
    payload = b"x" * 10_240
    for number in range(100):
        await inbox.add(*[payload] * 100)
        if number < 30:
            await published.add("c", [published_message(payload)] * 100)
    epoch, _ = await inbox.open()

    async def read() -> None:
        after = 0
        while letters := await inbox.letters(epoch, after):
            after = letters[-1].seq
        assert after == 10_000

    async def acknowledge() -> None:
        for start in range(1, 10_001, 500):
            assert await inbox.ack(epoch, *range(start, start + 500)) == [b"OK", 500]

    await read()
    # the same calls several times, each at its best: that of another process in between is not the server's
    passes = [await durations(client, read) for _ in range(5)]
    paged = max(map(min, zip(*passes, strict=True)))
    acked = sorted(await durations(client, acknowledge))[15]
    whole = min([(await durations(client, lambda: published.read("c")))[-1] for _ in range(2)])
    await published.clear("c")
    assert paged < 5, f"{paged} ms"
    assert acked < 5, f"{acked} ms"
    assert whole > 10 * paged, f"{whole} ms at once, {paged} ms in pages"


# -- 11. and 12. the way to the device ------------------------------------------------------------------------------


async def test_reconnect_race_published(published: Published) -> None:
    """A live message goes past the backlog that was read before it: it overtakes."""
    await published.add("c", [published_message(b"%d" % n) for n in range(3)])
    gateway = Gateway(published, "c")
    gateway.connect()
    await gateway.load()
    last = await published.add("c", [published_message(b"3")])
    gateway.deliver(published_message(b"3", packetId=last + 1))
    gateway.deliver_backlog()
    assert [payload_of(each) for each in gateway.sent] == [b"3", b"0", b"1", b"2"]


async def test_no_reconnect_race(inbox: Inbox) -> None:
    """Whatever is stored between two pages comes in its place: the cursor is the only way."""
    await inbox.add(*range(3))
    epoch, _ = await inbox.open()
    first = await inbox.letters(epoch, count=2)
    await inbox.add(3)
    second = await inbox.letters(epoch, after=first[-1].seq)
    assert [letter.payload for letter in (*first, *second)] == ["0", "1", "2", "3"]


async def test_receive_window_published(published: Published) -> None:
    """With a small window and a large backlog what does not fit is left out, and later messages overtake it."""
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


async def test_receive_window(broker: Broker) -> None:
    """A window of 20 over a backlog of 2 000 and live letters: never more than 20 are out, and all come in order."""
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


async def test_takeover_during_ack(inbox: Inbox) -> None:
    """The old connection can acknowledge, read, receive and close nothing any more; all of it comes again."""
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


async def test_clear_while_late_messages_arrive(inbox: Inbox) -> None:
    """A clean start hides everything at once and removes it in chunks; what was published before it is turned away,
    what comes after it stays, however the steps interleave."""
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
