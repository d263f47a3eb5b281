"""`on_error`: each failed attempt is reported once, with its message; a hook that fails changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tenacity import wait_none

from rsmq import Broker, ConfigError, HandlerTimeout, Malformed, Message, Reject, Retry, RetryPolicy, Router, Settings
from tests.patience import until

TWICE = RetryPolicy(max_attempts=2, wait=wait_none())
Seen = list[tuple[Any, int, str]]


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """On the shared server."""
    return Broker(replace(settings, preflight="warn", partitions=1))


def recorder(seen: Seen) -> Callable[[Message, BaseException], None]:
    """A hook that remembers what it gets."""

    def report(message: Message, error: BaseException) -> None:
        seen.append((message.key, message.attempt, type(error).__name__))

    return report


async def buried(broker: Broker, topic: str, number: int) -> None:
    """Wait until so many messages are dead."""

    async def dead() -> bool:
        return await broker.dead_letters.count(await broker.topics.existing(topic), "g") == number

    await until(dead, f"{number} dead letters")


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_each_failed_attempt_is_reported(broker: Broker, ordering: Any) -> None:
    """Retries, the last attempt, a rejection, a time-out and a payload that does not fit; not what succeeds."""
    seen: Seen = []
    broker.on_error(recorder(seen))

    @broker.handler("t", group="g", retry=TWICE, ordering=ordering)
    async def handle(n: int, message: Message) -> None:
        if n == 1:
            raise ValueError("fails")
        if n == 2:
            raise Reject("no")
        if n == 3 and message.attempt == 1:
            raise Retry("later", after="0s")

    async with broker.running():
        for key, payload in (("fails", 1), ("rejected", 2), ("later", 3), ("good", 4), ("malformed", "x")):
            await broker.publish("t", payload, key=key)
        await buried(broker, "t", 3)
        await until(lambda: len(seen) == 5, "all are reported")
    assert sorted(seen) == [
        ("fails", 1, "ValueError"), ("fails", 2, "ValueError"), ("later", 1, "Retry"), ("malformed", 1, "Malformed"),
        ("rejected", 1, "Reject"),
    ]  # fmt: skip


async def test_items_of_a_batch_are_reported_one_by_one(broker: Broker) -> None:
    """Only those that failed."""
    seen: Seen = []
    broker.on_error(recorder(seen))

    @broker.handler("t", group="g", retry=TWICE, batch=10)
    async def handle(numbers: list[int]) -> list[Exception | None]:
        return [Reject("odd") if n % 2 else None for n in numbers]

    async with broker.running():
        await broker.publish_many("t", range(6), key=str)
        await buried(broker, "t", 3)
    assert sorted(seen) == [("1", 1, "Reject"), ("3", 1, "Reject"), ("5", 1, "Reject")]


async def test_a_time_out_is_reported_to_an_async_hook(broker: Broker) -> None:
    """The hook may await; the error says how long the handler had."""
    seen: Seen = []

    @broker.on_error
    async def report(message: Message, error: BaseException) -> None:
        await broker.client.execute_command("PING")
        seen.append((message.key, message.attempt, type(error).__name__))

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=1), timeout="20ms")
    async def handle(n: int) -> None:
        await anyio.sleep_forever()

    async with broker.running():
        await broker.publish("t", 1, key="k")
        await buried(broker, "t", 1)
    assert seen == [("k", 1, HandlerTimeout.__name__)]


async def test_a_hook_that_fails_changes_nothing(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged, the other hooks are called, the message is buried as without it."""
    seen: Seen = []

    @broker.on_error
    def broken(message: Message, error: BaseException) -> None:
        raise SystemExit("no connection")

    broker.on_error(recorder(seen))

    @broker.handler("t", group="g", retry=TWICE)
    async def handle(n: int) -> None:
        raise ValueError("fails")

    async with broker.running():
        await broker.publish("t", 1)
        await buried(broker, "t", 1)
    assert [attempt for _, attempt, _ in seen] == [1, 2]
    assert "on_error failed for <Message" in caplog.text


async def test_a_hook_of_a_router_sees_only_its_own_handlers(broker: Broker) -> None:
    """The scope is that of middleware."""
    seen: Seen = []
    router = Router()
    router.on_error(recorder(seen))

    for registry, topic in ((router, "inner"), (broker, "outer")):

        @registry.handler(topic, group="g", retry=RetryPolicy(max_attempts=1))
        async def handle(n: int) -> None:
            raise ValueError("fails")

    broker.include(router)
    async with broker.running():
        await broker.publish("outer", 1, key="outer")
        await broker.publish("inner", 1, key="inner")
        await buried(broker, "outer", 1)
        await buried(broker, "inner", 1)
    assert seen == [("inner", 1, "ValueError")]
    with pytest.raises(ConfigError, match="comes too late"):
        router.on_error(recorder(seen))


def test_malformed_is_public() -> None:
    """A hook can tell what to leave out."""
    assert issubclass(Malformed, Exception)
    with pytest.raises(ConfigError, match="is not a function: write `def report"):
        Broker().on_error("sentry")  # type: ignore[type-var]
