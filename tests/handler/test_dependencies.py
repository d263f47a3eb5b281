"""Handlers with dependencies: filled and cleaned up per message, without a cost for other handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Annotated, Any

import fastapi
import pytest
from fast_depends import Depends, dependency_provider
from fast_depends.core import CallModel
from tenacity import wait_fixed

from rsmq import Broker, ConfigError, Message, RetryPolicy, Settings
from rsmq.handler.dependencies import with_dependencies
from rsmq.handler.handler import build_handler
from rsmq.model.message import MessageOrigin
from rsmq.testing import Harness

STORY: list[Any] = []


class Session:
    """What a dependency opens."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


@pytest.fixture(autouse=True)
def _story() -> Iterator[None]:
    """Empty before each test."""
    STORY.clear()
    yield
    dependency_provider.clear()


def tenant(message: Message) -> str:
    """A plain dependency that reads the message."""
    return message.headers.get("tenant", "nobody")


async def session(who: Annotated[str, Depends(tenant)]) -> AsyncIterator[Session]:
    """An async dependency with a dependency of its own and cleanup."""
    STORY.append("open")
    try:
        yield Session(who)
    except ValueError:
        STORY.append("rolled back")
        raise
    finally:
        STORY.append("closed")


def size(order: dict[str, int]) -> int:
    """A dependency that takes the payload, by its name in the handler."""
    return len(order)


def plain_session() -> Iterator[Session]:
    """For plain functions."""
    STORY.append("open")
    yield Session("plain")
    STORY.append("closed")


def batch_size(messages: list[Message]) -> int:
    """For batch handlers."""
    return len(messages)


def unknown(nothing: int) -> int:
    """A dependency with a parameter that nothing fills."""
    return nothing


Db = Annotated[Session, Depends(session)]


@pytest.fixture
def broker() -> Broker:
    """A broker for the harness."""
    return Broker(Settings(url="redis://127.0.0.1:1/0"))


@pytest.fixture
def harness(broker: Broker, server_url: str, prefix: str) -> Harness:
    """A harness of that broker."""
    return Harness(broker, url=server_url, prefix=prefix)


async def test_dependency_is_opened_and_closed_for_each_message(broker: Broker, harness: Harness) -> None:
    """Parameters before and after the payload, nested, with message and payload; closed after the handler."""

    @broker.handler("t", group="g")
    async def handle(db: Db, order: dict[str, int], count: Annotated[int, Depends(size)]) -> None:
        STORY.append((db.tenant, order, count))

    async with harness as test:
        [outcome] = await test.publish_and_handle("t", {"n": 1}, headers={"tenant": "ada"})
        assert outcome.is_done
        await test.publish_and_handle("t", {"n": 2})
    assert STORY == ["open", ("ada", {"n": 1}, 1), "closed", "open", ("nobody", {"n": 2}, 1), "closed"]


async def test_handler_gets_dependency_and_message(broker: Broker, harness: Harness) -> None:
    """The handler and its dependencies get the same message, under any parameter names."""

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int], envelope: Message, db: Db) -> None:
        STORY.append((envelope.payload == order, db.tenant))

    async with harness as test:
        await test.publish_and_handle("t", {}, headers={"tenant": "bob"})
    assert STORY == ["open", (True, "bob"), "closed"]


async def test_handler_error_reaches_the_dependency(broker: Broker, harness: Harness) -> None:
    """The error is raised at the `yield`, so a session can roll back; the message is retried."""

    @broker.handler("t", group="g", retry=RetryPolicy(wait=wait_fixed(3600)))  # the second attempt is not looked at
    async def handle(_order: dict[str, int], db: Db) -> None:
        raise ValueError(db.tenant)

    async with harness as test:
        [outcome] = await test.publish_and_handle("t", {})
        assert (outcome.status, str(outcome.error)) == ("waiting", "nobody")
    assert STORY == ["open", "rolled back", "closed"]


async def test_plain_function_gets_its_dependencies(broker: Broker, harness: Harness) -> None:
    """The function and its dependencies run in a thread."""

    @broker.handler("t", group="g")
    def handle(order: dict[str, int], db: Session = Depends(plain_session)) -> None:  # noqa: B008  the older spelling
        STORY.append((db.tenant, order["n"]))

    async with harness as test:
        await test.publish_and_handle("t", {"n": 1})
    assert STORY == ["open", ("plain", 1), "closed"]


async def test_batch_handler_gets_its_dependencies(broker: Broker, harness: Harness) -> None:
    """Dependencies are opened once for all messages of a batch."""

    @broker.handler("t", group="g", batch=10)
    async def handle(orders: list[dict[str, int]], count: Annotated[int, Depends(batch_size)]) -> None:
        STORY.append((len(orders), count))

    async with harness as test:
        await test.publish_and_handle("t", {})
    assert STORY == [(1, 1)]


async def test_dependency_can_be_overridden_in_a_test(broker: Broker, harness: Harness) -> None:
    """The provider of fast-depends overrides it."""

    @broker.handler("t", group="g")
    async def handle(_order: dict[str, int], db: Db) -> None:
        STORY.append(db.tenant)

    dependency_provider.override(session, lambda: Session("fake"))
    async with harness as test:
        await test.publish_and_handle("t", {})
    assert STORY == ["fake"]


def test_handler_without_dependencies_is_not_wrapped() -> None:
    """The handler calls the function itself."""

    async def handle(order: dict[str, int]) -> None: ...
    async def whole(message: Message) -> None: ...

    assert build_handler(handle, "t", group="g").signature.function is handle
    assert build_handler(whole, "t", group="g").invoke is whole


async def wrong_fastapi(order: dict[str, int], db: Annotated[Session, fastapi.Depends(session)]) -> None:
    """The Depends of another library."""


async def wrong_name(order: dict[str, int], n: Annotated[int, Depends(unknown)]) -> None:
    """A handler whose dependency has a parameter that nothing fills."""


def wrong_kind(order: dict[str, int], db: Db) -> None:
    """An async dependency in a plain function."""


def elsewhere(order: dict[str, int], db: Annotated[Session, Depends(plain_session)]) -> None:
    """For another process."""


async def wrong_shape(orders: list[dict[str, int]], who: Annotated[str, Depends(tenant)]) -> None:
    """A dependency of single messages in a batch."""


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        (wrong_fastapi, {}, "'db' has the Depends of fastapi, .* write `from fast_depends import Depends`"),
        (wrong_name, {}, "nothing fills 'nothing' of dependency unknown"),
        (wrong_kind, {}, "make the handler async def"),
        (elsewhere, {"execution": "process"}, "dependencies cannot be sent to another process"),
        (wrong_shape, {"batch": 10}, "dependency tenant must take `list.Message.`"),
    ],
)
def test_impossible_dependency_is_refused(function: Any, options: dict[str, Any], problem: str) -> None:
    """The error comes when the handler is registered."""
    with pytest.raises(ConfigError, match=problem):
        build_handler(function, "t", group="g", **options)


def traced(name: str) -> Any:
    """A dependency that tells when it is opened and closed."""

    async def dependency(message: Message) -> AsyncIterator[str]:
        STORY.append(f"open {name}")
        try:
            yield f"{name} of {message.payload}"
        finally:
            STORY.append(f"close {name}")

    return dependency


def plain_traced(order: int) -> Iterator[str]:
    """The same for plain functions, by the payload."""
    STORY.append("open")
    try:
        yield f"of {order}"
    finally:
        STORY.append("close")


FIRST, SECOND, COUNT = traced("first"), traced("second"), iter(range(100))


async def number(order: int) -> int:
    """An async dependency without cleanup."""
    return order + 1


async def counted(message: Message) -> int:
    """Another value at each call."""
    return next(COUNT)


async def swallowing(message: Message) -> AsyncIterator[None]:
    """A dependency that hides errors of the handler."""
    with suppress(ValueError):
        yield


def message_of(payload: int) -> Message:
    """A message as a worker has it."""
    message = Message(MessageOrigin("t", 0, "g"), b"5-0", [b"data", b"5"])
    message.payload = payload
    return message


async def test_simple_dependencies_are_filled_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, and closed in the other one, also after an error."""

    async def handle(
        order: int,
        one: Annotated[str, Depends(FIRST)],
        two: Annotated[str, Depends(SECOND)],
        three: Annotated[int, Depends(number)],
    ) -> str:
        STORY.append((one, two, three))
        if order < 0:
            raise ValueError("negative")
        return "done"

    monkeypatch.setattr(CallModel, "asolve", None)
    call = with_dependencies(handle, "t/g", is_batch=False)
    expected = ["open first", "open second", ("first of 7", "second of 7", 8), "close second", "close first"]
    assert await call(7, message_of(7)) == "done"
    assert expected == STORY
    with pytest.raises(ValueError, match="negative"):
        await call(-7, message_of(-7))
    assert STORY[-2:] == ["close second", "close first"]


def test_simple_dependency_of_a_plain_function_is_filled_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the payload alone; the handler can have it by position."""

    def handle(order: int, db: Annotated[str, Depends(plain_traced)]) -> None:
        STORY.append(db)

    monkeypatch.setattr(CallModel, "solve", None)
    with_dependencies(handle, "t/g", is_batch=False)(7)
    assert STORY == ["open", "of 7", "close"]


async def test_simple_dependency_can_be_overridden_in_a_test() -> None:
    """Also after its handler was registered, and only for that time."""

    async def handle(order: int, one: Annotated[int, Depends(number)]) -> int:
        return one

    call = with_dependencies(handle, "t/g", is_batch=False)
    dependency_provider.override(number, lambda: 100)
    assert await call(7) == 100
    dependency_provider.clear()
    assert await call(7) == 8


async def test_dependency_of_two_parameters_is_called_once() -> None:
    """As fast-depends does."""

    async def handle(
        order: int, one: Annotated[int, Depends(counted)], two: Annotated[int, Depends(counted)]
    ) -> tuple[int, int]:
        return one, two

    one, two = await with_dependencies(handle, "t/g", is_batch=False)(7, message_of(7))
    assert one == two


async def test_dependency_that_swallows_an_error_fails_the_message() -> None:
    """It would be settled as if it was handled."""

    async def handle(order: int, one: Annotated[None, Depends(swallowing)]) -> None:
        raise ValueError

    with pytest.raises(RuntimeError, match="dependency for 'one' has swallowed an error of the handler"):
        await with_dependencies(handle, "t/g", is_batch=False)(7, message_of(7))
