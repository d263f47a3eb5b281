"""A TCP proxy between the workers and their server: a connection that can be cut, reset, slowed down and narrowed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

RST: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with time 0: close() sends a reset instead of a FIN."""


class Proxy:
    """Forwards to a port of this machine.

    `cut` is a black hole: sockets stay open and nothing passes in either direction, not even a FIN, until `mend`; what
    was sent meanwhile then arrives late. `hold` does that to one direction of one connection. `reset` breaks all
    connections at once. `delay` returns the seconds that each chunk takes; `bytes_per_second` limits each direction of
    a connection (0: no limit).
    """

    def __init__(self, target: int) -> None:
        self.delay: Callable[[], float] | None = None
        self.bytes_per_second = 0
        self._target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._wanted: Callable[[bytes], bool] | None = None
        self._is_released = asyncio.Event()
        self._is_released.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        """The port that clients behind the proxy connect to."""
        assert self._server is not None, "the proxy is used inside `async with`"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """The address that clients behind the proxy connect to."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> int:
        """How many connections pass through it now."""
        return len(self._writers) // 2

    def cut(self) -> None:
        """Let nothing pass."""
        self._is_open.clear()

    def mend(self) -> None:
        """Let everything pass again."""
        self._is_open.set()

    def move(self, target: int) -> None:
        """Forward new connections to another port of this machine."""
        self._target = target

    def hold(self, wanted: Callable[[bytes], bool]) -> None:
        """Keep back the next chunk for which `wanted` is true, and what follows it, until `release`."""
        self._wanted = wanted
        self._is_released = asyncio.Event()

    @property
    def is_holding(self) -> bool:
        """Whether a chunk is kept back now."""
        return self._wanted is None and not self._is_released.is_set()

    def release(self) -> None:
        """Forward what `hold` has kept back, or hold nothing if that has not come yet."""
        self._wanted = None
        self._is_released.set()

    def reset(self) -> int:
        """Break every connection with RST; returns how many sockets that were."""
        broken = list(self._writers)
        for writer in broken:
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            writer.transport.abort()
        return len(broken)

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
            await self._pass(reader, writer, far_reader, far_writer)
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, or the run is over
        finally:
            self._tasks.discard(task)
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        """Forward both directions of one connection until it ends."""
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until it ends; the end, too, passes only when the proxy is not cut."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._is_open.wait()
                if self._wanted is not None and self._wanted(data):
                    self._wanted = None
                    await self._is_released.wait()
                if self.delay is not None:
                    await asyncio.sleep(self.delay())
                if self.bytes_per_second:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
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
