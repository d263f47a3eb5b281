"""rsmq inside FastAPI and Starlette."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from rsmq import Broker, ConfigError, Settings
from rsmq.asgi import connected, lifespan
from tests.contract.witness import Witness

Queue = Annotated[Broker, Depends(connected)]


@pytest.fixture
def broker(server_url: str, prefix: str) -> Broker:
    """On the shared server."""
    return Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application as a server runs it: its lifespan around, its state in every request."""
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


async def test_publish_from_a_request(broker: Broker) -> None:
    """The application is connected as long as it runs; the dependency is its broker; the worker runs beside it."""
    witness, story = Witness(), list[str]()

    @broker.handler("orders", group="g")
    async def handle(order: dict[str, int]) -> None:
        witness.note(order["n"])

    @asynccontextmanager
    async def own(_: Any) -> AsyncIterator[dict[str, str]]:
        story.append("connected" if broker.url else "")
        yield {"mine": "too"}
        story.append("still connected" if broker.url else "")

    app = FastAPI(lifespan=lifespan(broker, worker=True, inside=own))

    @app.post("/orders", status_code=202)
    async def order(order: dict[str, int], queue: Queue, connection: HTTPConnection) -> dict[str, str]:
        return {"id": await queue.publish("orders", order), "state": connection.state.mine}

    async with running(app) as client:
        answer = await client.post("/orders", json={"n": 1})
        assert (answer.status_code, answer.json()["state"]) == (202, "too")
        await witness.sees([1])
    assert story == ["connected", "still connected"]
    with pytest.raises(ConfigError, match="not connected"):
        assert broker.client


async def test_without_a_worker(broker: Broker) -> None:
    """Nothing is handled here, and no handler is needed."""
    app = Starlette(lifespan=lifespan(broker))
    async with running(app):
        assert broker.worker is None
        await broker.publish("orders", {})


async def test_a_test_overrides_the_dependency(broker: Broker) -> None:
    """As any other one."""

    class Fake:
        async def publish(self, *_: Any) -> str:
            return "faked"

    app = FastAPI()

    @app.post("/orders")
    async def order(queue: Queue) -> str:
        return await queue.publish("orders", {})

    app.dependency_overrides[connected] = Fake
    async with running(app) as client:
        assert (await client.post("/orders")).json() == "faked"


async def test_an_application_without_a_lifespan_says_so() -> None:
    """The error names the line to write."""
    app = FastAPI()

    @app.post("/orders")
    async def order(queue: Queue) -> str:
        return await queue.publish("orders", {})

    async with running(app) as client:
        with pytest.raises(ConfigError, match=r"FastAPI\(lifespan=rsmq.asgi.lifespan\(broker\)\)"):
            await client.post("/orders")
