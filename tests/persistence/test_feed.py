"""The feed: what a message that cannot be delivered for now, or at all, does to those around it."""

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
from rsmq.keys import Keys
from rsmq.message import Place
from rsmq.persistence.feed import Feed
from rsmq.persistence.post import Post
from rsmq.retry import Reject, Retry
from tests.persistence.test_post import Hand, turn

SOON = 30.0
TOPIC = "alerts"
STORED = [b"OK", 1, 0, 0, 0]


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker on the shared server."""
    return lambda **overrides: Broker(Settings(url=server_url, prefix=prefix, preflight="warn", **overrides))


async def comes(broker: Broker, device: str, numbers: list[int]) -> None:
    """The device gets exactly these next."""
    async with broker.connect(device, auto_ack=True) as session:
        with anyio.fail_after(SOON):
            assert [(await anext(session)).payload["n"] for _ in numbers] == numbers


async def dead(broker: Broker, count: int) -> dict[int, str]:
    """The dead letters of the feed by number, when there are so many."""
    topic = await broker.topics.find(TOPIC)
    assert topic is not None
    with anyio.fail_after(SOON):
        while True:
            found = [letter async for letter in broker.dead_letters.iterate(topic, "devices")]
            if len(found) >= count:
                return {json.loads(letter.data or b"")["n"]: letter.error for letter in found}
            await anyio.sleep(0.01)


async def test_a_message_that_never_finds_its_devices(make_broker: Callable[..., Broker]) -> None:
    """It becomes a dead letter when its attempts are used up; those that waited for it have lost none of theirs."""
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


async def test_recipients_of_every_kind(make_broker: Callable[..., Broker]) -> None:
    """Nobody, one, several, the same twice, from a function of the message, asynchronous or not."""
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


# -- by hand ----------------------------------------------------------------------------------------------------------


class Table:
    """A feed whose courier is the test."""

    def __init__(self, settings: Settings, keys: Keys, to: Callable[..., Any]) -> None:
        self.hand = Hand()
        post = Post(self.hand, keys, settings, is_cluster=True)  # type: ignore[arg-type]
        self.feed = Feed(to, "devices", Any, None, RetryPolicy(), lambda: post)

    async def deliver(self, *numbers: int, partition: int = 0) -> list[Exception | None] | None:
        """Messages with these numbers, which are their stream ids as well."""
        place = Place(TOPIC, partition, "devices")
        return await self.feed(
            [Message(place, b"%d-0" % n, [b"data", b'{"n":%d}' % n, b"id", b"m%d" % n]) for n in numbers]
        )

    def devices(self) -> list[str]:
        """To whom has been written, call by call."""
        return [str(call.keys[0]).partition("{")[2].partition("}")[0] for call in self.hand.calls]


async def test_what_was_not_stored_is_overtaken_by_nothing(settings: Settings, keys: Keys) -> None:
    """While the recipients of a later message are looked up, a write fails: the later one waits, for its mark would
    make the earlier one a repetition, and it would be lost."""

    async def to(alert: dict[str, int]) -> str:
        await turn()
        if alert["n"] == 2:
            table.hand.calls[0].done(BrokerUnavailable("gone"))
        return "phone"

    table = Table(settings, keys, to)
    outcomes = await asyncio.wait_for(table.deliver(1, 2, 3), SOON)
    assert outcomes is not None
    assert [type(each) for each in outcomes] == [BrokerUnavailable, Retry, Retry]
    assert table.devices() == ["phone"]


async def test_another_partition_does_not_wait(settings: Settings, keys: Keys) -> None:
    """What cannot be delivered for now holds back its own partition, and what is sent before it in another call."""

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
    table.hand.calls[0].done(STORED)
    assert await other is None


@pytest.mark.parametrize("error", [ScriptError("WRONGTYPE"), BrokerUnavailable("gone")])
async def test_one_device_that_fails(settings: Settings, keys: Keys, error: Exception) -> None:
    """Each message has the outcome of its own devices."""
    table = Table(settings, keys, lambda alert: {1: ["a", "b"], 2: ["b"], 3: ["c"]}[alert["n"]])
    delivering = asyncio.ensure_future(table.deliver(1, 2, 3))
    await turn()
    assert table.devices() == ["a", "b", "c"]
    for call, reply in zip(table.hand.calls, (error, STORED, STORED), strict=True):
        call.done(reply)
    assert await delivering == [error, None, None]


@pytest.mark.parametrize("found", ["", "x" * 257, ["phone", 7], [None], "\ud800"])
async def test_ids_that_no_device_can_have(settings: Settings, keys: Keys, found: Any) -> None:
    """The message is rejected as a whole, with the reason; the next one goes on."""
    table = Table(settings, keys, lambda alert: found if alert["n"] == 1 else "phone")
    delivering = asyncio.ensure_future(table.deliver(1, 2))
    await turn()
    assert table.devices() == ["phone"]
    table.hand.calls[0].done(STORED)
    outcomes = await delivering
    assert outcomes is not None
    assert isinstance(outcomes[0], Reject)
    assert "device id" in str(outcomes[0])
    assert outcomes[1] is None


async def test_recipients_that_are_none(settings: Settings, keys: Keys) -> None:
    """A number is neither an id nor a list of them: the function is at fault, and the message is tried again."""
    outcomes = await Table(settings, keys, lambda alert: 7).deliver(1)
    assert outcomes is not None
    assert "not iterable" in str(outcomes[0])


async def test_a_feed_needs_a_function_of_one_message(settings: Settings, keys: Keys) -> None:
    """Anything else is an error when it is registered."""
    for wrong in (lambda: "phone", "phone", None):
        with pytest.raises(ConfigError):
            Table(settings, keys, wrong)  # type: ignore[arg-type]
