"""A line that can be cut: a TCP proxy between a worker and its server."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Self

RST = struct.pack("ii", 1, 0)
"""SO_LINGER with time 0: close() sends a reset instead of a farewell."""


class Proxy:
    """Forwards to a port of this machine.

    `cut` is a black hole: sockets stay open, nothing passes in either direction, not even a farewell, until `mend`;
    what was sent meanwhile then arrives late, as it does over TCP. `reset` breaks all connections at once. `delay` says
    for each piece how many seconds it takes, `bytes_per_second` how much passes in each direction of a connection.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay: Callable[[], float] | None = None
        self.bytes_per_second = 0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """What a worker behind this line connects to."""
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    @property
    def connections(self) -> int:
        """How many pass through it now."""
        return len(self._writers) // 2

    def cut(self) -> None:
        """Nothing passes any more."""
        self._open.clear()

    def mend(self) -> None:
        """It passes again."""
        self._open.set()

    def reset(self) -> int:
        """Break every connection with RST; returns how many ends."""
        broken = len(self._writers)
        for writer in list(self._writers):
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            writer.transport.abort()
        return broken

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # an end of the line is gone, or the test is over
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end; the farewell passes only through an open line."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                if self.delay is not None:
                    await asyncio.sleep(self.delay())
                if self.bytes_per_second:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
                writer.write(data)
                await writer.drain()
        await self._open.wait()
        writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
