"""Handlers with dependencies: filled per message, cleaned up, and free of charge for all others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import fastapi
import pytest
from fast_depends import Depends, dependency_provider

from rsmq import Broker, ConfigError, Message, Settings
from rsmq.handler import build_handler
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
    """A plain dependency that looks at the message."""
    return message.headers.get("tenant", "nobody")


async def session(who: Annotated[str, Depends(tenant)]) -> AsyncIterator[Session]:
    """An async one, with a dependency of its own and cleanup."""
    STORY.append("open")
    try:
        yield Session(who)
    except ValueError:
        STORY.append("rolled back")
        raise
    finally:
        STORY.append("closed")


def size(order: dict[str, int]) -> int:
    """One that wants the payload, by its name in the handler."""
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
    """Nobody can fill this."""
    return nothing


Db = Annotated[Session, Depends(session)]


@pytest.fixture
def broker() -> Broker:
    """To be pointed at the shared server."""
    return Broker(Settings(url="redis://127.0.0.1:1/0"))


@pytest.fixture
def harness(broker: Broker, server_url: str, prefix: str) -> Harness:
    """Of that broker."""
    return Harness(broker, url=server_url, prefix=prefix)


async def test_a_dependency_is_opened_for_the_message(broker: Broker, harness: Harness) -> None:
    """Before the payload, after it, nested, from message and payload; closed when the handler has ended."""

    @broker.handler("t", group="g")
    async def handle(db: Db, order: dict[str, int], count: Annotated[int, Depends(size)]) -> None:
        STORY.append((db.tenant, order, count))

    async with harness as test:
        [outcome] = await test.publish_and_handle("t", {"n": 1}, headers={"tenant": "ada"})
        assert outcome.is_done
        await test.publish_and_handle("t", {"n": 2})
    assert STORY == ["open", ("ada", {"n": 1}, 1), "closed", "open", ("nobody", {"n": 2}, 1), "closed"]


async def test_the_message_as_well(broker: Broker, harness: Harness) -> None:
    """A handler that takes the message itself shares it with its dependencies, whatever they call it."""

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int], envelope: Message, db: Db) -> None:
        STORY.append((envelope.payload == order, db.tenant))

    async with harness as test:
        await test.publish_and_handle("t", {}, headers={"tenant": "bob"})
    assert STORY == ["open", (True, "bob"), "closed"]


async def test_a_failure_reaches_the_dependency(broker: Broker, harness: Harness) -> None:
    """An error of the handler is raised at the `yield`, so that a session can roll back; the message is retried."""

    @broker.handler("t", group="g")
    async def handle(_order: dict[str, int], db: Db) -> None:
        raise ValueError(db.tenant)

    async with harness as test:
        [outcome] = await test.publish_and_handle("t", {})
        assert (outcome.status, str(outcome.error)) == ("waiting", "nobody")
    assert STORY == ["open", "rolled back", "closed"]


async def test_a_plain_function(broker: Broker, harness: Harness) -> None:
    """It runs in a thread, and so do its dependencies."""

    @broker.handler("t", group="g")
    def handle(order: dict[str, int], db: Session = Depends(plain_session)) -> None:  # noqa: B008  the older spelling
        STORY.append((db.tenant, order["n"]))

    async with harness as test:
        await test.publish_and_handle("t", {"n": 1})
    assert STORY == ["open", ("plain", 1), "closed"]


async def test_a_batch(broker: Broker, harness: Harness) -> None:
    """Dependencies are opened once for all messages of a batch."""

    @broker.handler("t", group="g", batch=10)
    async def handle(orders: list[dict[str, int]], count: Annotated[int, Depends(batch_size)]) -> None:
        STORY.append((len(orders), count))

    async with harness as test:
        await test.publish_and_handle("t", {})
    assert STORY == [(1, 1)]


async def test_a_test_replaces_a_dependency(broker: Broker, harness: Harness) -> None:
    """fast-depends' own provider overrides it."""

    @broker.handler("t", group="g")
    async def handle(_order: dict[str, int], db: Db) -> None:
        STORY.append(db.tenant)

    dependency_provider.override(session, lambda: Session("fake"))
    async with harness as test:
        await test.publish_and_handle("t", {})
    assert STORY == ["fake"]


def test_others_do_not_pay() -> None:
    """A handler without dependencies is called as it is: there is nothing in between."""

    async def handle(order: dict[str, int]) -> None: ...
    async def whole(message: Message) -> None: ...

    assert build_handler(handle, "t", group="g").signature.function is handle
    assert build_handler(whole, "t", group="g").invoke is whole


async def wrong_fastapi(order: dict[str, int], db: Annotated[Session, fastapi.Depends(session)]) -> None:
    """The Depends of another library."""


async def wrong_name(order: dict[str, int], n: Annotated[int, Depends(unknown)]) -> None:
    """A dependency with a parameter that nobody fills."""


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
        (wrong_name, {}, "nobody can fill 'nothing' of dependency unknown"),
        (wrong_kind, {}, "make the handler async def"),
        (elsewhere, {"execution": "process"}, "dependencies cannot go to another process"),
        (wrong_shape, {"batch": 10}, "dependency tenant must ask for `list.Message.`"),
    ],
)
def test_mistakes(function: Any, options: dict[str, Any], problem: str) -> None:
    """What cannot work is refused when it is registered."""
    with pytest.raises(ConfigError, match=problem):
        build_handler(function, "t", group="g", **options)
