"""Sockets: asyncio protocols that pass bytes on. They know no rule of MQTT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from rsmq.errors import ConfigError
from rsmq.gateway.connections.client import ClientConnection
from rsmq.gateway.connections.client_protocol import ClientProtocol
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.peer import Peer
from rsmq.gateway.connections.proxied import ProxiedServer, bound
from rsmq.gateway.options import MqttAddress

log = logging.getLogger("rsmq.gateway")

BACKLOG: Final = 2_000
"""Connects that wait until they are accepted."""


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

    def eof_received(self) -> bool:
        """The client sends nothing more, but may still read. TLS has no such half of a connection."""
        return self._client is not None and self._socket.can_write_eof() and self._client.half_closed()


async def listen(context: Context, address: MqttAddress) -> asyncio.Server | ProxiedServer:
    """Accept connections on an address. Raises ConfigError where that is not possible."""
    encryption: dict[str, Any] = {}
    if address.is_encrypted:
        seconds = context.rules.options.connect_timeout.total_seconds()
        encryption = {"ssl": context.rules.gatekeeper.encryption, "ssl_handshake_timeout": seconds}
    kind: Callable[..., asyncio.Protocol] = MqttProtocol
    if address.is_web:
        kind = import_module("rsmq.gateway.connections.web_socket").WebSocketProtocol  # its package is an extra
    try:
        if context.rules.proxies:
            sockets = bound(address.host, address.port, BACKLOG)
            return ProxiedServer(context, sockets, lambda client: kind(context, client), encryption)
        return await asyncio.get_running_loop().create_server(
            lambda: kind(context), address.host, address.port, backlog=BACKLOG, reuse_port=True, **encryption
        )
    except OSError as error:
        why = str(error.strerror or error).rpartition(": ")[2]  # asyncio says the address once more
        raise ConfigError(f"cannot listen at {address.host}:{address.port}: {why}") from None
