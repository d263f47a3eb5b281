"""The HTTP endpoint: /metrics, /livez and /readyz, served from threads, so that a blocked loop still answers."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final

import anyio
from pydantic_core import to_json

from rsmq.broker import Broker
from rsmq.errors import ConfigError
from rsmq.telemetry.exposition import Page, page_of
from rsmq.telemetry.figures import Figures
from rsmq.telemetry.health import Limits, Probe, report
from rsmq.telemetry.metric import BLOCKED, LOOP_LAG, Sample
from rsmq.telemetry.stopwatch import Stopwatch
from rsmq.telemetry.watch import Watch

log = logging.getLogger("rsmq.endpoint")

PATIENCE: Final = 5.0
"""Seconds for which a client may keep a thread without saying what it wants."""
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
            raise ConfigError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:9100")
        return cls(match["host"].strip("[]"), int(match["port"]))

    def of_slot(self, slot: int) -> Address:
        """That of one of several processes, which are counted from 1: each has a port of its own."""
        return self if self.port == 0 else Address(self.host, self.port + slot - 1)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Requests(BaseHTTPRequestHandler):
    """One connection: GET and HEAD of a few paths, everything else is an error."""

    timeout = PATIENCE
    server_version = "rsmq"
    sys_version = ""

    def __init__(self, routes: Mapping[str, Route], *args: Any) -> None:
        self._routes = routes
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer."""
        route = self._routes.get(self.path.partition("?")[0])
        if route is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"there is only {' '.join(self._routes)}\n".encode())
            return
        try:
            answer = route(self.headers.get("Accept", ""))
        except Exception as error:  # the boundary of this thread: the next scrape may succeed
            log.exception("%s cannot be answered", self.path)
            answer = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{type(error).__name__}\n".encode()
        self._send(*answer)

    do_HEAD = do_GET  # noqa: N815 - the parent class looks for these names

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Every probe would be a line."""


class Listener(ThreadingHTTPServer):
    """Listens in a thread of its own. Raises ConfigError when the address cannot be had."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Address, routes: Mapping[str, Route]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            super().__init__((address.host, address.port), partial(Requests, routes))
        except OSError as error:
            raise ConfigError(f"nobody can listen at {address}: {error.strerror or error}") from None
        self.address = Address(address.host, self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.1,), name="rsmq-endpoint", daemon=True).start()

    def server_bind(self) -> None:
        """Without asking the name service who we are, as the parent class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self.shutdown()
            self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away."""
        log.debug("a client at %s was lost", client_address, exc_info=True)


class Endpoint:
    """Shows one broker's worker to scrapers and probes.

    `async with endpoint.serving():` around `broker.run()`, or `broker.lifespan(endpoint.serving)`. Making it registers
    the middleware that times handlers, so make it before the broker runs.
    """

    def __init__(self, broker: Broker, address: str | Address) -> None:
        self._broker = broker
        self._address = Address.parse(address) if isinstance(address, str) else address
        self._watch = Watch(broker)
        self._stopwatch = Stopwatch(broker.handlers)
        self._limits = Limits.of(broker.settings)
        self._page: Page = page_of(Figures(broker).read, self._stopwatch.read, self._read_pulse)
        self.address: Address | None = None
        broker.middleware(self._stopwatch)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer for the length of the block."""
        listener = Listener(
            self._address,
            {
                "/metrics": self._metrics,
                "/livez": partial(self._probe, "live"),
                "/readyz": partial(self._probe, "ready"),
            },
        )
        self.address = listener.address
        log.info("metrics and health at http://%s", listener.address)
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._watch.pulse.run)
                yield
                tasks.cancel_scope.cancel()
        finally:
            self.address = None
            listener.close()

    def _read_pulse(self) -> list[Sample]:
        pulse = self._watch.pulse
        return [Sample(LOOP_LAG, (), pulse.lag), Sample(BLOCKED, (), pulse.late)]

    def _metrics(self, accept: str) -> Answer:
        return (HTTPStatus.OK, *self._page(accept))

    def _probe(self, probe: Probe, _accept: str) -> Answer:
        told = report(self._watch.facts(), self._limits, probe)
        status = HTTPStatus.OK if told["status"] == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", to_json(told, indent=2) + b"\n"

    def __repr__(self) -> str:
        return f"<Endpoint {self.address or self._address} {'open' if self.address else 'closed'}>"
