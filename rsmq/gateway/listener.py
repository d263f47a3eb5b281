"""Sockets: asyncio protocols that pass bytes on. They know no rule of MQTT."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, cast

from rsmq.gateway.client import ClientConnection
from rsmq.gateway.context import Context
from rsmq.gateway.options import Address, tls_context

BACKLOG: Final = 2_000
"""Connects that wait until they are accepted."""


class ClientProtocol(asyncio.Protocol):
    """The socket of one client. A subclass makes the connection, and passes the bytes on."""

    __slots__ = ("_client", "_context")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._client: ClientConnection | None = None

    def opened(self, transport: asyncio.BaseTransport) -> asyncio.Transport:
        """The socket, with the bound on what waits to be written."""
        socket = cast("asyncio.Transport", transport)  # those of uvloop are of no class of asyncio
        socket.set_write_buffer_limits(high=self._context.options.write_buffer)
        return socket

    def pause_writing(self) -> None:
        """The client does not read."""
        if self._client is not None:
            self._client.pause_delivery()

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._client is not None:
            self._client.resume_delivery()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        if self._client is not None:
            self._client.lost()


class MqttProtocol(ClientProtocol):
    """A plain or TLS connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._client = ClientConnection(self._context, self.opened(transport))

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        assert self._client is not None
        self._client.received(bytes(data))


async def listen(context: Context, address: Address) -> asyncio.Server:
    """Accept connections on an address."""
    encryption: dict[str, Any] = {}
    if address.is_encrypted:
        seconds = context.options.connect_timeout.total_seconds()
        encryption = {"ssl": tls_context(context.options), "ssl_handshake_timeout": seconds}
    kind: Callable[[Context], asyncio.Protocol] = MqttProtocol
    if address.is_web:
        kind = import_module("rsmq.gateway.web_socket").WebSocketProtocol  # its package is an extra
    return await asyncio.get_running_loop().create_server(
        lambda: kind(context), address.host, address.port, backlog=BACKLOG, reuse_port=True, **encryption
    )
