"""A bell: one thread waits for a connection, any other can end that wait at once."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from typing import Any, Final

AT_MOST: Final = 0.2
"""Seconds between two looks where the connection does not show its socket (redis-py's private name has changed)."""


class Bell:
    """A pair of sockets beside the connection: who waits, waits for both.

    Rung while nobody waits, it ends the next wait. Rung again before that, it has been rung once.
    """

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def ring(self) -> None:
        """From any thread, also after it was taken down."""
        with suppress(OSError):  # full: it has been rung often enough
            self._there.send(b"\0")

    def wait(self, connection: Any, seconds: float) -> bool:
        """Until there is something to read (True), the bell has been rung, or the time is over."""
        if connection.can_read(timeout=0):  # some of it may be out of the socket already
            return True
        line = getattr(connection, "_sock", None)
        if line is None:
            return bool(connection.can_read(timeout=min(seconds, AT_MOST)))
        with selectors.PollSelector() as selector:
            selector.register(line, selectors.EVENT_READ)
            selector.register(self._here, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        if self._here in ready:
            with suppress(BlockingIOError):
                self._here.recv(4096)
        return line in ready

    def take_down(self) -> None:
        """Nobody waits any more."""
        self._here.close()
        self._there.close()

    def __repr__(self) -> str:
        return f"<Bell {'down' if self._here.fileno() < 0 else 'up'}>"
