"""A line that can be cut: a TCP proxy between the workers and their server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self


class Line:
    """Forwards to a port of this machine.

    `cut` is a black hole: sockets stay open, nothing passes in either direction, not even a farewell, until `mend`;
    what was sent meanwhile then arrives late. `reset` breaks all connections at once.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """What is behind this line connects to it."""
        assert self._server is not None, "the line is used inside `async with`"
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def cut(self) -> None:
        """Nothing passes any more."""
        self._is_open.clear()

    def mend(self) -> None:
        """It passes again."""
        self._is_open.set()

    def reset(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = {writer}
        self._writers |= ends
        try:
            await self._is_open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends.add(far_writer)
            self._writers.add(far_writer)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # an end of the line is gone, or the run is over
        finally:
            self._tasks.discard(task)
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end; the farewell passes only through an open line."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
        await self._is_open.wait()
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
