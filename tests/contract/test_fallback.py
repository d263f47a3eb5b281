"""`fallback=`: what has failed for good is settled and stored in another topic in one step, without a dead letter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from pydantic_core import from_json, to_json
from tenacity import wait_fixed

from rsmq import (
    Broker,
    BrokerUnavailable,
    Burial,
    Concurrency,
    ConfigError,
    Fallback,
    Message,
    Reject,
    RetryPolicy,
    Router,
)
from rsmq.consumer.settling.settler import Settler
from rsmq.model.message import MessageOrigin, becomes_dead
from rsmq.redis.scripts import SETTLE_OUTPUTS
from tests.contract.witness import PATIENCE, Witness, add, ask, dies, letters_of, settled
from tests.matrix.way import one_server, steady_connections
from tests.patience import until

TWICE = RetryPolicy(max_attempts=2, wait=wait_fixed(0.01))
ONCE = RetryPolicy(max_attempts=1)
FAR = datetime(2099, 1, 1, tzinfo=UTC)


@dataclass
class Push:
    """A notification for an app."""

    text: str


@dataclass
class Sms:
    """The same for a phone number."""

    line: str


async def stored(broker: Broker, name: str) -> list[Message]:
    """The messages of a topic, without their group."""
    topic = await broker.topics.existing(name)
    found = []
    for number in topic.numbers:
        for entry_id, fields in await ask(broker, "XRANGE", broker.keys.stream(name, number), "-", "+"):
            found.append(Message(MessageOrigin(name, number, ""), entry_id, fields))
    return sorted(found, key=lambda message: message.data)


def failing(broker: Broker, form: str, **options: Any) -> None:
    """A handler of `push` that fails for all but the payload 0, and rejects 2."""

    def outcome(message: Message) -> Exception | None:
        if message.data == b'{"n":0}':
            return None
        return Reject("no device") if message.data == b'{"n":2}' else ValueError("provider down")

    if form == "batch":

        @broker.handler("push", group="sender", retry=TWICE, batch=5, **options)
        async def send_many(messages: list[Message]) -> list[Exception | None]:
            return [outcome(message) for message in messages]

        return

    ways: dict[str, Any] = {"key": {}, "none": {"ordering": "none"}, "shared": {"distribution": "shared"}}

    @broker.handler("push", group="sender", retry=TWICE, **ways[form], **options)
    async def send(message: Message) -> None:
        await message.publish("lost", "an attempt that fails publishes nothing")
        if (error := outcome(message)) is not None:
            raise error


@steady_connections
@pytest.mark.parametrize("form", ["key", "none", "batch", "shared"])
async def test_a_message_that_failed_for_good_is_handed_on(broker: Broker, witness: Witness, form: str) -> None:
    """Its bytes, type, key, headers and expiry go along under a new id; there is no dead letter, and no `on_dead`."""
    failing(broker, form, fallback="sms")

    @broker.on_dead("push", group="sender")
    async def bury(message: Message, burial: Burial) -> None:
        witness.note("on_dead")

    @broker.handler("sms", group="sender")
    async def send_sms(message: Message) -> None:
        witness.note((message.data, message.type, message.key, message.headers["fallback.reason"]))

    async with broker.running():
        refs = [
            await broker.publish("push", {"n": n}, key="ada", headers={"from": "test"}, expires=FAR, on_expiry="dead")
            for n in range(3)
        ]
        text = await broker.publish("push", "plain text", key="ada")
        expected = [
            (b'{"n":1}', "application/json", "ada", "failed"),
            (b'{"n":2}', "application/json", "ada", "rejected"),
            (b"plain text", "text/plain", "ada", "failed"),
        ]
        await witness.sees(expected)
        await settled(broker, "push")
        await settled(broker, "sms")
        assert not await letters_of(broker, "push", "sender")
        three, one, two = await stored(broker, "sms")
        assert one.headers == {
            "from": "test", "fallback.id": refs[1], "fallback.from": "push", "fallback.reason": "failed",
            "fallback.error": "ValueError: provider down", "fallback.attempts": "2", "fallback.path": "push",
        }  # fmt: skip
        assert two.headers["fallback.error"] == "no device"
        assert two.headers["fallback.attempts"] == "1"
        assert three.headers["fallback.id"] == text
        assert len({one.id, two.id, three.id, *refs, text}) == 7
        assert one.expires == FAR
        assert becomes_dead(one)
        assert three.expires is None
        assert broker.worker is not None
        stats = broker.worker.consumers[0].stats
        assert (stats["handed_on"], stats["settled"], stats["buried"]) == (3, 1, 0)
        status = (await broker.look(refs[1])).group("sender")
        assert status is not None
        assert (status.state, status.to_topic, status.to_id, status.attempt) == ("handed_on", "sms", one.id, 2)
        assert status.text == f"failed after 2 attempts, handed on to the fallback topic sms as {one.id}"
    assert len(witness.seen) == 3


async def test_three_channels_are_three_handlers_and_two_words(broker: Broker, witness: Witness) -> None:
    """The headers name the first message and the way; the last channel has a dead letter."""

    def channel(name: str, fallback: str | None) -> None:
        @broker.handler(name, group="sender", retry=ONCE, fallback=fallback)
        async def send(message: Message) -> None:
            witness.note((name, message.headers.get("fallback.path"), message.headers.get("fallback.id")))
            raise OSError(f"no {name}")

    channel("push", "sms")
    channel("sms", "alimtalk")
    channel("alimtalk", None)
    async with broker.running():
        first = await broker.publish("push", "your gate has changed", key="ada")
        await dies(broker, "alimtalk", "sender", 1)
        (letter,) = await letters_of(broker, "alimtalk", "sender")
        assert letter.headers["fallback.path"] == "push sms"
        assert letter.headers["fallback.id"] == first
        assert letter.headers["fallback.error"] == "OSError: no sms"
        assert (letter.reason, letter.data) == ("failed", b"your gate has changed")
    assert witness.seen == [("push", None, None), ("sms", "push", first), ("alimtalk", "push sms", first)]


async def test_a_call_that_takes_too_long_is_handed_on(broker: Broker) -> None:
    """As `timeout`."""

    @broker.handler("push", group="sender", retry=ONCE, timeout=0.05, fallback="sms")
    async def send(_: Message) -> None:
        await anyio.sleep_forever()

    async with broker.running():
        await broker.publish("push", 1)
        await settled(broker, "push")
        (one,) = await stored(broker, "sms")
        assert one.headers["fallback.reason"] == "timeout"


@steady_connections
@one_server
@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_what_killed_its_workers_is_handed_on(broker: Broker, distribution: Any) -> None:
    """Found pending after too many starts, it goes on as `crashed`; its handler does not run."""

    @broker.handler("push", group="sender", partitions=1, retry=TWICE, distribution=distribution, fallback="sms")
    async def send(_: Message) -> None:
        raise AssertionError("it does not start")

    stream = broker.keys.stream("push", 0)
    async with broker:
        await broker.topics.ensure("push", 1)
        await broker.publish("push", 1, key="ada")
        await ask(broker, "XGROUP", "CREATE", stream, "sender", "0")
        ((_, ((entry_id, _),)),) = await ask(broker, "XREADGROUP", "GROUP", "sender", "killed", "STREAMS", stream, ">")
        await ask(broker, "XCLAIM", stream, "sender", "killed", 0, entry_id, "RETRYCOUNT", 3, "IDLE", 10**7)
    async with broker.running():
        await settled(broker, "push")
        (one,) = await stored(broker, "sms")
        assert (one.headers["fallback.reason"], one.headers["fallback.attempts"]) == ("crashed", "3")
        assert not await letters_of(broker, "push", "sender")


async def test_what_cannot_be_read_or_has_expired_becomes_a_dead_letter(broker: Broker) -> None:
    """The other channel could not read it either, and would be too late."""

    @broker.handler("push", group="sender", retry=ONCE, fallback="sms")
    async def send(_: Push) -> None:
        raise AssertionError("it does not start")

    async with broker:
        await broker.publish("push", {"no": "text"}, key="ada")
        await broker.publish("push", Push("late"), key="bob", expires=timedelta(milliseconds=1), on_expiry="dead")
        await anyio.sleep(0.01)
    async with broker.running():
        letters = await dies(broker, "push", "sender", 2)
        assert {reason for reason, _ in letters} == {"malformed", "expired"}
        assert await broker.topics.find("sms") is None


async def test_a_cancelled_message_is_not_handed_on(broker: Broker, witness: Witness) -> None:
    """It ends as cancelled, although its last attempt fails."""
    goes_on = anyio.Event()

    @broker.handler("push", group="sender", retry=ONCE, fallback="sms")
    async def send(_: Message) -> None:
        witness.note("started")
        await goes_on.wait()
        raise OSError("no provider")

    async with broker.running():
        ref = await broker.publish("push", 1, key="ada")
        await witness.sees(["started"])
        await broker.cancel(ref)
        goes_on.set()
        await settled(broker, "push")
        status = (await broker.look(ref)).group("sender")
        assert status is not None
        assert status.state == "cancelled"
        assert await broker.topics.find("sms") is None


async def test_a_circle_over_two_services_ends_in_a_dead_letter(make_broker: Callable[..., Broker]) -> None:
    """Neither of them sees the other's fallback when it registers its own."""
    first, second, calls = make_broker(), make_broker(), list[str]()

    def channel(broker: Broker, own: str, other: str) -> None:
        @broker.handler(own, group="sender", retry=ONCE, fallback=other)
        async def send(_: Message) -> None:
            calls.append(own)
            raise Reject("no device")

    channel(first, "push", "sms")
    channel(second, "sms", "push")
    async with first.running(), second.running():
        await first.publish("push", 1, key="ada")
        await dies(first, "sms", "sender", 1)
        (letter,) = await letters_of(first, "sms", "sender")
        assert letter.reason == "rejected"
        assert "it has failed there before: push -> sms -> push" in letter.error
    assert calls == ["push", "sms"]


async def test_a_payload_is_made_anew_and_an_error_in_that_makes_a_dead_letter(broker: Broker) -> None:
    """By a function of the message, plain or async."""
    sms = broker.topic("sms", Sms)

    async def to_sms(message: Message) -> Any:
        if message.payload.text == "too late":
            raise LookupError("no phone number")
        return "no Sms" if message.payload.text == "wrong" else Sms(f"{message.key}: {message.payload.text}")

    @broker.topic("push", Push).handler(group="sender", retry=ONCE, fallback=Fallback(sms, payload=to_sms))
    async def send(push: Push) -> None:
        push.text = "changed by the handler"
        raise Reject("no device")

    async with broker.running():
        for text in ("hello", "too late", "wrong"):
            await broker.publish("push", Push(text), key="ada")
        await dies(broker, "push", "sender", 2)
        await settled(broker, "push")
        late, wrong = await letters_of(broker, "push", "sender")
        assert late.reason == "rejected"
        assert late.error == ("no device (it could not go to the fallback topic 'sms': LookupError: no phone number)")
        assert "has payloads of Sms, not str" in wrong.error
        (one,) = await stored(broker, "sms")
        assert (one.data, one.key) == (b'{"line":"ada: hello"}', "ada")


@pytest.mark.parametrize("way", ["bytes", "payload", "batch"])
async def test_headers_of_any_publisher_leave_room_for_those_of_a_fallback(broker: Broker, way: str) -> None:
    """They are added to the largest headers that publish takes. Before, the message became a dead letter instead, and
    no other channel had it."""
    longest = "\x01" * 2000  # six bytes each, in JSON

    if way == "batch":

        @broker.handler("push", group="sender", batch=2, fallback="sms")
        async def send_many(messages: list[Message]) -> list[Exception]:
            return [Reject(longest) for _ in messages]
    else:
        fallback = Fallback("sms", payload=lambda message: message.payload) if way == "payload" else "sms"

        @broker.handler("push", group="sender", fallback=fallback)
        async def send(_: Any) -> None:
            raise Reject(longest)

    taken = 0
    async with broker.running():
        for size in (32 << 10, 24 << 10):
            with suppress(ConfigError):
                await broker.publish("push", 1, headers={"a": "x" * (size - 8)}, message_id="\N{GRINNING FACE}" * 256)
                taken = taken or size
        await settled(broker, "push")
        assert not await letters_of(broker, "push", "sender")
        (one,) = await stored(broker, "sms")
        assert len(one.headers["a"]) == taken - 8
        assert len(one.headers["fallback.error"]) == 1000


async def test_headers_without_room_for_those_of_a_fallback_make_a_dead_letter_that_says_so(broker: Broker) -> None:
    """Those of a client that uses all that a reader takes. A replay is possible, and nothing stands still."""

    @broker.handler("push", group="sender", fallback="sms")
    async def send(_: Any) -> None:
        raise Reject("no device" * 200)

    async with broker.running():
        headers = to_json({"a": "x" * ((32 << 10) - 8)})
        await add(broker, broker.keys.stream("push", 0), "data", "1", "h", headers)
        await dies(broker, "push", "sender", 1)
        await settled(broker, "push")
        (letter,) = await letters_of(broker, "push", "sender")
        assert letter.reason == "rejected"
        assert letter.error.startswith("no device")
        assert " (it could not go to the fallback topic 'sms': ConfigError: the headers have" in letter.error
        assert len(letter.error) == 1000
        assert letter.headers == from_json(headers)


async def test_before_publish_completes_or_refuses_what_is_handed_on(broker: Broker) -> None:
    """A message that it refuses becomes a dead letter."""

    @broker.before_publish
    def check(publication: Any) -> None:
        publication.headers["tenant"] = "acme"
        if publication.topic == "sms" and publication.payload == 2:
            raise ValueError("no SMS to this number")

    @broker.handler("push", group="sender", retry=ONCE, fallback="sms")
    async def send(_: int) -> None:
        raise Reject("no device")

    async with broker.running():
        for number in (1, 2):
            await broker.publish("push", number)
        await dies(broker, "push", "sender", 1)
        await settled(broker, "push")
        (letter,) = await letters_of(broker, "push", "sender")
        assert "no SMS to this number" in letter.error
        (one,) = await stored(broker, "sms")
        assert (one.data, one.headers["tenant"]) == (b"1", "acme")


async def test_the_band_goes_along_where_the_other_topic_has_it(broker: Broker) -> None:
    """Else the message goes to `normal`."""
    broker.topic("push", str, bands=("urgent", "normal", "bulk"))
    broker.topic("sms", str, bands=("urgent", "normal"))

    @broker.handler("push", group="sender", partitions=2, retry=ONCE, fallback="sms")
    async def send(_: Message) -> None:
        raise Reject("no device")

    async with broker.running():
        for band in ("urgent", "normal", "bulk"):
            await broker.publish("push", band, key="ada", band=band)
        await settled(broker, "push")
        layout = (await broker.topics.existing("sms")).layout
        bands = {message.data: layout.band_of(message.partition) for message in await stored(broker, "sms")}
        assert bands == {b"urgent": "urgent", b"normal": "normal", b"bulk": "normal"}


@steady_connections
@one_server
async def test_a_full_fallback_topic_holds_back_the_settlement(broker: Broker, witness: Witness) -> None:
    """Nothing is lost, the handler does not run again, and it goes on when there is room."""

    @broker.handler("push", group="sender", partitions=1, retry=ONCE, fallback="sms")
    async def send(_: Message) -> None:
        witness.note("push")
        raise Reject("no device")

    async with broker:
        await broker.topics.ensure("sms", 1)
        await broker.topics.change("sms", max_length=1)
        await broker.publish("sms", 0)
        await ask(broker, "XGROUP", "CREATE", broker.keys.stream("sms", 0), "later", "0")
    async with broker.running():
        await broker.publish("push", 1)
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        await until(lambda: any(lane.outgoing.is_full for lane in consumer.lanes.values()), "its target is full")
        stream = broker.keys.stream("push", 0)
        assert (await ask(broker, "XPENDING", stream, "sender"))[0] == 1
        await broker.topics.change("sms", max_length=10)
        await settled(broker, "push")
        assert [message.data for message in await stored(broker, "sms")] == [b"0", b"1"]
    assert witness.seen == ["push"]


@pytest.mark.parametrize("form", ["single", "batch", "retry in a batch", "digest", "permit", "whole partition"])
async def test_next_message_of_a_key_waits_until_the_one_before_is_handed_on(
    broker: Broker, witness: Witness, monkeypatch: Any, form: str
) -> None:
    """If the worker died before the server knows of it, the first one would start again after the second. Other keys
    go on, also with one slot; only a batch with a message to retry behind it keeps its slot."""
    asked, is_asked, may_go_on = Settler.ask, anyio.Event(), anyio.Event()

    async def late(self: Settler, script: Any, *command: Any) -> Any:
        if script is SETTLE_OUTPUTS:
            is_asked.set()
            await may_go_on.wait()
        return await asked(self, script, *command)

    def outcome(message: Message) -> Exception | None:
        witness.note((message.key, message.data.decode(), message.attempt))
        if message.data == b"0":
            return Reject("no device")
        is_tried_again = form == "retry in a batch" and message.data == b"1" and message.attempt == 1
        return ValueError("once") if is_tried_again else None

    slots = 2 if form == "retry in a batch" else 1
    if form == "digest":

        @broker.handler("push", group="sender", partitions=1, retry=TWICE, fallback="sms", batch=1, by="key")
        async def send_digest(messages: list[Message]) -> None:
            for error in filter(None, [outcome(message) for message in messages]):
                raise error

    elif "batch" in form:

        @broker.handler("push", group="sender", partitions=1, retry=TWICE, fallback="sms", batch=2, concurrency=slots)
        async def send_many(messages: list[Message]) -> list[Exception | None]:
            return [outcome(message) for message in messages]

    else:
        more: dict[str, Any] = {"ordering": "partition"} if form == "whole partition" else {}
        if form == "permit":
            more["group_concurrency"] = Concurrency(1, by=lambda message: message.topic)

        @broker.handler("push", group="sender", partitions=1, retry=TWICE, fallback="sms", concurrency=1, **more)
        async def send(message: Message) -> None:
            if (error := outcome(message)) is not None:
                raise error

    monkeypatch.setattr(Settler, "ask", late)
    async with broker:
        await broker.publish_many("push", [0, 1, 2], key=lambda _: "ada")
    async with broker.running():
        with anyio.fail_after(PATIENCE):
            await is_asked.wait()
        for number in range(3):
            await broker.publish("push", number + 10, key="linus")
        if form != "whole partition":
            await witness.sees([("linus", str(number + 10), 1) for number in range(3)])
        of_ada = [(number, attempt) for key, number, attempt in witness.seen if key == "ada"]
        in_one_call = "batch" in form
        assert of_ada == ([("0", 1), ("1", 1)] if in_one_call else [("0", 1)])
        stream = broker.keys.stream("push", 0)
        pending = await ask(broker, "XPENDING", stream, "sender", "-", "+", 3)
        entries = await ask(broker, "XRANGE", stream, "-", "+", "COUNT", 2)
        assert [row[0] for row in pending[:2]] == [entry_id for entry_id, _ in entries], "1 is not settled before 0"
        may_go_on.set()
        await settled(broker, "push")
    of_ada = [(number, attempt) for key, number, attempt in witness.seen if key == "ada"]
    assert of_ada[-1] == ("2", 1)
    assert [number for number, _ in of_ada] == (["0", "1", "1", "2"] if form.startswith("retry") else ["0", "1", "2"])


@one_server
async def test_a_lost_reply_hands_on_once(broker: Broker, monkeypatch: Any) -> None:
    """The call is sent again."""
    failing(broker, "key", fallback="sms")
    asked, lost = Settler.ask, list[Any]()

    async def lossy(self: Settler, script: Any, *command: Any) -> Any:
        reply = await asked(self, script, *command)
        if script is SETTLE_OUTPUTS and not lost:
            lost.append(reply)
            raise BrokerUnavailable("the reply is lost")
        return reply

    monkeypatch.setattr(Settler, "ask", lossy)
    async with broker.running():
        await broker.publish("push", {"n": 2}, key="ada")
        await settled(broker, "push")
        assert lost
        assert len(await stored(broker, "sms")) == 1


async def test_wrong_fallbacks_are_refused_where_they_are_written(broker: Broker) -> None:
    """Each error says what to write."""

    async def send(message: Message) -> None: ...

    def registered(on: Any = broker, topic: str = "push", **options: Any) -> None:
        on.handler(topic, group="sender", **options)(send)

    sms, push = broker.topic("sms", Sms), broker.topic("push", Push)
    with pytest.raises(ConfigError, match="replies=True answers the caller"):
        registered(fallback="sms", replies=True)
    with pytest.raises(ConfigError, match="fallback=5 is no topic"):
        registered(fallback=5)
    with pytest.raises(ConfigError, match="topic name 'no topic' is not allowed"):
        registered(fallback="no topic")
    with pytest.raises(ConfigError, match="cannot be called with a message"):
        registered(fallback=Fallback("sms", payload=lambda: 1))  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigError, match="group"):
        registered(fallback=Fallback("sms", group="no group"))
    with pytest.raises(ConfigError, match="are of another type: write fallback=Fallback"):
        push.handler(group="sender", fallback=sms)(send)
    with pytest.raises(ConfigError, match="push -> push"):
        registered(fallback="push")
    registered(fallback="sms")
    registered(topic="sms", fallback="alimtalk")
    with pytest.raises(ConfigError, match="alimtalk -> push -> sms -> alimtalk"):
        registered(topic="alimtalk", fallback="push")
    router = Router(prefix="ali")
    registered(router, topic="mtalk", fallback="push")
    with pytest.raises(ConfigError, match="alimtalk -> push -> sms -> alimtalk"):
        broker.include(router)
