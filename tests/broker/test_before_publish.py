"""Default headers and `before_publish`: on every way to publish, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from rsmq import Broker, ConfigError, Message, Publication, Reject, Settings
from rsmq.broker.broker import producer_of
from rsmq.telemetry.tracing import trace
from tests.consumer.test_outputs import payloads, settled, stored
from tests.patience import until

OWN = {"service": "shop", "team": "a"}

tenant: ContextVar[str] = ContextVar("tenant", default="none")


class Refused(Exception):
    """What a function raises."""


def stamp(publication: Publication) -> None:
    """Names the tenant, and refuses bad messages."""
    if publication.payload == "bad":
        raise Refused(publication.topic)
    publication.headers["tenant"] = tenant.get()


@pytest.fixture
def bare(settings: Settings) -> Broker:
    """Without headers and functions."""
    return Broker(replace(settings, preflight="warn"))


@pytest.fixture
def broker(bare: Broker) -> Broker:
    """With both."""
    broker = Broker(bare.settings, headers=OWN)
    broker.before_publish(stamp)
    return broker


async def headers_of(broker: Broker, topic: str) -> list[dict[str, str]]:
    """Of all stored messages, in order of their payloads."""
    entries = sorted(await stored(broker, topic), key=lambda entry: entry[b"data"])
    return [json.loads(entry.get(b"h", b"{}")) for entry in entries]


async def test_each_way_to_publish_gets_the_headers_and_the_function(broker: Broker) -> None:
    """Those of the call come first, then those of the function, which sees both."""
    seen = list[Publication]()
    broker.before_publish(seen.append)
    at = datetime.now().astimezone() - timedelta(seconds=1)
    tenant.set("ada")
    async with broker:
        await broker.publish("t", "1", key="k", headers={"team": "b"}, message_id="m", at=at)
        await broker.publish_many("t", ["2", "3"], key=str, headers={"x": "y"})
        await broker.topic("t", str).publish("4")
        found = await headers_of(broker, "t")
    assert found == [
        {**OWN, "x": "y", "tenant": "ada"},
        {**OWN, "x": "y", "tenant": "ada"},
        {**OWN, "tenant": "ada"},
    ]
    first, second, *_ = seen
    assert (first.topic, first.payload, first.key, first.message_id, first.at) == ("t", "1", "k", "m", at)
    assert first.headers == {"service": "shop", "team": "b", "tenant": "ada"}
    assert (second.payload, second.key, second.message_id) == ("2", "2", None)


def test_publish_sync_gets_them_in_the_context_of_the_caller(broker: Broker) -> None:
    """The connection is in another thread, with the functions of this broker."""
    seen = list[dict[str, str]]()
    broker.before_publish(lambda publication: seen.append(publication.headers))
    tenant.set("grace")
    broker.publish_sync("t", "1")
    broker.topic("t", str).publish_sync("2", headers={"team": "b"})
    with pytest.raises(Refused):
        broker.publish_sync("t", "bad")
    assert seen == [{**OWN, "tenant": "grace"}, {**OWN, "team": "b", "tenant": "grace"}]


@pytest.mark.parametrize("is_plain", [False, True])
async def test_outputs_get_them_and_a_refused_output_fails_its_handler(broker: Broker, is_plain: bool) -> None:
    """The handler's own message becomes a dead letter; nothing of it is stored."""

    async def handle(message: Message) -> None:
        await forward(message.publish, message)

    async def forward(publish: Callable[..., Any], message: Message) -> None:
        tenant.set(message.headers["tenant"])
        try:
            await publish("out", message.data.decode(), headers={"x": "y"})
        except Refused as error:
            raise Reject(str(error)) from error

    def plain(message: Message) -> None:
        tenant.set(message.headers["tenant"])
        try:
            message.publish_sync("out", message.data.decode(), headers={"x": "y"})
        except Refused as error:
            raise Reject(str(error)) from error

    broker.handler("in", group="g")(plain if is_plain else handle)
    plainly = Broker(broker.settings)
    async with broker.running(), plainly:
        for payload in ("1", "bad"):
            await plainly.publish("in", payload, headers={"tenant": "eve"})
        await settled(broker, "in")
        assert await headers_of(broker, "out") == [{**OWN, "x": "y", "tenant": "eve"}]
        topic = await broker.topics.existing("in")
        letters = [letter async for letter in broker.dead_letters.iterate(topic, "g")]
    assert [letter.data for letter in letters] == [b"bad"]


async def test_schedules_get_them(broker: Broker) -> None:
    """A worker publishes its ticks itself."""
    seen = list[dict[str, str]]()
    tenant.set("clock")

    @broker.every("1s", "ticks")
    def tick() -> str:
        return "now"

    @broker.handler("ticks", group="g")
    async def handle(message: Message) -> None:
        seen.append(message.headers)

    async with broker.running():
        await until(lambda: bool(seen), "a tick")
    assert seen[0] == {**OWN, "tenant": "clock"}


async def test_trace_context_is_among_the_headers(broker: Broker) -> None:
    """A traced broker keeps the functions, for one message and for many."""
    trace(broker, TracerProvider())
    async with broker:
        await broker.publish("t", "1")
        await broker.publish_many("t", ["2"])
        found = await headers_of(broker, "t")
    assert [sorted(headers) for headers in found] == [["service", "team", "tenant", "traceparent"]] * 2


async def test_refused_message_is_not_stored_and_the_caller_gets_the_error(broker: Broker) -> None:
    """One message, and one of many."""
    async with broker:
        with pytest.raises(Refused, match="t"):
            await broker.publish("t", "bad")
        with pytest.raises(Refused, match="t"):
            await broker.publish_many("t", ["1", "bad"])
        await broker.publish("t", "2")
        assert await payloads(broker, "t") == [b"2"]


async def test_broker_without_them_publishes_no_headers(bare: Broker) -> None:
    """There is nothing to call."""
    async with bare:
        await bare.publish("t", "1")
        assert await headers_of(bare, "t") == [{}]
        assert producer_of(bare) is not None
        assert producer_of(bare).prepare is None


async def test_function_that_would_have_no_effect_is_refused(bare: Broker) -> None:
    """An async one, one that returns headers, one that comes too late, and what is no function."""

    async def later(publication: Publication) -> None: ...

    with pytest.raises(ConfigError, match="later is `async def`"):
        bare.before_publish(later)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="takes a function"):
        bare.before_publish("stamp")  # type: ignore[type-var]
    bare.before_publish(lambda publication: {"a": "b"})  # type: ignore[arg-type,return-value]
    async with bare:
        with pytest.raises(ConfigError, match="returned dict"):
            await bare.publish("t", "1")
        with pytest.raises(ConfigError, match="before `async with broker:`"):
            bare.before_publish(stamp)


@pytest.mark.parametrize("headers", [{"n": 1}, {1: "n"}, "a=b", ["a"]])
def test_wrong_default_headers_are_refused_by_the_constructor(headers: Any) -> None:
    """Not by the first publish."""
    with pytest.raises(ConfigError, match="names and values are str"):
        Broker(headers=headers)
