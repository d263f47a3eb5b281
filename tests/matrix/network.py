"""A proxy with permanent network faults: the contract tests run through it."""

from __future__ import annotations

import asyncio
import random
import ssl
from typing import Final, Literal, Self

from rsmq.testing.proxy import Proxy

Fault = Literal["delays", "cuts", "lost-replies", "black-holes"]

LATENCY: Final = (0.0, 0.006)
"""The range of seconds that each chunk is delayed, in each direction. Chunks keep their order."""
LOST: Final = 0.02
"""The share of the server's chunks that never arrive. TCP has no gaps, so the connection ends there."""
CUT_EVERY: Final = (0.4, 1.2)
HOLE_EVERY: Final = (0.5, 2.0)
HOLE: Final = (0.1, 0.4)
"""Seconds. Shorter than the shortest lease of the contract suite (1 s): longer ones are in tests/chaos."""


class FaultyProxy(Proxy):
    """A proxy with one kind of fault, from a fixed seed. With `tls` it terminates TLS and requires a certificate."""

    def __init__(self, target: int, fault: Fault | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(target)
        self._fault, self._tls, self._random = fault, tls, random.Random(1)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault in ("delays", "lost-replies"):
            await self._forward(reader, writer)
        else:
            await super()._pump(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_reply = writer.get_extra_info("peername")[1] != self._target
        try:
            while data := await reader.read(1 << 16):
                if self._fault == "delays":
                    await asyncio.sleep(self._random.uniform(*LATENCY))
                elif is_reply and self._random.random() < LOST:
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other end is gone
        writer.transport.abort()

    async def _inject(self) -> None:
        while self._fault == "cuts":
            await asyncio.sleep(self._random.uniform(*CUT_EVERY))
            self.reset()
        while self._fault == "black-holes":
            await asyncio.sleep(self._random.uniform(*HOLE_EVERY))
            self.cut()
            await asyncio.sleep(self._random.uniform(*HOLE))
            self.mend()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self._task = asyncio.create_task(self._inject())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await super().__aexit__(*error)
