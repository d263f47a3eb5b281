"""A bare MQTT client for tests: it sends any bytes, and shows every packet that comes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar, Self

from tests.gateway import packets as p
from tests.gateway.packets import Received

SECONDS = 45.0
"""No test waits longer for a packet."""


class RawClient:
    """One connection. `made` collects those of a test, which closes them."""

    made: ClassVar[list[RawClient] | None] = None

    def __init__(self, port: int, level: int = 4) -> None:
        self.port, self.level = port, level
        self.connack: Received | None = None
        self._early = deque[Received]()

    async def open(self) -> Self:
        if RawClient.made is not None:
            RawClient.made.append(self)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def connect(self, client_id: str, **options: Any) -> Self:
        """Open and CONNECT; the CONNACK is in `connack`."""
        await self.open()
        self.send(p.connect(client_id, self.level, **options))
        self.connack = await self.take()
        assert self.connack.kind == 2
        return self

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def take(self, kind: int | None = None) -> Received:
        """The next packet; with `kind` it must be of that kind."""
        got = self._early.popleft() if self._early else await self._read()
        assert kind is None or got.kind == kind, got
        return got

    async def answer(self, kind: int) -> Received:
        """The answer to a request. Messages that come before it are kept for `take`: they may come at any time."""
        while (got := await self._read()).kind == 3:
            self._early.append(got)
        assert got.kind == kind, got
        return got

    async def _read(self) -> Received:
        async with asyncio.timeout(SECONDS):
            head = await self._reader.readexactly(1)
            size = shift = 0
            while True:
                byte = (await self._reader.readexactly(1))[0]
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            return p.read_server_packet(head[0], await self._reader.readexactly(size), self.level)

    async def message(self, *, ack: bool = True) -> Received:
        """The next PUBLISH, acknowledged as far as QoS 1 goes."""
        got = await self.take(3)
        if ack and got.qos == 1:
            self.send(p.ack(4, got.packet_id))
        return got

    async def subscribe(self, *filters: tuple[str, int], packet_id: int = 1, raw_props: bytes = b"") -> bytes:
        """Subscribe, and return the reason codes."""
        self.send(p.subscribe(list(filters), packet_id, self.level, raw_props))
        return (await self.answer(9)).reasons

    async def publish(self, topic: str, payload: bytes, qos: int = 1, packet_id: int = 1, **options: Any) -> int:
        """Publish, go through the handshake, and return the reason code of its first answer."""
        self.send(p.publish(topic, payload, qos, packet_id, self.level, **options))
        if qos == 0:
            return 0
        got = await self.answer(4 if qos == 1 else 5)
        assert got.packet_id == packet_id
        if qos == 2 and got.reason < 0x80:
            self.send(p.ack(6, packet_id))
            assert (await self.answer(7)).packet_id == packet_id
        return got.reason

    async def is_silent(self) -> bool:
        """Whether nothing is under way: the next packet is the answer to this ping."""
        self.send(p.PING)
        return (await self.take()).kind == 13

    async def ended(self) -> Received | None:
        """Wait for the end of the connection. Returns the packet before it, if there is one."""
        last = None
        try:
            while True:
                last = await self.take()
        except (asyncio.IncompleteReadError, ConnectionError):
            return last

    async def disconnect(self) -> None:
        self.send(p.DISCONNECT)
        await self.ended()
        self.close()

    def close(self) -> None:
        """Close the socket without a DISCONNECT."""
        self._writer.close()

    def abort(self) -> None:
        """Reset the connection, if there is one."""
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
