"""Large payloads whose body lies in a store: what readers get, what waits for the store, and what is lost."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Burial, Fallback, Message, Reject, RetryPolicy, Settings, SyncBroker, dlq
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd
from rsmq.errors import CannotDecode, StoreUnavailable, TooLarge
from rsmq.model import body as body_module
from tests.codecs.stores import MemoryStore
from tests.contract.test_codecs import FORMS, register
from tests.contract.witness import Witness, add, ask, dies, letters_of, settled
from tests.matrix.way import steady_connections
from tests.patience import until

MakeBroker = Callable[..., Broker]
LARGE = 40_000


@pytest.fixture
def store() -> MemoryStore:
    """The store of a test."""
    return MemoryStore()


@pytest.fixture
def stored(server_url: str, prefix: str, store: MemoryStore) -> MakeBroker:
    """A broker that puts more than 10 kB into the store."""

    def make(*, codecs: bool = False, offload: bool = True, **overrides: Any) -> Broker:
        settings = Settings(url=server_url, prefix=prefix, preflight="warn", payload_limit="20kB", **overrides)
        both = [Zstd(), Encrypt(Keyring({"k1": b"1" * 32}))] if codecs else []
        return Broker(settings, codecs=both, offload=Offload(store, above="10kB") if offload else None)

    return make


def large(n: int, size: int = LARGE) -> dict[str, Any]:
    """A payload that does not become smaller."""
    return {"n": n, "x": os.urandom(size // 2).hex()}


@pytest.mark.parametrize("form", FORMS)
async def test_a_handler_gets_a_large_payload_and_the_server_does_not(
    stored: MakeBroker, store: MemoryStore, witness: Witness, form: str
) -> None:
    """In each form of a handler, each way to publish, compressed and encrypted, far above the limit of an entry."""
    broker = stored(codecs=True)
    register(broker, form, witness.note)
    async with broker:
        await broker.publish("t", {"n": 0})
        await broker.publish("t", large(1, 5_000_000), key="a", headers={"mark": "x"})
        await broker.publish_many("t", [{"n": 2}, large(3)], key=lambda _: "a")
        await broker.publish("t", large(4), delay="10ms")
        await broker.publish("t", large(5), message_id="five")
        await broker.publish("t", large(6), **({} if form == "message" else {"unique": "six"}))
        entries = await ask(broker, "XRANGE", broker.keys.stream("t", 0), "-", "+")
        async with broker.running():
            await witness.sees(range(7))
            await settled(broker, "t")
    assert max(len(part) for _, fields in entries for part in fields) < 1000
    assert len(store.names) == 5
    assert max(map(len, store.bodies.values())) > 2_500_000, "what was compressed is stored so"


async def test_a_plain_body_is_stored_as_it_is(stored: MakeBroker, store: MemoryStore, witness: Witness) -> None:
    """Without codecs `enc` is `ref`, the body is the payload, and `data` the digest of id and body."""
    broker = stored()
    register(broker, "payload", witness.note)
    async with broker, broker.running():
        await broker.publish("t", {"n": 1, "x": "y" * LARGE}, message_id="m1")
        await witness.sees([1])
        ((_, fields),) = await ask(broker, "XRANGE", broker.keys.stream("t", 0), "-", "+")
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    (name,) = store.names
    assert named == {b"data": body_module.digest_of(b"m1", store.bodies[name]), b"id": b"m1",
                     b"enc": b"ref", b"ref": name.encode()}  # fmt: skip
    assert store.bodies[name].startswith(b'{"n":1,')


async def test_messages_of_a_key_keep_their_order_while_a_body_is_on_its_way(
    stored: MakeBroker, store: MemoryStore
) -> None:
    """Small ones wait for a large one that was published before them; other keys do not."""
    broker = stored()
    async with broker:
        await broker.topics.ensure("t", 1)
        await broker.publish("t", {"n": -1}, key="b")
        store.gate.clear()
        payloads = [large(0), {"n": 1}, large(2), {"n": 3}]
        calls = [asyncio.create_task(broker.publish("t", each, key="a")) for each in payloads]
        await broker.publish("t", {"n": 4}, key="b")
        assert not any(call.done() for call in calls)
        store.gate.set()
        refs = await asyncio.gather(*calls)
        entries = await ask(broker, "XRANGE", broker.keys.stream("t", 0), "-", "+")
    ids = [fields[fields.index(b"id") + 1].decode() for _, fields in entries]
    assert [each for each in ids if each in refs] == refs


async def test_a_call_that_fails_lets_the_next_of_its_key_go_on(stored: MakeBroker, store: MemoryStore) -> None:
    """Also one that is cancelled while it waits: the one behind it waits for the first, and all end."""
    broker = stored()
    async with broker:
        store.gate.clear()
        first = asyncio.create_task(broker.publish("t", large(0), key="a"))
        second = asyncio.create_task(broker.publish("t", {"n": 1}, key="a"))
        third = asyncio.create_task(broker.publish("t", {"n": 2}, key="a"))
        await until(lambda: broker._producer is not None and "turns=1" in repr(broker._producer), "they wait")
        second.cancel()
        await anyio.lowlevel.checkpoint()
        assert not third.done()
        store.gate.set()
        await asyncio.gather(first, third)
        await until(lambda: "turns=0" in repr(broker._producer), "nothing is left of the turns")


async def test_while_the_store_is_away_nothing_large_is_published(stored: MakeBroker, store: MemoryStore) -> None:
    """The error says which store; nothing is stored. Small messages go on. One above `largest` is refused."""
    broker = stored()
    async with broker:
        await broker.topics.ensure("t", 1)
        store.is_away = True
        with pytest.raises(StoreUnavailable, match=r"MemoryStore.*the network is down"):
            await broker.publish("t", large(0))
        with pytest.raises(StoreUnavailable):
            await broker.publish_many("t", [{"n": 1}, large(2)])
        await broker.publish("t", {"n": 3})
        assert await ask(broker, "XLEN", broker.keys.stream("t", 0)) == 1
        with pytest.raises(TooLarge, match="`largest` of Offload"):
            await broker.publish("t", b"x" * (64 * 2**20 + 1))


@steady_connections
@pytest.mark.parametrize("form", FORMS)
async def test_a_message_waits_while_the_store_is_away(
    stored: MakeBroker, store: MemoryStore, witness: Witness, form: str
) -> None:
    """Without a patience and without an attempt, in the order of its key; others go on. Then it is handled."""
    broker = stored(key_patience="0s")
    register(broker, form, witness.note)
    async with broker:
        await broker.publish("t", large(0), key="a")
        await broker.publish("t", {"n": 1}, key="a")
        await broker.publish("t", {"n": 2}, key="b")
        store.is_away = True
        async with broker.running():
            await witness.sees([2])
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            await until(lambda: any("MemoryStore" in each for each in consumer.missing_keys), "it says what it misses")
            assert witness.seen == [2]
            assert consumer.stats["buried"] == consumer.stats["retried"] == 0
            store.is_away = False
            await witness.sees([0, 1])
            await settled(broker, "t")
    assert witness.seen == [2, 0, 1]


@pytest.mark.parametrize("form", FORMS)
async def test_a_body_that_the_store_has_answered_with_half_of_is_read_again(
    stored: MakeBroker, store: MemoryStore, witness: Witness, form: str
) -> None:
    """Half of it, and then another one. The message is handled at its first attempt, and its key keeps its order."""
    answers, get = list[str](), store.get

    def wrong(name: str) -> bytes:
        answers.append(name)
        body = get(name)
        return {1: body[: len(body) // 2], 2: b"another body"}.get(answers.count(name), body)

    broker = stored()
    register(broker, form, witness.note)
    async with broker:
        await broker.publish("t", large(0), key="a")
        await broker.publish("t", {"n": 1}, key="a")
        store.get = wrong  # type: ignore[method-assign]
        async with broker.running():
            await witness.sees([0, 1])
            await settled(broker, "t")
        assert await letters_of(broker, "t", "g") == []
    assert witness.seen == [0, 1]
    assert len(answers) == 3


@pytest.mark.parametrize("form", ["message", "batch", "payloads"])
async def test_a_body_that_is_gone_is_a_dead_letter_of_its_own_reason(
    stored: MakeBroker, store: MemoryStore, witness: Witness, form: str
) -> None:
    """`lost-body`. While the whole folder is gone, as where a disk is not mounted, messages wait."""
    broker = stored()
    register(broker, form, witness.note)
    async with broker:
        for n in range(2):
            await broker.publish("t", large(n), message_id=f"m{n}")
        kept = dict(store.bodies)
        store.bodies.clear()
        async with broker.running():
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            await until(lambda: any("MemoryStore" in each for each in consumer.missing_keys), "it waits")
            gone = min(store_names(kept))
            store.bodies |= {name: data for name, data in kept.items() if name != gone}
            await dies(broker, "t", "g", 1)
            await until(lambda: witness.seen, "the other is handled: it is looked at once more within a second")
        letters = await letters_of(broker, "t", "g")
    assert [letter.reason for letter in letters] == ["lost-body"]
    assert len(witness.seen) == 1


@pytest.mark.parametrize("form", ["message", "batch", "payloads"])
async def test_a_message_whose_body_stays_another_one_is_held_until_patience_ends(
    stored: MakeBroker, store: MemoryStore, witness: Witness, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """No attempt is counted, its key waits, others go on. One is handled when the store is right again, of the other
    nothing else comes: a dead letter `lost-body`, which can be replayed."""
    monkeypatch.setattr("rsmq.handler.reader.PAUSES", (0.01,))
    monkeypatch.setattr("rsmq.consumer.running.missing_keys.SHORTEST", timedelta(milliseconds=50))
    broker = stored()
    register(broker, form, witness.note)
    async with broker:
        await broker.publish("t", large(0), key="a")
        await broker.publish("t", {"n": 1}, key="a")
        await broker.publish("t", large(2), key="b")
        await broker.publish("t", {"n": 3}, key="c")
        kept = {name: store.bodies[name] for name in store_names(store.bodies)}
        store.bodies |= dict.fromkeys(kept, b"another body")
        async with broker.running():
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            await until(lambda: len(consumer._runner.missing_keys._missing) == 2, "both wait")
            await witness.sees([3])
            assert "body that was published" in consumer.missing_keys
            assert consumer.stats["buried"] == consumer.stats["retried"] == 0
            (second,) = [name for name, data in kept.items() if b'"n":2' in data]
            store.bodies |= {name: data for name, data in kept.items() if name != second}
            await witness.sees([3, 0, 1])
            monkeypatch.setattr(consumer._runner.missing_keys, "_patience", timedelta(0))
            await dies(broker, "t", "g", 1)
        (letter,) = await letters_of(broker, "t", "g")
    assert (letter.reason, letter.attempts, "digest differs" in letter.error) == ("lost-body", 1, True)


@pytest.mark.parametrize("way", ["publish", "batch", "output"])
async def test_calls_of_one_key_are_stored_in_their_order(
    stored: MakeBroker, store: MemoryStore, witness: Witness, way: str
) -> None:
    """A large one whose put takes long, and a small one behind it: of a publisher, in a batch, and of a handler."""
    broker = stored()
    register(broker, "message", witness.note)
    async with broker:

        async def both(publish: Callable[..., Any]) -> None:
            store.gate.clear()
            first = asyncio.ensure_future(publish("t", large(0), key="a"))
            await until(lambda: store.waiting > 0, "its body is on the way")
            second = asyncio.ensure_future(publish("t", {"n": 1}, key="a"))
            for _ in range(100):
                await asyncio.sleep(0)
            store.gate.set()
            await asyncio.gather(first, second)

        @broker.handler("first", group="h")
        async def pass_on(message: Message) -> None:
            await both(message.publish)

        await broker.publish("t", large(2), key="b")  # the folder of this server is there
        async with broker.running():
            await witness.sees([2])
            if way == "publish":
                await both(broker.publish)
            elif way == "output":
                await broker.publish("first", {})
            else:
                async with broker.batch("many", group="g") as batch:
                    await batch.publish("t", {"n": 3}, key="c")
                    await both(batch.publish)
            await witness.sees([2, 3, 0, 1] if way == "batch" else [2, 0, 1])
    assert [n for n in witness.seen if n < 2] == [0, 1]


async def test_what_a_dying_message_publishes_waits_for_the_store(
    stored: MakeBroker, store: MemoryStore, witness: Witness
) -> None:
    """`on_dead` is called again until its large output has a body: neither is lost, and the key waits."""
    broker, calls = stored(), list[int]()

    @broker.handler("t", group="g")
    async def handle(payload: dict[str, Any]) -> None:
        if payload["n"] == 0:
            raise Reject("no")
        witness.note(payload["n"])

    @broker.on_dead("t", group="g")
    async def tell(message: Message, _: Burial) -> None:
        calls.append(1)
        await message.publish("told", large(7))

    @broker.handler("told", group="h")
    async def told(payload: dict[str, Any]) -> None:
        witness.note(payload["n"])

    async with broker:
        await broker.publish("t", {"n": 0}, key="a")
        await broker.publish("t", {"n": 1}, key="a")
        store.is_away = True
        async with broker.running():
            await until(lambda: len(calls) > 1, "it is called again")
            assert witness.seen == []
            store.is_away = False
            await until(lambda: sorted(witness.seen) == [1, 7], "both are handled")
            await dies(broker, "t", "g", 1)


@steady_connections
async def test_a_message_on_its_way_to_a_fallback_waits_for_its_body(
    stored: MakeBroker, store: MemoryStore, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose attempts have ended in crashes has no body here yet, and its store is away."""
    broker = stored()
    policy = RetryPolicy(max_attempts=1)

    @broker.handler("t", group="g", retry=policy, fallback=Fallback("sms"))
    async def push(payload: dict[str, Any]) -> None:
        witness.note("started")

    @broker.handler("sms", group="h")
    async def sms(payload: dict[str, Any]) -> None:
        witness.note(payload["n"])

    async with broker:
        await broker.publish("t", large(0), key="a")
        stream = broker.keys.stream("t", (await broker.topics.existing("t")).normal.partition_for("a"))
        await ask(broker, "XGROUP", "CREATE", stream, "g", "0")
        for _ in range(2):
            await ask(broker, "XREADGROUP", "GROUP", "g", "gone", "STREAMS", stream, ">")
        [[entry, *_]] = await ask(broker, "XPENDING", stream, "g", "-", "+", 10)
        await ask(broker, "XCLAIM", stream, "g", "gone", 0, entry, "RETRYCOUNT", 3)
        store.is_away = True
        async with broker.running():
            await until(lambda: store.refused > 2, "its body is asked for again")
            store.is_away = False
            await until(lambda: witness.seen == [0], "it is handled by the fallback")
        assert await letters_of(broker, "t", "g") == []


async def test_a_message_that_expires_while_its_body_comes_does_not_start(
    stored: MakeBroker, store: MemoryStore, witness: Witness
) -> None:
    """It becomes a dead letter, as one that has expired before."""
    broker, get, is_slow = stored(), store.get, threading.Event()

    def slow(name: str) -> bytes:
        is_slow.set()
        assert expired.wait(20)
        return get(name)

    expired = threading.Event()
    register(broker, "message", witness.note)
    async with broker:
        store.get = slow  # type: ignore[method-assign]
        async with broker.running():
            await broker.publish("t", large(0), expires="2s", on_expiry="dead")
            await until(is_slow.is_set, "its body is asked for")
            begun = await now_ms(broker)

            async def is_over() -> bool:
                return await now_ms(broker) > begun + 2000

            await until(is_over, "it has expired")
            expired.set()
            await dies(broker, "t", "g", 1)
        (letter,) = await letters_of(broker, "t", "g")
    assert (letter.reason, witness.seen) == ("expired", [])


async def now_ms(broker: Broker) -> int:
    """The server's clock."""
    seconds, micros = await ask(broker, "TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def store_names(bodies: dict[str, bytes]) -> list[str]:
    """The names of bodies."""
    return [name for name in bodies if name.count("/") == 2]


async def leave_crashed(broker: Broker, payload: Any) -> None:
    """A message that has been started three times, and whose worker is gone."""
    stream = broker.keys.stream("t", 0)
    await broker.topics.ensure("t", 1)
    await broker.publish("t", payload, key="a")
    await ask(broker, "XGROUP", "CREATE", stream, "g", "0")
    ((_, ((entry_id, _),)),) = await ask(broker, "XREADGROUP", "GROUP", "g", "killed", "STREAMS", stream, ">")
    await ask(broker, "XCLAIM", stream, "g", "killed", 0, entry_id, "RETRYCOUNT", 3, "IDLE", 10**7)


@pytest.mark.parametrize("codecs", [False, True])
async def test_a_message_that_never_started_is_handed_on_with_its_body(stored: MakeBroker, codecs: bool) -> None:
    """It was found pending after too many starts, so its body had not been fetched yet."""
    broker, got, sent = stored(codecs=codecs), list[Any](), large(1)
    twice = RetryPolicy(max_attempts=2, wait=wait_fixed(0))

    @broker.handler("t", group="g", partitions=1, retry=twice, fallback="second")
    async def handle(_: dict[str, Any]) -> None:
        raise AssertionError("it does not start")

    @broker.handler("second", group="g", partitions=1)
    async def handle_second(payload: dict[str, Any]) -> None:
        got.append(payload)

    async with broker:
        await leave_crashed(broker, sent)
        async with broker.running():
            await until(lambda: bool(got), "the second handler")
            assert got == [sent]
            assert not await letters_of(broker, "t", "g")


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_hook_gets_the_body_of_a_message_that_never_started(
    stored: MakeBroker, store: MemoryStore, is_away: bool
) -> None:
    """Or what is stored in its place, and the word that it is: `is_encoded`."""
    broker, sent, got = stored(), large(1), list[Message]()
    twice = RetryPolicy(max_attempts=2, wait=wait_fixed(0))

    @broker.handler("t", group="g", partitions=1, retry=twice)
    async def handle(_: dict[str, Any]) -> None:
        raise AssertionError("it does not start")

    @broker.on_dead("t", group="g")
    async def note(message: Message, _: Burial) -> None:
        got.append(message)

    async with broker:
        await leave_crashed(broker, sent)
        store.is_away = is_away
        async with broker.running():
            await until(lambda: bool(got), "the hook")
    (message,) = got
    assert message.is_encoded == is_away
    assert len(message.data) == 32 if is_away else json.loads(message.data) == sent


@pytest.mark.parametrize(
    "ref", ["../../etc/passwd", "/etc/passwd", "a/u/" + "0" * 64 + "." + "0" * 32, "a/t/" + "0" * 64, "", None]
)
async def test_a_reader_gets_no_other_name_from_the_store(
    stored: MakeBroker, witness: Witness, ref: str | None
) -> None:
    """What anybody may XADD: a path, a body of another topic, half a name. It is malformed."""
    broker = stored()
    register(broker, "message", witness.note)
    async with broker:
        await broker.topics.ensure("t", 1)
        named = () if ref is None else ("ref", ref)
        await add(broker, broker.keys.stream("t", 0), "data", b"x" * 32, "id", "m", "enc", "ref", *named)
        async with broker.running():
            await dies(broker, "t", "g", 1)
        (letter,) = await letters_of(broker, "t", "g")
    assert letter.reason == "malformed"
    assert "field ref" in letter.error


@pytest.mark.parametrize("codecs", [False, True], ids=["plain", "sealed"])
async def test_a_dead_letter_shows_its_body_when_it_is_asked_for(
    stored: MakeBroker, store: MemoryStore, codecs: bool
) -> None:
    """`get` brings it, a list where `bodies` says so; conditions on a field see it, and a replay that has one. While
    the store is away the letter says where it lies."""
    broker = stored(codecs=codecs)

    @broker.handler("t", group="g")
    async def refuse(_message: Message) -> None:
        raise Reject("no")

    async with broker:
        await broker.topics.ensure("t", 1)
        await broker.publish_many("t", [{"n": 0}, large(1), large(2)], key=lambda _: "a")
        async with broker.running():
            await dies(broker, "t", "g", 3)
        topic, letters, n1 = await broker.topics.existing("t"), broker.dead_letters, dlq.read_fields(["n=1"])
        listed = await letters_of(broker, "t", "g")
        assert [each.sealed.partition(" (")[0] for each in listed] == ["", *["in the store of bodies"] * 2]
        whole = [each async for each in letters.iterate(topic, "g", bodies=True)]
        assert [(json.loads(each.data or b"")["n"], each.sealed) for each in whole] == [(0, ""), (1, ""), (2, "")]
        assert [each.data for each in whole] == [
            got.data for each in listed if (got := await letters.get(topic, "g", each.id)) is not None
        ]
        (chosen,) = [each async for each in letters.select(topic, "g", dlq.Selection(where=n1))]
        assert chosen == whole[1]
        hits = (await broker.find("t", state="dead", group="g", where=["n=1"], bodies=True)).hits
        assert [(hit.data, hit.sealed) for hit in hits] == [(whole[1].data, "")]
        assert not (await broker.find("t", where=["n=1"])).hits
        store.is_away = True
        away = await letters.get(topic, "g", listed[1].id)
        assert away is not None
        assert away.sealed == listed[1].sealed
        assert [each.sealed for each in (await broker.find("t", bodies=True)).hits] == [each.sealed for each in listed]
        unread = Counter[str]()
        assert not [each async for each in letters.select(topic, "g", dlq.Selection(where=n1), unread=unread)]
        assert await letters.replay_selected(topic, "g", dlq.Selection(where=n1), unread=unread) == 0
        assert unread == {listed[1].sealed: 4}
        store.is_away = False
        calls, other = store.gets, dlq.Selection(key="another", where=n1)
        assert not [each async for each in letters.select(topic, "g", other)]
        assert store.gets == calls
        assert await letters.replay_selected(topic, "g", dlq.Selection(where=n1)) == 1
        assert {each.id for each in await letters_of(broker, "t", "g")} == {listed[0].id, listed[2].id}


async def test_a_worker_without_a_store_holds_the_message_whole(stored: MakeBroker, witness: Witness) -> None:
    """After the patience it is a dead letter, which a worker with the store can handle after a replay."""
    without = stored(offload=False, key_patience="0s")
    register(without, "message", witness.note)
    async with without, stored() as publisher:
        await publisher.topics.ensure("t", 1)
        await publisher.publish("t", large(1))
        async with without.running():
            await dies(without, "t", "g", 1)
        (letter,) = await letters_of(without, "t", "g")
        assert (letter.reason, letter.sealed) == ("no-key", "in the store of bodies (ref)")
        assert "offload=Offload(...)" in letter.error
    broker = stored()
    register(broker, "message", witness.note)
    async with broker:
        topic = await broker.topics.find("t")
        assert topic is not None
        assert await broker.dead_letters.replay(topic, "g") == 1
        async with broker.running():
            await witness.sees([1])


async def test_an_output_names_a_body_that_is_fresh(
    stored: MakeBroker, store: MemoryStore, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that runs for longer than a body may wait for its entry: it is put again, under another name."""
    broker = stored()
    seen = list[str]()

    @broker.handler("t", group="g", partitions=1)
    async def hand_on(payload: dict[str, Any], message: Message) -> None:
        ref = await message.publish("u", payload)
        assert ref.key is None
        seen.extend(store.names)
        if payload["n"] == 2:
            monkeypatch.setattr(body_module, "FRESH_SECONDS", -1.0)

    @broker.handler("u", group="g", partitions=1)
    async def take(payload: dict[str, Any]) -> None:
        monkeypatch.undo()
        witness.note(payload["n"])

    async with broker, broker.running():
        await broker.publish("t", large(1))
        await witness.sees([1])
        assert len(store.names) == 2
        await broker.publish("t", large(2))
        await witness.sees([1, 2])
        entries = await ask(broker, "XRANGE", broker.keys.stream("u", 0), "-", "+")
    names = [fields[-1].decode() for _, fields in entries]
    assert names[0] in seen, "the body of the first one was fresh"
    assert names[1] not in seen, "that of the second one was put again"


async def test_a_handler_that_cannot_reach_the_store_for_its_output_loses_no_attempt(
    stored: MakeBroker, store: MemoryStore, witness: Witness
) -> None:
    """What it publishes is large: it is tried again until the store is back."""
    broker = stored()

    @broker.handler("t", group="g", partitions=1, retry=RetryPolicy(max_attempts=1, wait=wait_fixed(0.02)))
    async def hand_on(payload: dict[str, Any], message: Message) -> None:
        witness.note(message.attempt)
        await message.publish("u", large(1))

    async with broker:
        store.is_away = True
        await broker.publish("t", {})
        async with broker.running():
            await until(lambda: len(witness.seen) >= 3, "it is tried again")
            store.is_away = False
            await settled(broker, "t")
        assert set(witness.seen) == {1}
        assert await letters_of(broker, "t", "g") == []
        assert len(store.names) == 1


def first_bytes(payload: dict[str, Any], message: Message) -> None:
    """A handler in a process of its own: it writes what it has got."""
    Path(payload["path"]).write_text(f"{len(payload['x'])} {len(message.data) > LARGE} {sorted(message.headers)}")


async def test_a_tick_of_a_schedule_may_be_large(stored: MakeBroker, store: MemoryStore, witness: Witness) -> None:
    """It waits for the store, and its body is there before its entry."""
    broker = stored(codecs=True)
    tried = list[int]()

    @broker.every("100ms", "t", missed="skip")
    def album() -> dict[str, Any]:
        tried.append(1)
        return large(1)

    @broker.handler("t", group="g", partitions=1)
    async def take(payload: dict[str, Any]) -> None:
        witness.note(payload["n"])

    store.is_away = True
    async with broker, broker.running():
        await until(lambda: tried, "a tick is tried")
        assert witness.seen == []
        store.is_away = False
        await until(lambda: witness.seen, "a tick is handled")
        entries = await ask(broker, "XRANGE", broker.keys.stream("t", 0), "-", "+")
    assert all(fields[-1].decode() in store.names for _, fields in entries)


@steady_connections
async def test_a_handler_in_another_process_gets_a_large_payload(stored: MakeBroker, tmp_path: Path) -> None:
    """Larger than any entry may be."""
    broker = stored(codecs=True)
    broker.handler("t", group="g", execution="process", partitions=1)(first_bytes)
    path = tmp_path / "seen"
    async with broker, broker.running():
        await broker.publish("t", {"path": str(path), "x": os.urandom(750_000).hex()}, headers={"mark": "x"})
        await settled(broker, "t")
    assert path.read_text() == "1500000 True ['mark']"


def test_a_program_without_an_event_loop_publishes_large_payloads(
    server_url: str, prefix: str, store: MemoryStore
) -> None:
    """SyncBroker, and `publish_sync` from a thread."""
    settings = Settings(url=server_url, prefix=prefix, preflight="warn")
    with SyncBroker(settings, offload=Offload(store, above="10kB")) as broker:
        broker.publish("t", large(1))
    other = Broker(settings, offload=Offload(store, above="10kB"))
    other.publish_sync("t", large(2))
    other._portal.close()
    assert len(store.names) == 2


async def test_a_device_gets_no_letter_that_is_larger_than_an_entry(stored: MakeBroker, store: MemoryStore) -> None:
    """The message becomes a dead letter that says so; a smaller one from the store is a letter."""
    broker = stored()
    broker.deliver("t", to=lambda _: "phone-1", partitions=1)
    async with broker, broker.running():
        await broker.publish("t", {"x": "x" * 2**20})
        await broker.publish("t", {"y": "y" * LARGE})
        await dies(broker, "t", "devices", 1)
        await settled(broker, "t")
        (letter,) = await letters_of(broker, "t", "devices")
        assert "more than a letter may have" in letter.error
        found = await broker.devices.peek("phone-1")
    assert [each.payload for each in found] == [{"y": "y" * LARGE}]


async def test_a_letter_is_encoded_as_its_message_is(stored: MakeBroker, store: MemoryStore) -> None:
    """Also that of a message whose body lies in the store; with `plain` it lies there as it was published."""
    broker, other = stored(codecs=True), stored(offload=False)
    broker.deliver("t", to=lambda found: found["to"], partitions=1)
    broker.deliver("t", to=lambda found: f"plain-{found['to']}", group="open", plain=True)
    sent = [{"to": "phone-1", "text": "ada"}, {"to": "phone-1", "text": os.urandom(LARGE).hex()}]
    async with broker, broker.running():
        for each in sent:
            await broker.publish("t", each, key="c-1")
        await broker.send("phone-1", "direct", topic="alerts")
        await until(lambda: peeked(broker, "phone-1", 3), "they are in the inbox")
        await until(lambda: peeked(broker, "plain-phone-1", 2), "they are in the other inbox")
        assert len(store.names) == 1
        async with other:
            plain = [each.payload for each in await other.devices.peek("plain-phone-1")]
            sealed = await other.devices.peek("phone-1")
            assert plain == sent
            assert {each.sealed for each in sealed} == {"encrypted (k1)"}
            assert sorted(each.topic for each in sealed) == ["alerts", "t", "t"]
            with pytest.raises(CannotDecode, match="key k1"):
                await first_payload(other, "phone-1")
        async with broker.connect("phone-1") as session:
            found = [(await anext(session)).payload for _ in range(3)]
        assert [each for each in found if each != "direct"] == sent
        assert "direct" in found


async def first_payload(broker: Broker, device: str) -> Any:
    """The payload of the first letter of a device, acknowledged when the block ends without an error."""
    async with broker.connect(device, auto_ack=True) as session:
        return (await anext(session)).payload


async def peeked(broker: Broker, device: str, count: int) -> bool:
    """Whether a device has so many letters."""
    return len(await broker.devices.peek(device)) == count
