"""Messages whose payload is compressed and encrypted: what readers get, and what waits for a key."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import pytest

from rsmq import Broker, Message, RetryPolicy, Settings
from rsmq.broker.requests import read_reply, reply_id
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.errors import Malformed, TooLarge
from rsmq.model.encoding import Binding
from rsmq.producer.batch import EntryEncoder
from tests.contract.witness import Witness, add, ask, dies, letters_of, settled
from tests.patience import until

KEYS = {name: bytes([number]) * 32 for number, name in enumerate(("k1", "k2", "k3"), 1)}
LONG = {"to": "+82 10 1234 5678", "text": "hello " * 400}

MakeCoded = Callable[..., Broker]


@pytest.fixture
def coded(server_url: str, prefix: str) -> MakeCoded:
    """A broker with these keys, the first to write with; without any, with no codecs."""

    def make(*names: str, required: bool = False, **overrides: Any) -> Broker:
        settings = Settings(url=server_url, prefix=prefix, preflight="warn", **overrides)
        if not names:
            return Broker(settings)
        keyring = Keyring({name: KEYS[name] for name in names})
        return Broker(settings, codecs=[Zstd(), Encrypt(keyring, required=required)])

    return make


def register(broker: Broker, form: str, note: Callable[[Any], None], ordering: str = "key") -> None:
    """One handler, in one of the forms in which a payload reaches a function."""
    options: Any = {"group": "g", "partitions": 1, "ordering": ordering}
    if form == "payload":

        @broker.handler("t", **options)
        async def take(payload: dict[str, Any]) -> None:
            note(payload["n"])
    elif form == "message":

        @broker.handler("t", **options)
        async def take_message(message: Message, payload: dict[str, Any]) -> None:
            await anyio.lowlevel.checkpoint()
            assert not message.headers.keys() - {"mark"}
            assert b'"n":' in message.data
            note(payload["n"])
    elif form == "thread":

        @broker.handler("t", **options)
        def take_in_thread(payload: dict[str, Any]) -> None:
            note(payload["n"])
    elif form == "batch":

        @broker.handler("t", batch=5, **options)
        async def take_batch(messages: list[Message], payloads: list[dict[str, Any]]) -> None:
            for message, payload in zip(messages, payloads, strict=True):
                assert b'"n":' in message.data
                note(payload["n"])
    else:

        @broker.handler("t", batch=5, **options)
        async def take_payloads(payloads: list[dict[str, Any]]) -> None:
            for payload in payloads:
                note(payload["n"])


FORMS = ("payload", "message", "thread", "batch", "payloads")


@pytest.mark.parametrize("form", FORMS)
async def test_a_handler_gets_what_was_published_and_the_server_stores_ciphertext(
    coded: MakeCoded, witness: Witness, form: str
) -> None:
    """In each form of a handler, for small, large, keyed and headed messages, beside plain ones of other clients."""
    broker = coded("k1")
    register(broker, form, witness.note)
    async with broker:
        await broker.publish("t", {"n": 0})
        await broker.publish("t", {"n": 1, **LONG}, key="a", headers={"mark": "x"})
        await broker.publish_many("t", [{"n": 2}, {"n": 3, **LONG}], key=lambda _: "a")
        await broker.publish("t", {"n": 4}, delay="10ms")
        stream = broker.keys.stream("t", 0)
        entries = await ask(broker, "XRANGE", stream, "-", "+")
        await add(broker, stream, "data", '{"n":5}')
        async with broker.running():
            await witness.sees(range(6))
            await settled(broker, "t")
    assert len(entries) == 4
    for _, fields in entries:
        named = dict(zip(fields[::2], fields[1::2], strict=True))
        assert named[b"enc"] in (b"a256gcm=k1", b"zstd;a256gcm=k1")
        assert b"1234 5678" not in named[b"data"]
    assert sum(b"zstd;a256gcm=k1" in fields for _, fields in entries) == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_a_message_without_its_key_waits_and_others_go_on(
    coded: MakeCoded, witness: Witness, form: str, ordering: str
) -> None:
    """It counts no attempt, keeps the order of its key, and is handled by a worker that has the key."""
    async with coded("k2") as other:
        await other.topics.ensure("t", 1)
        for n in range(3):
            await other.publish("t", {"n": n}, key="a")
    broker, seen = coded("k1"), list[int]()
    register(broker, form, seen.append, ordering)
    async with broker:
        await broker.publish("t", {"n": 10}, key="a")
        await broker.publish("t", {"n": 11}, key="b")
        async with broker.running():
            apart = [10, 11] if ordering == "none" else [11]
            await until(lambda: sorted(seen) == apart, "the others are handled")
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            await until(lambda: "key k2" in consumer.missing_keys, "the member says what it misses")
            assert consumer.stats["buried"] == consumer.stats["retried"] == 0
    both = coded("k1", "k2")
    register(both, form, seen.append, ordering)
    async with both, both.running():
        await until(lambda: len(seen) == 5, "the key has come")
        await settled(both, "t")
        assert await letters_of(both, "t", "g") == []
    if ordering == "key":
        assert [n for n in seen if n != 11] == [0, 1, 2, 10]
    assert sorted(seen) == [0, 1, 2, 10, 11]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("enc", ["a256gcm=gone", "br", "zstd;future"])
async def test_a_message_that_nobody_can_decode_becomes_a_dead_letter_that_can_be_replayed(
    coded: MakeCoded, witness: Witness, form: str, enc: str
) -> None:
    """After the patience, whole, as `no-key`: it cannot stop retention for ever."""
    broker = coded("k1", key_patience="0s")
    register(broker, form, witness.note)
    async with broker:
        await broker.topics.ensure("t", 1)
        stream = broker.keys.stream("t", 0)
        await add(broker, stream, "data", b"\x01" * 40, "id", "m1", "key", "a", "enc", enc)
        await broker.publish("t", {"n": 1}, key="a")
        async with broker.running():
            await witness.sees([1])
            assert [reason for reason, _ in await dies(broker, "t", "g", 1)] == ["no-key"]
            (letter,) = await letters_of(broker, "t", "g")
            assert (letter.data, letter.attempts) == (b"\x01" * 40, 1)
            assert dict(letter.fields)[b"enc"] == enc.encode()
            await settled(broker, "t")


async def test_a_reader_without_codecs_holds_what_is_encoded(coded: MakeCoded, witness: Witness) -> None:
    """A rolled back worker loses nothing: the messages wait for the next version."""
    async with coded("k1") as publisher:
        await publisher.topics.ensure("t", 1)
        await publisher.publish("t", {"n": 0})
    broker = coded()
    register(broker, "payload", witness.note)
    async with broker, broker.running():
        await broker.publish("t", {"n": 1})
        await witness.sees([1])
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        await until(lambda: "key k1" in consumer.missing_keys, "it waits")
        assert await letters_of(broker, "t", "g") == []
    later = coded("k1")
    register(later, "payload", witness.note)
    async with later, later.running():
        await witness.sees([0, 1])


@pytest.mark.parametrize("form", FORMS)
async def test_a_plain_message_is_malformed_where_encryption_is_required(
    coded: MakeCoded, witness: Witness, form: str
) -> None:
    """A client without keys cannot slip one in by XADD: neither plain, nor with headers, nor only compressed."""
    broker = coded("k1", required=True)
    register(broker, form, witness.note)
    async with broker:
        await broker.topics.ensure("t", 1)
        stream = broker.keys.stream("t", 0)
        await add(broker, stream, "data", '{"n":1}')
        await add(broker, stream, "data", '{"n":2}', "id", "m2", "h", '{"mark":"x"}')
        packed = Zstd(above=0).shrink(b'{"n":33333333333333333333333333333333333333333333333333333333333333333333}')
        await add(broker, stream, "data", packed, "id", "m3", "enc", "zstd")
        await broker.publish("t", {"n": 4})
        async with broker.running():
            await witness.sees([4])
            assert [reason for reason, _ in await dies(broker, "t", "g", 3)] == ["malformed"] * 3
    assert witness.seen == [4]


async def test_a_sealed_payload_belongs_to_its_message(coded: MakeCoded, witness: Witness) -> None:
    """Under another id, another key, another type or another `enc` it does not decrypt, and is malformed."""
    broker = coded("k1")
    register(broker, "payload", witness.note)
    async with broker:
        await broker.publish("t", {"n": 0}, key="a")
        stream = broker.keys.stream("t", 0)
        ((_, fields),) = await ask(broker, "XRANGE", stream, "-", "+")
        real = dict(zip(fields[::2], fields[1::2], strict=True))
        changed = real[b"data"][:-1] + bytes([real[b"data"][-1] ^ 1])
        forged: list[dict[bytes, bytes]] = [
            {**real, b"id": b"other"}, {**real, b"key": b"b"}, {**real, b"type": b"text/plain"},
            {**real, b"enc": b"a256gcm=k1;a256gcm=k1"}, {**real, b"data": changed},
            {name: value for name, value in real.items() if name != b"key"},
            {name: value for name, value in real.items() if name != b"id"}, {**real, b"data": b"short"},
        ]  # fmt: skip
        for each in forged:
            await add(broker, stream, *[part for pair in each.items() for part in pair])
        async with broker.running():
            await witness.sees([0])
            reasons = [reason for reason, _ in await dies(broker, "t", "g", len(forged))]
    assert reasons == ["malformed"] * len(forged)
    assert witness.seen == [0]


async def test_the_same_message_has_the_same_bytes(coded: MakeCoded) -> None:
    """`is_same` tells a repetition from another payload, also when both are compressed and encrypted."""
    async with coded("k1") as broker:
        is_first = None if broker.client.is_cluster else True  # a cluster cannot say that no key has this id
        first = await broker.publish("t", {"n": 0, **LONG}, message_id="m1", key="a")
        again = await broker.publish("t", {"n": 0, **LONG}, message_id="m1", key="a")
        other = await broker.publish("t", {"n": 1, **LONG}, message_id="m1", key="a")
    assert [each.is_new for each in (first, again, other)] == [is_first, False, False]
    assert [each.is_same for each in (again, other)] == [True, False]


async def test_keys_are_rotated_while_messages_flow(coded: MakeCoded, witness: Witness) -> None:
    """Three keys, one after the other: the new one is given to all first, then written with, then the old one goes."""
    steps = [("k1",), ("k1", "k2"), ("k2", "k1"), ("k2", "k3"), ("k3", "k2"), ("k3",)]
    published, count = 0, 25
    async with coded("k1") as first:
        await first.topics.ensure("t", 1)
    for names in steps:
        broker = coded(*names)
        register(broker, "payload", witness.note)
        async with broker, broker.running():
            for n in range(published, published + count):
                await broker.publish("t", {"n": n}, key=str(n % 3))
            published += count
            await witness.sees(range(published))
            await settled(broker, "t")
    assert [n % 3 for n in witness.seen].count(0) == published // 3
    for key in range(3):
        assert [n for n in witness.seen if n % 3 == key] == list(range(key, published, 3))
    async with coded("k3") as last:
        entries = await ask(last, "XRANGE", last.keys.stream("t", 0), "-", "+")
        assert {fields[-1] for _, fields in entries} == {b"a256gcm=k1", b"a256gcm=k2", b"a256gcm=k3"}


async def test_what_a_handler_hands_on_is_encrypted_anew(coded: MakeCoded, witness: Witness) -> None:
    """An output, and a message that goes to its fallback topic, have other ids, so they are sealed for those."""
    broker = coded("k1")

    @broker.handler("first", group="g", partitions=1, fallback="second", retry=RetryPolicy(max_attempts=1))
    async def fail(payload: dict[str, Any], message: Message) -> None:
        await broker.publish("outputs", {"of": payload["n"]}, headers={"by": message.id})
        raise ValueError("no")

    @broker.handler("second", group="g", partitions=1)
    async def take(payload: dict[str, Any], message: Message) -> None:
        await message.publish("third", {"n": payload["n"] + 1}, key="a")

    @broker.handler("third", group="g", partitions=1)
    async def note(payload: dict[str, Any]) -> None:
        witness.note(payload["n"])

    async with broker, broker.running():
        await broker.publish("first", {"n": 1, **LONG})
        await witness.sees([2])
        await settled(broker, "third")
        for topic in ("first", "second", "third"):
            ((_, fields),) = await ask(broker, "XRANGE", broker.keys.stream(topic, 0), "-", "+")
            assert b"a256gcm=k1" in fields[fields.index(b"enc") + 1], topic
            assert b'"n"' not in fields[1]


async def test_an_answer_is_encrypted_for_its_request(coded: MakeCoded) -> None:
    """The caller reads it; in the server it is ciphertext, and under the id of another request it is malformed."""
    broker, stored = coded("k1"), list[bytes]()

    @broker.handler("ask", group="g", partitions=1, replies=True)
    async def answer(payload: dict[str, Any]) -> dict[str, str]:
        return {"card": "4111-1111"}

    async def look(*command: Any) -> Any:
        reply = await real(*command)
        if command[0] == "GET" and isinstance(reply, bytes):
            stored.append(reply)
        return reply

    async with broker, broker.running():
        real = broker.client.execute_command
        broker.client.execute_command = look  # type: ignore[method-assign]
        found = await broker.request("ask", {"n": 1}, timeout="30s", returns=dict[str, str])
        assert found == {"card": "4111-1111"}
        head, _, data = stored[-1].partition(b"\n")
        assert json.loads(head)["enc"] == "a256gcm=k1"
        assert b"4111" not in data
        with pytest.raises(Malformed, match="does not decrypt"):
            read_reply(stored[-1], "ask", "m", None, lambda *about: opened(broker, *about))


def opened(broker: Broker, data: bytes, kind: str, enc: str) -> bytes:
    """An answer, taken for that of another request."""
    return broker.encoding.undo(data, Binding(reply_id("another").encode(), None, kind.encode(), enc.encode()))


async def test_what_a_gateway_queues_is_encrypted(coded: MakeCoded, witness: Witness) -> None:
    """Several payloads of one client in one call, and one with an id of its own, in their order."""
    broker = coded("k1")
    register(broker, "payload", witness.note)

    async with broker, broker.running():
        producer = broker._connection.producer
        target = await broker.topics.existing("t")
        encoder = EntryEncoder("client-1", "application/json", {"mark": "x"})
        waiters = [asyncio.get_running_loop().create_future() for _ in range(2)]
        many = Together(waiters[0], 3)
        producer.enqueue(target, [b'{"n":1}', b'{"n":2}', b'{"n":3}'], many, encoder)
        producer.enqueue(target, [b'{"n":4}'], waiters[1], encoder, "m-4")
        await asyncio.gather(*waiters)
        await witness.sees([1, 2, 3, 4])
        entries = await ask(broker, "XRANGE", broker.keys.stream("t", 0), "-", "+")
        with pytest.raises(TooLarge):
            producer.enqueue(target, [os.urandom(300 << 10)], waiters[1], encoder)
    assert witness.seen == [1, 2, 3, 4]
    assert [dict(zip(fields[::2], fields[1::2], strict=True))[b"enc"] for _, fields in entries] == [b"a256gcm=k1"] * 4


class Together:
    """Waits for several messages, as a connection of a gateway does."""

    def __init__(self, done: asyncio.Future[None], count: int) -> None:
        self._done = done
        self._left = count

    def done(self) -> bool:
        """Whether all are stored."""
        return self._done.done()

    def set_result(self, result: None) -> None:
        """One more is stored."""
        self._left -= 1
        if not self._left:
            self._done.set_result(result)

    def set_exception(self, exception: Exception) -> None:
        """One is not."""
        self._done.set_exception(exception)
