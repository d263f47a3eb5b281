"""What a handler leaves behind ends with its message: context variables, and results that were not awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rsmq import Broker, Message, RetryPolicy, Settings
from rsmq.handler.dead_hook import Burial
from rsmq.handler.middleware import Call
from tests.patience import until

TENANT: ContextVar[str] = ContextVar("tenant", default="none")
SEEN = list[str]()
COUNT = 12


def note(number: Any) -> None:
    """What this message sees, and what it sets."""
    SEEN.append(TENANT.get())
    TENANT.set(f"t{number}")


def in_process(number: int) -> None:
    """A handler of another process: an error says what it has seen."""
    seen = TENANT.get()
    TENANT.set(f"t{number}")
    if seen != "none":
        raise ValueError(f"saw {seen}")


async def around(message: Message, call_next: Call) -> Any:
    """A middleware that sets the variable and does not reset it."""
    SEEN.append(TENANT.get())
    TENANT.set("middleware")
    return await call_next(message)


async def single(number: int) -> None:
    note(number)


async def suspends(number: int) -> None:
    await anyio.lowlevel.checkpoint()
    note(number)


async def with_message(number: int, message: Message) -> None:
    note(number)


async def batch(numbers: list[int]) -> None:
    note(numbers[0])


async def fails_first(number: int, message: Message) -> None:
    note(number)
    if message.attempt == 1:
        raise ValueError("the first time")


def in_thread(number: int) -> None:
    note(number)


HANDLERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "payload only": (single, {}),
    "suspends": (suspends, {}),
    "message": (with_message, {}),
    "thread": (in_thread, {}),
    "batch": (batch, {"batch": 1}),
    "one after the other": (single, {"concurrency": 1}),
    "fails first": (fails_first, {"retry": RetryPolicy(max_attempts=2)}),
}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


@pytest.mark.parametrize("has_middleware", [False, True])
@pytest.mark.parametrize("kind", HANDLERS)
async def test_message_does_not_see_the_variables_of_an_earlier_one(
    settings: Settings, kind: str, has_middleware: bool
) -> None:
    """Each begins with the variables of the worker: a tenant of an earlier message must not be that of the next."""
    function, options = HANDLERS[kind]
    broker = Broker(settings)
    TENANT.set("worker")
    broker.handler("orders", group="g", **options)(function)
    if has_middleware:
        broker.middleware(around)
    async with broker.running():
        for number in range(COUNT):
            await broker.publish("orders", number, key="k")
        wanted = COUNT * (1 + has_middleware) * (2 if kind == "fails first" else 1)
        await until(lambda: len(SEEN) >= wanted, "all are handled")
    assert set(SEEN) == ({"worker", "middleware"} if has_middleware else {"worker"})
    if has_middleware:  # the handler sees what the middleware around it has set
        assert SEEN.count("middleware") == wanted // 2


async def test_message_in_a_process_does_not_see_the_variables_of_an_earlier_one(settings: Settings) -> None:
    """The processes of the pool serve one message after the other."""
    broker, dead = Broker(settings), list[str]()
    broker.handler("orders", group="g", execution="process", concurrency=1, retry=RetryPolicy(max_attempts=1))(
        in_process
    )

    @broker.on_dead("orders", group="g")
    async def note_dead(message: Message, burial: Burial) -> None:
        dead.append(burial.error)

    async with broker.running():
        refs = [await broker.publish("orders", number, key="k") for number in range(4)]

        async def is_settled() -> bool:
            group = (await broker.look(refs[-1], topic="orders")).group("g")
            return group is not None and group.state == "settled"

        await until(is_settled, "all are handled")
    assert dead == []


async def test_hooks_leave_no_variable_to_later_messages(settings: Settings) -> None:
    """`on_error` and `on_dead` run between two messages of a task."""
    broker = Broker(settings)

    @broker.on_error
    async def report(message: Message, error: BaseException) -> None:
        TENANT.set("hook")

    @broker.handler("orders", group="g", retry=RetryPolicy(max_attempts=1))
    async def handle(number: int) -> None:
        SEEN.append(TENANT.get())
        raise ValueError("always")

    @broker.on_dead("orders", group="g")
    async def fallback(message: Message, burial: Burial) -> None:
        TENANT.set("hook")

    async with broker.running():
        for number in range(4):
            await broker.publish("orders", number, key="k")
        await until(lambda: len(SEEN) == 4, "all are handled")
    assert set(SEEN) == {"none"}


def bare(function: Callable[..., Awaitable[Any]]) -> Callable[[int], Any]:
    """A decorator without `functools.wraps`: a plain function that returns a coroutine."""

    def wrapper(number: int) -> Any:
        return function(number)

    return wrapper


def returning(function: Callable[..., Awaitable[Any]]) -> Callable[[int], Any]:
    """One that is async, and forgets to await."""

    async def wrapper(number: int) -> Any:
        return function(number)

    return wrapper


@pytest.mark.parametrize("decorator", [bare, returning])
async def test_coroutine_that_a_wrapper_returns_is_awaited(settings: Settings, decorator: Callable[..., Any]) -> None:
    """Without that the message would be settled, and its handler would never have run."""
    broker = Broker(settings)
    broker.handler("orders", group="g")(decorator(suspends))
    async with broker.running():
        await broker.publish("orders", 1)
        await until(lambda: SEEN, "the handler inside has run")


async def test_generator_that_a_wrapper_returns_is_a_failed_attempt(settings: Settings) -> None:
    """Its body has not run, and nothing here could run it."""
    broker, dead = Broker(settings), list[str]()

    def generator(number: int) -> Any:
        yield number

    async def wrapper(number: int) -> Any:
        return generator(number)

    broker.handler("orders", group="g", retry=RetryPolicy(max_attempts=1))(wrapper)

    @broker.on_dead("orders", group="g")
    async def note_dead(message: Message, burial: Burial) -> None:
        dead.append(burial.error)

    async with broker.running():
        await broker.publish("orders", 1)
        await until(lambda: dead, "it is a dead letter")
    assert "generator returned a generator, whose body has not run" in dead[0]
