"""A handler that is asked to end before its timeout: what it does then counts, until the timeout."""

from __future__ import annotations

import asyncio

import pytest

from rsmq import Broker, ConfigError, RetryPolicy
from rsmq.testing import HarnessFixture

ONCE = RetryPolicy(max_attempts=1)


async def test_a_handler_that_cleans_up_is_done(rsmq_harness: HarnessFixture) -> None:
    """It is cancelled once, and its clean-up, which takes several looks at the clock, is not."""
    broker, cleaned = Broker(), list[int]()

    @broker.handler("t", group="g", soft_timeout="50ms", timeout="60s", partitions=1, retry=ONCE)
    async def work(n: int) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(10):
                await asyncio.sleep(0.02)
            cleaned.append(n)
        return "stopped in time"

    async with rsmq_harness(broker) as test:
        [outcome] = await test.publish_and_handle("t", 1)
        assert (outcome.status, outcome.result, cleaned) == ("done", "stopped in time", [1])


async def test_one_that_does_not_is_a_failed_attempt_at_once(rsmq_harness: HarnessFixture) -> None:
    broker = Broker()

    @broker.handler("t", group="g", soft_timeout=0.05, timeout=60, partitions=1, retry=ONCE)
    async def work(_: int) -> None:
        await asyncio.Event().wait()

    async with rsmq_harness(broker) as test:
        [outcome] = await test.publish_and_handle("t", 1)
        assert outcome.status == "dead"
        letter = await test.assert_dead_letter("t", "g", reason="timeout")
        assert letter.error.endswith("ran longer than its timeout of 0.05 s")


async def test_one_that_swallows_it_ends_at_the_timeout(rsmq_harness: HarnessFixture) -> None:
    broker = Broker()

    @broker.handler("t", group="g", soft_timeout="30ms", timeout="200ms", partitions=1, retry=ONCE)
    async def work(_: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    async with rsmq_harness(broker) as test:
        [outcome] = await test.publish_and_handle("t", 1)
        assert outcome.status == "dead"


def plain(_: int) -> None: ...


async def waits(_: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (plain, {"soft_timeout": 1, "timeout": 2}, "a plain function cannot be cancelled"),
        (waits, {"soft_timeout": 1}, "write soft_timeout='25s', timeout='30s'"),
        (waits, {"soft_timeout": 2, "timeout": 2}, "write soft_timeout='25s', timeout='30s'"),
        (waits, {"soft_timeout": 0, "timeout": 2}, "soft_timeout=0 is not above 0"),
    ],
)
def test_what_is_not_possible_is_said(function: object, options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Broker("redis://localhost:1").handler("t", group="g", **options)(function)  # type: ignore[arg-type, type-var]
