"""Services: work that each worker of a broker runs beside its handlers, such as the relay of an outbox."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Service(Protocol):
    """An object that `broker.include` takes, or whose method is a dependency of a handler.

    Each worker runs `serve` in a task, with the `ServerContext` of its connection, and cancels it when it stops. After
    an error it is called again.
    """

    async def serve(self, context: Any) -> None: ...
