"""What members tell about their calls with the heartbeat: each call once, in every kind of handler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from rsmq import Broker, Message, Reject, RetryPolicy
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.state import MemberState
from rsmq.model.words import installed
from tests.consumer.test_outputs import broker

__all__ = ["broker"]

QUICK = RetryPolicy(max_attempts=2, wait=lambda state: 0.01)  # type: ignore[arg-type]


async def member_when(broker: Broker, is_so: Callable[[MemberState], bool]) -> MemberState:
    """The only member, as soon as it has told what is wanted."""
    inspector = Inspector(broker.client, broker.keys, broker.settings)
    for _ in range(600):
        found = await inspector.members("in")
        if found and is_so(found[0]):
            return found[0]
        await asyncio.sleep(0.1)
    raise AssertionError(found)


def plain(number: int) -> None:
    """For a thread."""


async def at_once(number: int) -> None:
    """Never suspends, so it is called with raw entries."""


async def suspending(number: int) -> None:
    """Lets others run."""
    await asyncio.sleep(0)


async def whole(message: Message) -> None:
    """Gets a message, not a payload."""


async def several(numbers: list[int]) -> None:
    """A batch is one call."""


@pytest.mark.parametrize("function", [plain, at_once, suspending, whole, several])
async def test_each_call_is_counted_once_with_its_duration(broker: Broker, function: Any) -> None:
    """The heartbeat tells them; nothing else is written for that."""
    broker.handler("in", group="g", batch=5 if function is several else None, ordering="none")(function)
    async with broker.running():
        await broker.publish_many("in", range(20))
        member = await member_when(broker, lambda each: each.calls.settled == 20)
    calls = member.calls
    assert (calls.failed, calls.retried, calls.dead) == (0, 0, 0)
    assert calls.calls == 20 if function is not several else 4 <= calls.calls <= 20


async def test_failures_retries_and_long_calls_are_told(broker: Broker) -> None:
    """Of three messages one succeeds late, one never, and one is refused at once; one call takes longer."""

    @broker.handler("in", group="g", ordering="none", retry=QUICK, timeout="7s", concurrency=3)
    async def work(word: str, message: Message) -> None:
        if word == "refused":
            raise Reject("no")
        if word == "never" or message.attempt == 1:
            raise ValueError("not now")
        await asyncio.sleep(0.06)

    async with broker.running():
        for word in ("late", "never", "refused"):
            await broker.publish("in", word)
        member = await member_when(broker, lambda each: each.calls.settled + each.calls.dead == 3)
    calls = member.calls
    assert (calls.settled, calls.failed, calls.retried, calls.dead, calls.calls) == (1, 4, 2, 2, 5)
    longest = calls.quantile(1.0)
    assert longest is not None
    assert longest > 0.05
    assert (member.attempts, member.timeout is not None and member.timeout.total_seconds()) == (2, 7.0)


async def test_process_tells_where_it_runs_and_what_runs_longest(broker: Broker) -> None:
    """Its host, id, version, start and memory; and that a call has run for a while."""
    release = asyncio.Event()

    @broker.handler("in", group="g")
    async def work(number: int) -> None:
        await release.wait()

    async with broker.running():
        await broker.publish("in", 1)
        member = await member_when(broker, lambda each: each.longest is not None)
        release.set()
    process = member.process
    assert (process.pid, process.version) == (os.getpid(), installed("rsmq"))
    assert process.host
    assert process.started is not None
    assert process.memory is None or process.memory > 1 << 20
