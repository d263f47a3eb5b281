"""Connections of load balancers: the header of the PROXY protocol is read first, and TLS begins behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from rsmq.errors import Malformed
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.peer import is_in, read_proxy

ACCEPTS: Final = 100
"""Connections that are accepted in one turn of the loop."""
LONGEST: Final = 4096
"""Bytes that are looked at in one step."""

Make = Callable[[str], asyncio.Protocol]
"""The protocol of a client with this address; empty for the load balancer itself."""


class ProxiedServer:
    """Listens on sockets as an `asyncio.Server` does.

    A header is read from the socket itself, and not a byte more: what follows may be the begin of a TLS handshake,
    which asyncio has to read. Connections of other addresses have no header.
    """

    def __init__(
        self, context: Context, sockets: Sequence[socket.socket], make: Make, encryption: dict[str, Any]
    ) -> None:
        self.sockets = list(sockets)
        self._context = context
        self._make = make
        self._encryption = encryption
        self._loop = asyncio.get_running_loop()
        self._tasks = set[asyncio.Task[None]]()
        for each in self.sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._accept, each)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # no file descriptor is left, or the client has gone
                self._context.counts.warn("connections cannot be accepted", error)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._serve(accepted, address[0]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, address: str) -> None:
        """Read the header, and hand the socket over."""
        context, found = self._context, address
        try:
            if is_in(address, context.rules.proxies):
                async with asyncio.timeout(context.rules.options.connect_timeout.total_seconds()):
                    found = await self._header(accepted) or address
        except BaseException as error:
            accepted.close()
            if not isinstance(error, (Malformed, OSError)):
                raise
            context.counts["refused: proxy protocol"] += 1
            text = str(error) or "its header of the PROXY protocol is not complete"
            context.counts.warn("connections of load balancers are closed", f"{address}: {text}")
            return
        with contextlib.suppress(OSError):  # it has gone, or its handshake has failed: the socket is closed
            await self._loop.connect_accepted_socket(lambda: self._make(found), accepted, **self._encryption)

    async def _header(self, accepted: socket.socket) -> str | None:
        """The address of the client, or None if the load balancer speaks for itself."""
        read = b""
        while True:
            await self._readable(accepted)
            try:
                seen = accepted.recv(LONGEST, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                continue
            if not seen:
                raise Malformed("it has closed before its header")
            found = read_proxy(read + seen)
            if found is None:
                read += accepted.recv(len(seen))  # all of it belongs to the header
                continue
            address, size = found
            accepted.recv(size - len(read))
            return address

    async def _readable(self, accepted: socket.socket) -> None:
        """Wait until there is something to read."""
        ready = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(accepted, wake)
        try:
            await ready
        finally:
            self._loop.remove_reader(accepted)

    def close(self) -> None:
        """Stop listening. Connections that are not handed over yet are closed."""
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        for task in self._tasks:
            task.cancel()

    def __repr__(self) -> str:
        return f"<ProxiedServer beginning={len(self._tasks)}>"


def bound(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host. Several processes may share a port."""
    found = list[socket.socket]()
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            made = socket.socket(family, kind, protocol)
            found.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(address)
            made.listen(backlog)
    except OSError:
        for each in found:
            each.close()
        raise
    return found
