"""Limits for the connections of the dashboard's own server: uvicorn waits for slow clients without end."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rsmq.model.clock import monotonic

PATIENCE: Final = 5.0
"""Seconds for a whole request, its body included."""
READ_PATIENCE: Final = 60.0
"""Seconds in which the client must have read what was written: a script of a megabyte over a slow line."""
MOST_CONNECTIONS: Final = 200
"""Beyond that, each new connection ends the oldest one that waits for its client. WebSockets do not count."""
TURN: Final = 1.0

REQUEST: Final = "request"
RESPONSE: Final = "response"
LIMITS: Final = {REQUEST: PATIENCE, RESPONSE: READ_PATIENCE}


def limited(protocol: type[Any]) -> type[Any]:
    """An HTTP protocol of uvicorn, with a deadline for each part of the client and a bound on connections."""
    connections: dict[Any, None] = {}

    class Limited(protocol):  # type: ignore[misc]
        """One connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(connections) >= MOST_CONNECTIONS:
                end_oldest(connections)
            connections[self] = None
            self._client_part = client_part(self)
            self._part_since = monotonic()
            self._turn = self.loop.call_later(TURN, self._look)

        def connection_lost(self, error: Exception | None) -> None:
            self._forget()
            super().connection_lost(error)

        def _look(self) -> None:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it is a WebSocket now
                self._forget()
                return
            now, part = monotonic(), client_part(self)
            if part != self._client_part:
                self._client_part, self._part_since = part, now
            elif now - self._part_since >= LIMITS.get(part[0], float("inf")):
                self.transport.abort()
            self._turn = self.loop.call_later(TURN, self._look)

        def _forget(self) -> None:
            connections.pop(self, None)
            self._turn.cancel()

    return Limited


def client_part(connection: Any) -> tuple[str, int]:
    """The part of a request that a connection waits for, empty if it waits for the application; and which request."""
    cycle = connection.cycle
    if connection.transport.get_write_buffer_size():
        return RESPONSE, id(cycle)
    return REQUEST if cycle is None or cycle.response_complete or cycle.more_body else "", id(cycle)


def end_oldest(connections: dict[Any, None]) -> None:
    """End the oldest connection that waits for its client; if all wait for the application, the oldest one."""
    oldest = next((each for each in connections if client_part(each)[0]), next(iter(connections)))
    del connections[oldest]
    if oldest.transport.get_protocol() is oldest:
        oldest.transport.abort()
