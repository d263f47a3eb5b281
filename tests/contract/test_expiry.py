"""Messages that expire: no attempt starts after it, and nothing is stuck."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rsmq import Broker, Message, Retry
from rsmq.model.message import becomes_dead
from tests.contract.witness import Witness, add, ask, dies, letters_of, settled
from tests.matrix.way import steady_connections
from tests.patience import until

PAST = "1"


def register(broker: Broker, form: str, handle: Any) -> None:
    """One handler, for single messages with or without key order, or for batches."""
    if form == "batch":

        @broker.handler("t", group="g", partitions=1, batch=5)
        async def handle_many(messages: list[Message]) -> list[Exception | None]:
            return [handle(message) for message in messages]
    else:

        @broker.handler("t", group="g", partitions=1, ordering="key" if form == "key" else "none")
        async def handle_one(message: Message) -> None:
            error = handle(message)
            if error is not None:
                raise error


@pytest.mark.parametrize("form", ["key", "none", "batch"])
async def test_an_expired_message_is_dropped_or_dead(broker: Broker, witness: Witness, form: str) -> None:
    """Its handler does not see it; those of its key go on. A dead letter says why, and a replay of it is handled."""

    def handle(message: Message) -> None:
        witness.note((message.data, message.expires is None, message.headers.get("expires")))

    register(broker, form, handle)
    async with broker:
        stream = broker.keys.stream("t", 0)
        topic = await broker.topics.ensure("t", 1)
        for n, more in enumerate(((PAST,), (PAST, "on_expiry", "dead"), ("9" * 13,), ("tomorrow",))):
            await add(broker, stream, "data", str(n), "key", "k", "expires", *more)
        await add(broker, stream, "data", "4", "key", "k")
        async with broker.running():
            late = [(b"2", False, None), (b"3", True, "tomorrow"), (b"4", True, None)]
            await witness.sees(late)
            assert await dies(broker, "t", "g", 1) == [("expired", b"1")]
            (letter,) = await letters_of(broker, "t", "g")
            assert letter.attempts == 0
            assert broker.worker is not None
            assert sum(consumer.stats["expired"] for consumer in broker.worker.consumers) == 2
            await broker.dead_letters.replay(topic, "g", [letter.id])
            await witness.sees([*late, (b"1", True, None)])
            await settled(broker, "t")
    assert len(witness.seen) == 4


@steady_connections
@pytest.mark.parametrize("form", ["key", "none", "batch"])
async def test_a_message_that_waits_for_its_retry_expires(broker: Broker, witness: Witness, form: str) -> None:
    """It does not wait for the retry, and the next of its key starts."""

    def handle(message: Message) -> Exception | None:
        witness.note(message.data)
        return Retry("tomorrow", after="1 day") if message.data == b"1" else None

    register(broker, form, handle)
    async with broker.running():
        await broker.publish("t", 1, key="k", expires="300ms")
        await broker.publish("t", 2, key="k", expires=timedelta(hours=1))
        await witness.sees([b"1", b"2"])
        await settled(broker, "t")
    assert sorted(witness.seen) == [b"1", b"2"]


async def test_a_delayed_message_that_no_worker_was_there_for_expires(broker: Broker, witness: Witness) -> None:
    """Its life does not begin when the message is due at last."""

    @broker.handler("t", group="g")
    async def handle(message: Message) -> None:
        witness.note(message.data)

    async with broker:
        await broker.publish("t", 1, delay="50ms", expires="100ms", on_expiry="dead")
        before = await ask(broker, "TIME")

        async def is_over() -> bool:
            now = await ask(broker, "TIME")
            return 1000 * (int(now[0]) - int(before[0])) + (int(now[1]) - int(before[1])) / 1000 > 1000

        await until(is_over, "the message has expired")
        async with broker.running():
            assert await dies(broker, "t", "g", 1) == [("expired", b"1")]
    assert witness.seen == []


async def test_outputs_many_and_letters_carry_an_expiry(broker: Broker) -> None:
    """`publish_many`, `message.publish`, and the letters of a device."""
    got = dict[str, Any]()

    @broker.handler("t", group="g")
    async def handle(message: Message) -> None:
        got["many"] = message.expires
        await message.publish("out", message.payload, expires="1h", on_expiry="dead")

    @broker.handler("out", group="g")
    async def handle_output(message: Message) -> None:
        got["output"] = (message.expires, becomes_dead(message))

    broker.deliver("t", to=lambda _: "device-1")
    async with broker.running():
        await broker.publish_many("t", [{"n": 1}], expires="1h")
        await until(lambda: len(got) == 2, "both are handled")
        await settled(broker, "t")
        (letter,) = await broker.devices.peek("device-1")
        assert letter.expires - letter.timestamp == timedelta(hours=1)
    assert got["many"] is not None
    assert got["output"][0] is not None
    assert got["output"][1]
