"""A handler whose own task is cancelled, or that leaves a cancellation behind: a failed attempt, and nothing more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy
from tests.contract.witness import Witness, dies, settled
from tests.matrix.way import steady_connections
from tests.patience import until

Act = Callable[[], Awaitable[None]]
QUICK = RetryPolicy(max_attempts=5, wait=wait_fixed(0.01))


def own_task() -> asyncio.Task[Any]:
    """The task that the handler runs in."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def cancels_itself() -> None:
    """The cancellation comes out of the handler."""
    own_task().cancel()
    await asyncio.sleep(30)


async def cancels_itself_and_returns() -> None:
    """The next await in this task gets it."""
    own_task().cancel()


async def has_a_watchdog() -> None:
    """A timer inside of the handler cancels it."""
    asyncio.get_running_loop().call_later(0.01, own_task().cancel)
    await asyncio.sleep(30)


async def has_a_late_watchdog() -> None:
    """The timer fires when the handler has returned."""
    asyncio.get_running_loop().call_later(0.02, own_task().cancel)


async def swallows_its_cancellation() -> None:
    """It goes on as if nothing had been."""
    own_task().cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(30)


async def awaits_a_cancelled_child() -> None:
    """Its own task is not cancelled."""
    child = asyncio.create_task(asyncio.sleep(30))
    child.cancel()
    await child


async def swallows_and_awaits_a_cancelled_child() -> None:
    """The two together."""
    await swallows_its_cancellation()
    await awaits_a_cancelled_child()


async def leaves_a_cancelled_scope() -> None:
    """Every later await of this task is cancelled."""
    scope = anyio.CancelScope()
    scope.__enter__()
    scope.cancel()


async def leaves_a_scope_with_a_deadline() -> None:
    """The task is cancelled later, for good."""
    anyio.CancelScope(deadline=anyio.current_time() + 0.02).__enter__()


async def leaves_a_shielded_scope() -> None:
    """The task hears of no cancellation of a scope around it any more."""
    anyio.CancelScope(shield=True).__enter__()


async def leaves_a_timeout() -> None:
    """It fires when the handler has returned."""
    await asyncio.timeout(0.02).__aenter__()


ACTS = [
    cancels_itself, cancels_itself_and_returns, has_a_watchdog, has_a_late_watchdog, swallows_its_cancellation,
    awaits_a_cancelled_child, swallows_and_awaits_a_cancelled_child, leaves_a_cancelled_scope,
    leaves_a_scope_with_a_deadline, leaves_a_shielded_scope, leaves_a_timeout,
]  # fmt: skip


def single(broker: Broker, handle: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """A handler of single messages."""

    @broker.handler("t", group="g", **options)
    async def function(payload: dict[str, Any]) -> None:
        await handle(payload["n"])


def batched(broker: Broker, handle: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """A batch handler of messages."""

    @broker.handler("t", group="g", **{"batch": 8, "linger": timedelta(milliseconds=30)} | options)
    async def function(payloads: list[dict[str, Any]], messages: list[Message]) -> None:
        for payload in payloads:
            await handle(payload["n"])


def raw(broker: Broker, handle: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """A batch handler of payloads only."""

    @broker.handler("t", group="g", **{"batch": 8} | options)
    async def function(payloads: list[dict[str, Any]]) -> None:
        for payload in payloads:
            await handle(payload["n"])


@steady_connections
@pytest.mark.parametrize("register", [single, batched, raw])
@pytest.mark.parametrize("act", ACTS)
async def test_pool_after_a_handler_was_cancelled_handles_the_others(
    broker: Broker, witness: Witness, act: Act, register: Callable[..., None]
) -> None:
    """All other messages are handled, time-outs fire, and the worker stops when asked."""
    acted: list[Act] = []

    async def handle(n: Any) -> None:
        if n == "slow":
            await asyncio.sleep(300)
        if n == "bad" and len(acted) < 3:
            acted.append(act)
            await act()
        await asyncio.sleep(0.001)
        witness.note(n)

    register(broker, handle, concurrency=2, timeout=0.5, retry=QUICK)
    async with broker.running():
        for n in ["bad", *range(25), "bad", *range(25, 50), "bad"]:
            await broker.publish("t", {"n": n}, key=str(n))
        await until(lambda: set(range(50)) <= set(witness.seen), "all innocent messages are handled")
        await settled(broker, "t")
        await broker.publish("t", {"n": "slow"}, key="slow")
        assert await dies(broker, "t", "g", 1) == [("timeout", b'{"n":"slow"}')]
        await broker.publish("t", {"n": 50}, key="50")
        await until(lambda: 50 in witness.seen, "a later message is handled")
        assert broker.worker is not None


@pytest.mark.parametrize(("register", "options"), [(single, {}), (batched, {"batch": 1}), (raw, {"batch": 1})])
@pytest.mark.parametrize(
    "act", [cancels_itself, cancels_itself_and_returns, swallows_its_cancellation, awaits_a_cancelled_child]
)
async def test_cancellation_that_a_handler_leaves_behind_reaches_no_other_message(
    broker: Broker, witness: Witness, act: Act, register: Callable[..., None], options: dict[str, Any]
) -> None:
    """The task that was cancelled handles nothing more. Otherwise the next message would lose an attempt."""
    acted, reached = list[Act](), list[Any]()

    async def handle(n: Any) -> None:
        if n == "bad":
            if len(acted) < 3:
                acted.append(act)
                await act()
            return
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            reached.append(n)
            raise
        witness.note(n)

    register(broker, handle, concurrency=1, retry=QUICK, **options)
    async with broker.running():
        for n in ["bad", *range(5), "bad", *range(5, 10), "bad"]:
            await broker.publish("t", {"n": n}, key=str(n))
        await witness.sees(range(10))
        await settled(broker, "t")
        assert (len(acted), reached) == (3, [])


@pytest.mark.parametrize("register", [batched, raw])
async def test_batch_whose_task_is_cancelled_while_it_gathers_is_handled(
    broker: Broker, witness: Witness, register: Callable[..., None]
) -> None:
    """A handler has left the cancellation for later. What is gathered is not lost, and waits no longer for more."""
    tasks: list[asyncio.Task[Any]] = []

    async def handle(n: int) -> None:
        tasks.append(own_task())
        witness.note(n)

    register(broker, handle, concurrency=1, batch=2, linger=timedelta(hours=1))
    async with broker.running():
        await broker.publish_many("t", [{"n": 1}, {"n": 2}])
        await witness.sees([1, 2])
        await settled(broker, "t")
        await broker.publish("t", {"n": 3})
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        await until(
            lambda: any(consumer.pool.running_of(lane) for lane in consumer.lanes.values()), "the third is gathered"
        )
        tasks[-1].cancel()
        await witness.sees([3])
        await settled(broker, "t")


@pytest.mark.parametrize("act", [cancels_itself, has_a_watchdog, awaits_a_cancelled_child])
async def test_message_that_cancels_its_handler_each_time_becomes_a_dead_letter(broker: Broker, act: Act) -> None:
    """It is a failed attempt like any other, with the name of the error."""
    calls: list[int] = []

    @broker.handler("t", group="g", concurrency=1, retry=QUICK)
    async def handle(order: dict[str, int], message: Message) -> None:
        calls.append(message.attempt)
        await act()

    async with broker.running():
        await broker.publish("t", {"n": 1}, key="a")
        assert await dies(broker, "t", "g", 1) == [("failed", b'{"n":1}')]
        topic = await broker.topics.find("t")
        assert topic is not None
        letters = [letter async for letter in broker.dead_letters.iterate(topic, "g")]
    assert calls == [1, 2, 3, 4, 5]
    assert letters[0].error == "CancelledError: the handler, or something that it awaited, was cancelled"


@steady_connections
async def test_time_out_that_a_handler_swallowed_is_not_the_reason_of_the_next_failure(broker: Broker) -> None:
    """The next message fails by itself, in the same task."""

    @broker.handler("t", group="g", concurrency=1, timeout=1, retry=RetryPolicy(max_attempts=1))
    async def handle(order: dict[str, int]) -> None:
        if order["n"] == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await anyio.sleep_forever()
            own_task().uncancel()
        else:
            await awaits_a_cancelled_child()

    async with broker.running():
        for n in (1, 2):
            await broker.publish("t", {"n": n}, key="a")
        assert await dies(broker, "t", "g", 1) == [("failed", b'{"n":2}')]


async def swallows_three_cancellations() -> None:
    """A handler that does not want to end."""
    for _ in range(3):
        with contextlib.suppress(asyncio.CancelledError):
            await anyio.sleep_forever()


@pytest.mark.parametrize("act", [leaves_a_shielded_scope, swallows_three_cancellations])
async def test_pool_that_is_cancelled_ends_whatever_its_handler_does(broker: Broker, act: Act) -> None:
    """The pool ends its tasks by itself, behind any scope, and does not stop at one cancellation."""
    handled: list[int] = []

    @broker.handler("t", group="g", concurrency=1)
    async def handle(order: dict[str, int]) -> None:
        handled.append(order["n"])
        await act()

    task = asyncio.create_task(broker.run())
    async with broker:
        await broker.publish("t", {"n": 1})
        await until(lambda: handled, "it has begun")
        task.cancel()
        await until(task.done, "the worker has ended")
