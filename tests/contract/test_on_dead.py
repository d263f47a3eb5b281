"""`on_dead`: what it publishes is stored in the step that makes the dead letter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tenacity import wait_fixed

from rsmq import Broker, BrokerUnavailable, Burial, ConfigError, Message, Reject, RetryPolicy, Router
from rsmq.consumer.settling.settler import Settler
from rsmq.redis.scripts import SETTLE_OUTPUTS
from tests.contract.witness import Witness, add, dies, letters_of, settled
from tests.matrix.way import one_server

TWICE = RetryPolicy(max_attempts=2, wait=wait_fixed(0.01))


@pytest.mark.parametrize("form", ["key", "none", "batch"])
async def test_a_fallback_topic_gets_what_becomes_a_dead_letter(broker: Broker, witness: Witness, form: str) -> None:
    """With the reason; the dead letter is as without it, and can be replayed. Other messages have no part in it."""

    def handle(message: Message) -> Exception | None:
        if message.data == b'{"n":1}':
            return ValueError("never")
        return Reject("no") if message.data == b'{"n":2}' else None

    if form == "batch":

        @broker.handler("t", group="g", retry=TWICE, batch=5)
        async def handle_many(messages: list[Message]) -> list[Exception | None]:
            return [handle(message) for message in messages]
    else:

        @broker.handler("t", group="g", retry=TWICE, ordering="key" if form == "key" else "none")
        async def handle_one(message: Message) -> None:
            await message.publish("lost", "an attempt that fails publishes nothing")
            error = handle(message)
            if error is not None:
                raise error

    @broker.on_dead("t", group="g")
    async def fall_back(message: Message, burial: Burial) -> None:
        await message.publish("fallback", message.data, key=message.key, headers={"why": burial.reason})

    @broker.handler("fallback", group="g")
    async def handle_fallback(message: Message) -> None:
        witness.note((message.data, message.headers["why"]))

    async with broker.running():
        for n in range(4):
            await broker.publish("t", {"n": n}, key="k", headers={"from": "test"})
        await witness.sees([(b'{"n":1}', "failed"), (b'{"n":2}', "rejected")])
        await dies(broker, "t", "g", 2)
        await settled(broker, "t")
        letters = {letter.data: letter for letter in await letters_of(broker, "t", "g")}
        failed = letters[b'{"n":1}']
        assert (failed.reason, failed.error, failed.attempts) == ("failed", "ValueError: never", 2)
        assert (failed.key, failed.headers, "never" in failed.traceback) == ("k", {"from": "test"}, form != "batch")
        assert letters[b'{"n":2}'].reason == "rejected"
    assert len(witness.seen) == 2


async def test_on_dead_of_two_messages_with_the_same_stream_id(broker: Broker, witness: Witness) -> None:
    """In two partitions, at the same time: the one that ends first does not end the other."""
    has_ended = asyncio.Event()

    @broker.handler("t", group="g", partitions=2, ordering="none")
    async def handle(_: Message) -> None:
        raise Reject("no")

    @broker.on_dead("t", group="g")
    async def fall_back(message: Message, _: Burial) -> None:
        witness.note(message.data)
        if message.data == b"0":
            await has_ended.wait()
            await message.publish("fallback", 0)

    async with broker.running():
        for number in range(2):
            await add(broker, broker.keys.stream("t", number), "data", number, at="9999999999999-1")
        await witness.sees([b"0", b"1"])
        await dies(broker, "t", "g", 1)
        has_ended.set()
        await dies(broker, "t", "g", 2)
        await settled(broker, "t")
        assert [entry[1][1] for entry in await stored(broker, "fallback")] == [b"0"]


async def test_an_on_dead_that_fails_keeps_no_message_alive(
    broker: Broker, witness: Witness, caplog: pytest.LogCaptureFixture
) -> None:
    """Its outputs are not stored, the dead letter is; the log says so. One that publishes nothing is as none."""

    @broker.handler("t", group="g", retry=TWICE)
    async def handle(_: Message) -> None:
        raise Reject("no")

    @broker.on_dead("t", group="g")
    async def fall_back(message: Message, burial: Burial) -> None:
        witness.note((message.data, burial))
        if message.data == b"1":
            await message.publish("fallback", 1)
            raise OSError("the pager is down")

    async with broker.running():
        for n in (1, 2):
            await broker.publish("t", n)
        assert len(await dies(broker, "t", "g", 2)) == 2
        await settled(broker, "t")
        assert await broker.topics.find("fallback") is None or not await stored(broker, "fallback")
    assert sorted(witness.seen, key=repr) == [(b"1", Burial("rejected", "no", 1)), (b"2", Burial("rejected", "no", 1))]
    assert "on_dead failed" in caplog.text
    assert "the pager is down" in caplog.text


async def stored(broker: Broker, name: str) -> list[Any]:
    """The entries of a topic."""
    topic = await broker.topics.existing(name)
    keys = [broker.keys.stream(name, number) for number in topic.numbers]
    return [entry for key in keys for entry in await broker.client.execute_command("XRANGE", key, "-", "+")]


@one_server
async def test_a_lost_reply_to_the_burial_stores_everything_once(broker: Broker, monkeypatch: Any) -> None:
    """The call is sent again: one dead letter, one output."""

    @broker.handler("t", group="g", partitions=1)
    async def handle(_: Message) -> None:
        raise Reject("no")

    @broker.on_dead("t", group="g")
    def fall_back(message: Message, _: Burial) -> None:
        message.publish_sync("fallback", "x")

    ask, lost = Settler.ask, list[Any]()

    async def lossy(self: Settler, script: Any, *command: Any) -> Any:
        reply = await ask(self, script, *command)
        if script is SETTLE_OUTPUTS and not lost:
            lost.append(reply)
            raise BrokerUnavailable("the reply is lost")
        return reply

    monkeypatch.setattr(Settler, "ask", lossy)
    async with broker.running():
        await broker.publish("t", 1)
        await dies(broker, "t", "g", 1)
        await settled(broker, "t")
        assert lost
        assert len(await letters_of(broker, "t", "g")) == 1
        assert len(await stored(broker, "fallback")) == 1


async def test_on_dead_without_its_handler_is_refused(broker: Broker) -> None:
    """Where it is written: it would never be called."""

    async def fall_back(message: Message, burial: Burial) -> None: ...

    with pytest.raises(ConfigError, match="write on_dead after its handler"):
        broker.on_dead("t", group="g")(fall_back)
    router = Router(prefix="shop.")

    @router.handler("t", group="g")
    async def handle(_: Message) -> None: ...

    router.on_dead("t", group="g")(fall_back)
    with pytest.raises(ConfigError, match="has an on_dead already"):
        router.on_dead("t", group="g")(fall_back)
    with pytest.raises(ConfigError, match="is not a function"):
        router.on_dead("t", group="g")(5)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"does not take \(message, burial\)"):
        router.on_dead("t", group="g")(handle)  # type: ignore[arg-type]
    broker.include(router)
    assert [handler.on_dead for handler in broker.handlers] == [fall_back]
