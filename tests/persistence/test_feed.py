"""The feed: how a message that cannot be delivered, yet or at all, affects the other messages."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tenacity import wait_none

from rsmq import Broker, Message, RetryPolicy, Settings
from rsmq.errors import BrokerUnavailable, ConfigError, ScriptError
from rsmq.handler.retry import Reject, Retry
from rsmq.model.keys import Keys
from rsmq.model.message import MessageOrigin
from rsmq.persistence.feed import Feed
from rsmq.persistence.inbox_writer import InboxWriter
from tests.persistence.test_inbox_writer import ManualBatcher, turn

SOON = 30.0
TOPIC = "alerts"
STORED = [b"OK", 1, 0, 0, 0]


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker on the shared server."""
    return lambda **overrides: Broker(Settings(url=server_url, prefix=prefix, preflight="warn", **overrides))


async def comes(broker: Broker, device: str, numbers: list[int]) -> None:
    """Expect exactly these letters of a device next."""
    async with broker.connect(device, auto_ack=True) as session:
        with anyio.fail_after(SOON):
            assert [(await anext(session)).payload["n"] for _ in numbers] == numbers


async def dead(broker: Broker, count: int) -> dict[int, str]:
    """The dead letters of the feed by number, once there are `count`."""
    topic = await broker.topics.find(TOPIC)
    assert topic is not None
    with anyio.fail_after(SOON):
        while True:
            found = [letter async for letter in broker.dead_letters.iterate(topic, "devices")]
            if len(found) >= count:
                return {json.loads(letter.data or b"")["n"]: letter.error for letter in found}
            await anyio.sleep(0.01)


async def test_message_whose_function_fails_becomes_a_dead_letter(make_broker: Callable[..., Broker]) -> None:
    """After all its attempts; messages that waited for it lose none of their attempts."""
    broker, seen = make_broker(partitions=1), Counter[int]()

    def to(alert: dict[str, int]) -> str:
        seen[alert["n"]] += 1
        if alert["n"] == 0 or (alert["n"] == 1 and seen[1] < 3):
            raise ValueError("who is it?")
        return "phone"

    retry = RetryPolicy(max_attempts=3, wait=wait_none())
    broker.deliver(TOPIC, to=to, retry=retry)
    async with broker:
        await broker.publish_many(TOPIC, [{"n": n} for n in range(10)])
        async with broker.running():
            await comes(broker, "phone", list(range(1, 10)))
            assert await dead(broker, 1) == {0: "ValueError: who is it?"}


async def test_recipients_may_be_none_one_or_several(make_broker: Callable[..., Broker]) -> None:
    """Also the same device twice, from a plain or an async function."""
    broker = make_broker(partitions=1)

    async def to(message: Message) -> list[str] | str | None:
        return {0: None, 1: "phone", 2: ["phone", "phone", "tablet"], 3: [], 4: "tablet"}[json.loads(message.data)["n"]]

    broker.deliver(TOPIC, to=to)
    broker.deliver(TOPIC, to=lambda alert: (name for name in ("watch",)), group="watches")
    async with broker:
        await broker.publish_many(TOPIC, [{"n": n} for n in range(5)])
        async with broker.running():
            await comes(broker, "phone", [1, 2])
            await comes(broker, "tablet", [2, 4])
            await comes(broker, "watch", [0, 1, 2, 3, 4])


# -- replies given by the test -----------------------------------------------------------------------------------------


class Table:
    """A feed whose batcher is controlled by the test."""

    def __init__(self, settings: Settings, keys: Keys, to: Callable[..., Any]) -> None:
        self.batcher = ManualBatcher()
        writer = InboxWriter(self.batcher, keys, settings, is_cluster=True)  # type: ignore[arg-type]
        self.feed = Feed(to, "devices", Any, None, RetryPolicy(), lambda: writer)

    async def deliver(self, *numbers: int, partition: int = 0) -> list[Exception | None] | None:
        """Messages with these numbers, which are their stream ids as well."""
        origin = MessageOrigin(TOPIC, partition, "devices")
        return await self.feed(
            [Message(origin, b"%d-0" % n, [b"data", b'{"n":%d}' % n, b"id", b"m%d" % n]) for n in numbers]
        )

    def devices(self) -> list[str]:
        """The device of each call so far."""
        return [str(call.keys[0]).partition("{")[2].partition("}")[0] for call in self.batcher.calls]


async def test_failed_write_stops_later_messages_of_its_partition(settings: Settings, keys: Keys) -> None:
    """A write fails while a later message looks up its devices. The later one waits: with its higher position stored,
    the retry of the earlier one would be skipped as a repetition.
    """

    async def to(alert: dict[str, int]) -> str:
        await turn()
        if alert["n"] == 2:
            table.batcher.calls[0].done(BrokerUnavailable("gone"))
        return "phone"

    table = Table(settings, keys, to)
    outcomes = await asyncio.wait_for(table.deliver(1, 2, 3), SOON)
    assert outcomes is not None
    assert [type(each) for each in outcomes] == [BrokerUnavailable, Retry, Retry]
    assert table.devices() == ["phone"]


async def test_retry_does_not_stop_another_partition(settings: Settings, keys: Keys) -> None:
    """A message to retry stops only later messages of its partition."""

    def to(alert: dict[str, int]) -> str:
        if alert["n"] == 1:
            raise Retry("not yet")
        return "phone"

    table = Table(settings, keys, to)
    outcomes = await table.deliver(1, 2)
    assert outcomes is not None
    assert [type(each) for each in outcomes] == [Retry, Retry]
    assert table.devices() == []
    other = asyncio.ensure_future(table.deliver(3, partition=1))
    await turn()
    table.batcher.calls[0].done(STORED)
    assert await other is None


@pytest.mark.parametrize("error", [ScriptError("WRONGTYPE"), BrokerUnavailable("gone")])
async def test_failing_device_fails_only_its_messages(settings: Settings, keys: Keys, error: Exception) -> None:
    """The outcome of a message depends only on its own devices."""
    table = Table(settings, keys, lambda alert: {1: ["a", "b"], 2: ["b"], 3: ["c"]}[alert["n"]])
    delivering = asyncio.ensure_future(table.deliver(1, 2, 3))
    await turn()
    assert table.devices() == ["a", "b", "c"]
    for call, reply in zip(table.batcher.calls, (error, STORED, STORED), strict=True):
        call.done(reply)
    assert await delivering == [error, None, None]


@pytest.mark.parametrize("found", ["", "x" * 257, ["phone", 7], [None], "\ud800"])
async def test_message_for_an_impossible_device_is_rejected(settings: Settings, keys: Keys, found: Any) -> None:
    """The whole message is rejected with the reason; the next one is stored."""
    table = Table(settings, keys, lambda alert: found if alert["n"] == 1 else "phone")
    delivering = asyncio.ensure_future(table.deliver(1, 2))
    await turn()
    assert table.devices() == ["phone"]
    table.batcher.calls[0].done(STORED)
    outcomes = await delivering
    assert outcomes is not None
    assert isinstance(outcomes[0], Reject)
    assert "device id" in str(outcomes[0])
    assert outcomes[1] is None


async def test_recipients_that_are_not_iterable_fail_the_message(settings: Settings, keys: Keys) -> None:
    """A number is neither an id nor a list of ids: the message is retried."""
    outcomes = await Table(settings, keys, lambda alert: 7).deliver(1)
    assert outcomes is not None
    assert "not iterable" in str(outcomes[0])


async def test_deliver_needs_a_function_of_one_message(settings: Settings, keys: Keys) -> None:
    """Anything else is a ConfigError when it is registered."""
    for wrong in (lambda: "phone", "phone", None):
        with pytest.raises(ConfigError):
            Table(settings, keys, wrong)  # type: ignore[arg-type]
