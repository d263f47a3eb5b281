"""Lines that do what networks do, without end: the tests of the contract run over them."""

from __future__ import annotations

import asyncio
import random
import ssl
from typing import Final, Literal, Self

from tests.chaos.proxy import Proxy

Weather = Literal["delays", "cuts", "lost-replies", "black-holes"]

LATENCY: Final = (0.0, 0.006)
"""Seconds that every piece is late, in each direction, in order."""
LOST: Final = 0.02
"""The part of the server's pieces that never arrive: TCP has no holes, so the connection ends there."""
CUT_EVERY: Final = (0.4, 1.2)
HOLE_EVERY: Final = (0.5, 2.0)
HOLE: Final = (0.1, 0.4)
"""Seconds. Shorter than the shortest lease of the contract suite (1 s): longer ones are in tests/chaos."""


class Line(Proxy):
    """A proxy under one kind of weather, from a seed; with `tls`, one that ends TLS and asks for a certificate."""

    def __init__(self, target: int, weather: Weather | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(target)
        self._weather, self._tls, self._random = weather, tls, random.Random(1)
        self._clouds: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where clients connect to."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._weather in ("delays", "lost-replies"):
            await self._pass_on(reader, writer)
        else:
            await super()._pump(reader, writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_reply = writer.get_extra_info("peername")[1] != self._target
        try:
            while data := await reader.read(1 << 16):
                if self._weather == "delays":
                    await asyncio.sleep(self._random.uniform(*LATENCY))
                elif is_reply and self._random.random() < LOST:
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other end is gone
        writer.transport.abort()

    async def _blow(self) -> None:
        while self._weather == "cuts":
            await asyncio.sleep(self._random.uniform(*CUT_EVERY))
            self.reset()
        while self._weather == "black-holes":
            await asyncio.sleep(self._random.uniform(*HOLE_EVERY))
            self.cut()
            await asyncio.sleep(self._random.uniform(*HOLE))
            self.mend()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self._clouds = asyncio.create_task(self._blow())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._clouds is not None
        self._clouds.cancel()
        await asyncio.gather(self._clouds, return_exceptions=True)
        await super().__aexit__(*error)
