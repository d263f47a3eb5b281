"""Connections that write in one piece, notice that they are lost, and wait for a server that reads too slowly.

asyncio's own `writelines`, which redis-py calls, did neither of the last two from Python 3.12 on, until it was mended:
what a server did not take was piled up in our memory without end (until December 2024, gh-127655). On a lost connection
it raised AttributeError, or left the number of the closed socket with the event loop, where it disturbed the next one
that got it (until the end of 2025 in 3.13 and 3.14, never mended in 3.12; gh-136234). `write` does all three.
"""

from __future__ import annotations

from asyncio import StreamWriter
from collections.abc import Iterable
from functools import cache
from typing import Any

from redis.asyncio.connection import AbstractConnection


class Writer(StreamWriter):
    """What is written by several pieces goes out as one, as it does on Python 3.11."""

    def writelines(self, data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(data))


class Whole(AbstractConnection):
    """A connection with such a writer. redis-py has asyncio make the writer, so it is given its class afterwards."""

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[safe-super, no-untyped-call]
        self._writer.__class__ = Writer


@cache
def whole(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same kind of connection, with such a writer."""
    return type(kind.__name__, (Whole, kind), {})


def write_whole(pool: Any) -> None:
    """From here on the connections of a pool do. To be said afterwards: the scheme of a URL overrides a given class."""
    if not issubclass(pool.connection_class, Whole):
        pool.connection_class = whole(pool.connection_class)
