"""Errors inside the context managers that users enter come out as themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings, asgi
from rsmq.telemetry import Endpoint
from rsmq.testing import Harness

Open = Callable[[Broker], AbstractAsyncContextManager[Any]]


def harness(broker: Broker) -> AbstractAsyncContextManager[Any]:
    """The harness for tests."""
    assert broker.settings.url is not None
    return Harness(broker, url=broker.settings.url, prefix=broker.settings.prefix)


@asynccontextmanager
async def session(broker: Broker) -> AsyncIterator[None]:
    """A session of a device."""
    async with broker, broker.connect("d"):
        yield


OPENS: list[Open] = [
    lambda broker: broker,
    lambda broker: broker.running(),
    lambda broker: asgi.lifespan(broker, worker=True)(None),
    lambda broker: Endpoint(broker, "127.0.0.1:0").serving(),
    harness,
    session,
]


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with one handler."""
    broker = Broker(settings)

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        """Handle nothing."""

    return broker


@pytest.mark.parametrize("manager", OPENS)
async def test_error_in_a_block_comes_out_as_itself(broker: Broker, manager: Open) -> None:
    """`except ValueError` around the block catches it."""
    cause = KeyError("cause")
    with pytest.raises(ValueError, match="mine") as caught:
        async with manager(broker):
            raise ValueError("mine") from cause
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is cause or caught.value.__context__ is None


@pytest.mark.parametrize("manager", OPENS)
async def test_group_that_a_block_raises_stays_a_group(broker: Broker, manager: Open) -> None:
    """It is the user's own, also with one error."""
    mine = ExceptionGroup("mine", [ValueError("one")])
    with pytest.raises(ExceptionGroup) as caught:
        async with manager(broker):
            raise mine
    assert caught.value is mine


@asynccontextmanager
async def broken() -> AsyncIterator[None]:
    """A lifespan that fails inside of task groups."""
    async with anyio.create_task_group(), anyio.create_task_group():
        raise LookupError("at the start")
    yield


@pytest.mark.parametrize("manager", [lambda broker: broker.running(), harness])
async def test_error_of_the_worker_comes_out_as_itself(broker: Broker, manager: Open) -> None:
    """Its start fails inside of several task groups."""
    broker.lifespan(broken)
    with pytest.raises(LookupError, match="at the start"):
        async with manager(broker):
            pass


async def test_several_errors_stay_a_group(broker: Broker) -> None:
    """Neither of them is lost."""

    @asynccontextmanager
    async def fails_at_its_end() -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise LookupError("at the end")

    broker.lifespan(fails_at_its_end)
    with pytest.raises(ExceptionGroup) as caught:
        async with broker.running():
            raise ValueError("in the block")
    assert {type(error) for error in caught.value.exceptions} == {ValueError, LookupError}
