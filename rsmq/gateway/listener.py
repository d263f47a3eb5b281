"""Sockets: asyncio protocols that pass bytes on. They know no rule of MQTT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, cast

from rsmq.errors import Malformed
from rsmq.gateway.client import ClientConnection
from rsmq.gateway.context import Context
from rsmq.gateway.options import Address
from rsmq.gateway.peer import Peer, is_in, read_proxy, user_of

log = logging.getLogger("rsmq.gateway")

BACKLOG: Final = 2_000
"""Connects that wait until they are accepted."""


class ClientProtocol(asyncio.Protocol):
    """The socket of one client. A subclass makes the connection, and passes the bytes on."""

    __slots__ = ("_client", "_context", "_header", "_is_counted", "_peer", "_socket")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._client: ClientConnection | None = None
        self._header: bytes | None = None
        """What has come of a header of the PROXY protocol, while it is not complete."""
        self._peer = Peer()
        self._is_counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, or a load balancer for one."""
        socket = self._socket = cast("asyncio.Transport", transport)  # those of uvloop are of no class of asyncio
        socket.set_write_buffer_limits(high=self._context.options.write_buffer)
        address, user = (socket.get_extra_info("peername") or ("",))[0], None
        if self._context.options.client_ca is not None and socket.get_extra_info("sslcontext") is not None:
            user = user_of(socket.get_extra_info("peercert") or {}, self._context.options.certificate_user)
        self._peer = Peer(address, user)
        if is_in(address, self._context.proxies):
            self._header = b""
            seconds = self._context.options.connect_timeout.total_seconds()
            self._context.wheel.add(self._context.loop_time + seconds, self._header_deadline)
        else:
            self._start()

    def _start(self) -> None:
        """Its address is known."""
        context, address = self._context, self._peer.address
        most = context.options.most_per_address
        if most and context.addresses[address] >= most:
            context.counts["refused: most_per_address"] += 1
            context.refusals.warn("clients are refused, most_per_address", f"{address} has its most connections")
            self._socket.close()
            return
        context.addresses.add(address)
        self._is_counted = True
        self.started(self._socket, self._peer)

    def _header_deadline(self, _now: float) -> float | None:
        """A load balancer that does not say for whom it has connected is closed."""
        if self._header is not None:
            self._socket.close()
        return None

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        data = bytes(data)
        if self._header is not None:
            self._header += data
            try:
                found = read_proxy(self._header)
            except Malformed as error:
                self._context.refusals.warn(
                    "connections of load balancers are closed", f"{self._peer.address}: {error}"
                )
                self._context.counts["refused: proxy protocol"] += 1
                self._socket.abort()
                return
            if found is None:
                return
            address, size = found
            data, self._header = self._header[size:], None
            self._peer = self._peer._replace(address=address or self._peer.address)
            self._start()
        if data and not self._socket.is_closing():
            self.bytes_came(data)

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
        self._header = None
        if self._is_counted:
            self._context.addresses.remove(self._peer.address)
        if self._client is not None:
            self._client.lost()


class MqttProtocol(ClientProtocol):
    """A plain or TLS connection."""

    __slots__ = ()

    def started(self, transport: asyncio.Transport, peer: Peer) -> None:
        """Its packets may come."""
        self._client = ClientConnection(self._context, transport, peer)

    def bytes_came(self, data: bytes) -> None:
        """Some of them have."""
        assert self._client is not None
        self._client.received(data)


async def listen(context: Context, address: Address) -> asyncio.Server:
    """Accept connections on an address."""
    encryption: dict[str, Any] = {}
    if address.is_encrypted:
        seconds = context.options.connect_timeout.total_seconds()
        encryption = {"ssl": context.gatekeeper.encryption, "ssl_handshake_timeout": seconds}
    kind: Callable[[Context], asyncio.Protocol] = MqttProtocol
    if address.is_web:
        kind = import_module("rsmq.gateway.web_socket").WebSocketProtocol  # its package is an extra
    return await asyncio.get_running_loop().create_server(
        lambda: kind(context), address.host, address.port, backlog=BACKLOG, reuse_port=True, **encryption
    )
