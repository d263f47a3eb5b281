"""rsmq in an ASGI application (FastAPI, Starlette and what is built on them): a lifespan, and a dependency.

Kept apart from the package's own names, because it needs Starlette, which such an application has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final

from starlette.requests import HTTPConnection

from rsmq.broker import Broker
from rsmq.errors import ConfigError

STATE: Final = "rsmq"

AppLifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def lifespan(broker: Broker, *, worker: bool = False, inside: AppLifespan | None = None) -> AppLifespan:
    """What to pass as `lifespan=` to FastAPI or Starlette: the broker is connected as long as the application runs.

    With `worker` it also runs the handlers, in the application's own event loop, and stops them gracefully before the
    application ends. `inside` is a lifespan of your own, entered after the broker and left before it.
    """

    @asynccontextmanager
    async def surround(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(broker.running() if worker else broker)
            state = None if inside is None else await stack.enter_async_context(inside(app))
            yield {**(state or {}), STATE: broker}

    return surround


async def connected(connection: HTTPConnection) -> Broker:
    """The broker of the application, as a dependency: `Annotated[Broker, Depends(connected)]`.

    Override it in tests as any other (`app.dependency_overrides[connected] = ...`). Raises ConfigError when the
    application was not made with `lifespan`.
    """
    broker = connection.scope.get("state", {}).get(STATE)
    if not isinstance(broker, Broker):
        raise ConfigError("this application has no broker: make it with FastAPI(lifespan=rsmq.asgi.lifespan(broker))")
    return broker
