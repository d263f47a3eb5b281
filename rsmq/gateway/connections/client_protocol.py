"""The socket of a client: what plain connections and WebSockets share. It knows no rule of MQTT."""

from __future__ import annotations

import asyncio
from typing import cast

from rsmq.gateway.connections.client import ClientConnection
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.peer import Peer, user_of


class ClientProtocol(asyncio.Protocol):
    """The socket of one client. A subclass makes the connection, and passes the bytes on.

    `address`: that of the client, if a load balancer has connected for it.
    """

    __slots__ = ("_client", "_context", "_is_counted", "_peer", "_socket")

    def __init__(self, context: Context, address: str = "") -> None:
        self._context = context
        self._client: ClientConnection | None = None
        self._peer = Peer(address)
        self._is_counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        rules, user = self._context.rules, None
        socket = self._socket = cast("asyncio.Transport", transport)  # those of uvloop are of no class of asyncio
        socket.set_write_buffer_limits(high=rules.options.write_buffer)
        address = self._peer.address or (socket.get_extra_info("peername") or ("",))[0]
        if rules.options.client_ca is not None and socket.get_extra_info("sslcontext") is not None:
            user = user_of(socket.get_extra_info("peercert") or {}, rules.options.certificate_user)
        self._peer = Peer(address, user)
        if not self._context.clients.open_socket(address):
            socket.close()
            return
        self._is_counted = True
        self.started(socket, self._peer)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if not self._socket.is_closing():
            self.bytes_came(bytes(data))

    def started(self, transport: asyncio.Transport, peer: Peer) -> None:
        """The bytes of a client may come."""
        raise AssertionError("a subclass says what begins")

    def bytes_came(self, data: bytes) -> None:
        """Bytes of the client have come."""
        raise AssertionError("a subclass says what they are")

    def pause_writing(self) -> None:
        """The client does not read."""
        if self._client is not None:
            self._client.pause_delivery(is_paused=True)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._client is not None:
            self._client.pause_delivery(is_paused=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        if self._is_counted:
            self._context.clients.close_socket(self._peer.address)
        if self._client is not None:
            self._client.ended()
