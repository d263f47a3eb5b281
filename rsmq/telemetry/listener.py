"""The HTTP server of probes and metrics: small, in threads, and bounded in time and number for every client."""

from __future__ import annotations

import errno
import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final

from rsmq.errors import ConfigError
from rsmq.model.clock import monotonic

log = logging.getLogger("rsmq.endpoint")

PATIENCE: Final = 5.0
"""Seconds that a client may take for its whole request, and again for reading the whole answer."""
MOST_CONNECTIONS: Final = 64
"""Beyond that, each new connection ends the oldest one that waits for its client."""
BACKLOG: Final = 128
TURN: Final = 0.1
"""Seconds between two looks at the connections."""
NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})")

Answer = tuple[int, str, bytes]
Route = Callable[[str], Answer]
"""From an `Accept` header to status, content type and body."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `HOST:PORT`. Raises ConfigError."""
        match = ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > 65_535:
            raise ConfigError(f"{text!r} is not a valid address: write HOST:PORT, such as 127.0.0.1:9100")
        return cls(match["host"].strip("[]"), int(match["port"]))

    def of_slot(self, slot: int) -> Address:
        """The address of one of several processes, counted from 1: each has a port of its own."""
        return self if self.port == 0 else Address(self.host, self.port + slot - 1)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connections:
    """The open connections, oldest first, each with the time by which its client must have done its part.

    A connection is ended by `shutdown`, which wakes its thread; only that thread closes the socket.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float | None] = {}

    def add(self, connection: socket.socket) -> None:
        """A new connection, which may end the oldest one."""
        if len(self._deadlines) >= MOST_CONNECTIONS:
            self.end_oldest()
        with self._lock:
            self._deadlines[connection] = monotonic() + PATIENCE

    def remove(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._lock:
            self._deadlines.pop(connection, None)

    def expect(self, connection: socket.socket, seconds: float | None) -> None:
        """Give a client so long for its next part; None while it waits for us."""
        with self._lock:
            if connection in self._deadlines:
                self._deadlines[connection] = None if seconds is None else monotonic() + seconds

    def end_oldest(self) -> None:
        """End the oldest connection that waits for its client; if all wait for us, the oldest one."""
        with self._lock:
            waiting = (each for each, deadline in self._deadlines.items() if deadline is not None)
            oldest = next(waiting, next(iter(self._deadlines), None))
            if oldest is not None:
                self._end(oldest)

    def end_overdue(self) -> None:
        """End the connections whose clients have used up their time."""
        with self._lock:
            now = monotonic()
            for connection, deadline in list(self._deadlines.items()):
                if deadline is not None and deadline < now:
                    self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class Requests(BaseHTTPRequestHandler):
    """One connection: answers GET and HEAD of the routes; everything else is an error."""

    server: Listener
    server_version = "rsmq"
    sys_version = ""

    def __init__(self, routes: Mapping[str, Route], *args: Any) -> None:
        self._routes = routes
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer one request."""
        self.server.connections.expect(self.connection, None)
        path, _, query = self.path.partition("?")
        route = self._routes.get(path)
        if route is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"not found: try {' '.join(self._routes)}\n".encode())
            return
        try:
            answer = route(query if path in self.server.asked else self.headers.get("Accept", ""))
        except Exception as error:  # the boundary of this thread: the next scrape may succeed
            log.exception("%s cannot be answered", self.path)
            answer = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{type(error).__name__}\n".encode()
        self._send(*answer)

    do_HEAD = do_GET  # noqa: N815 - the parent class expects these names

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.server.connections.expect(self.connection, PATIENCE)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """No log: every probe would be a line."""


class Listener(ThreadingHTTPServer):
    """Listens in a thread of its own. Raises ConfigError if it cannot listen at the address.

    A thread serves one connection, and a connection one request. Clients that send nothing, send or read slowly, or are
    too many, are dropped: a new client, such as a probe, always gets through. The routes in `asked` get the query
    instead of the `Accept` header.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # some versions of Python let two servers share a port, and a scrape would see either
    request_queue_size = BACKLOG

    def __init__(self, address: Address, routes: Mapping[str, Route], asked: Mapping[str, Route] | None = None) -> None:
        self.asked = asked or {}
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.connections = Connections()
        try:
            super().__init__((address.host, address.port), partial(Requests, {**routes, **self.asked}))
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from None
        self.address = Address(address.host, self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(TURN,), name="rsmq-endpoint", daemon=True).start()

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the own name, which the parent class makes."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Without a free descriptor the oldest one makes room for the next attempt."""
        try:
            connection, client = super().get_request()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self.connections.end_oldest()
            raise
        self.connections.add(connection)
        return connection, client

    def service_actions(self) -> None:
        """Called after each connection, and at least once in a turn."""
        self.connections.end_overdue()

    def shutdown_request(self, request: Any) -> None:
        """The last step of each connection."""
        self.connections.remove(request)
        super().shutdown_request(request)

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self.shutdown()
            self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client disconnected."""
        log.debug("a client at %s disconnected", client_address, exc_info=True)
