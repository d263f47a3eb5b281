"""The listener with clients that send slowly, read slowly or are many: real sockets, no server behind it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import HTTPServer

import pytest

from rsmq import ConfigError
from rsmq.telemetry import listener as module
from rsmq.telemetry.listener import MOST_CONNECTIONS, Address, Listener
from tests.servers import wait_until

BIG = b"x" * (64 << 20)
"""More than the buffers of a connection hold."""
FEW_DESCRIPTORS = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from rsmq.telemetry import listener as module
module.PATIENCE = 3600
listener = module.Listener(module.Address("127.0.0.1", 0), {"/livez": lambda _: (200, "text/plain", b"ok")})
print(listener.address.port, flush=True)
sys.stdin.read()
"""


class Clients:
    """Connections to one port."""

    def __init__(self, port: int) -> None:
        self._port, self._stack = port, ExitStack()

    def connect(self, count: int = 1, sent: bytes = b"", buffer: int = 0) -> list[socket.socket]:
        """New connections that have sent this."""
        found = []
        for _ in range(count):
            client = self._stack.enter_context(socket.socket())
            if buffer:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            client.settimeout(20)
            client.connect(("127.0.0.1", self._port))
            client.sendall(sent)
            found.append(client)
        return found

    def ask(self, path: str) -> bytes:
        """All that one request gets."""
        (client,) = self.connect(sent=f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(1 << 16), b""))

    def close(self) -> None:
        """Close all."""
        self._stack.close()


def is_dropped(client: socket.socket) -> bool:
    """Whether the other side has ended this connection."""
    if not select.select([client], [], [], 0)[0]:
        return False
    try:
        return not client.recv(1)
    except OSError:
        return True


@pytest.fixture
def listen() -> Iterator[Callable[[], Clients]]:
    """Start a listener with two pages; gives its clients."""
    with ExitStack() as stack:

        def start() -> Clients:
            pages = {"/livez": (200, "text/plain", b"ok"), "/big": (200, "text/plain", BIG)}
            routes = {path: lambda _, page=page: page for path, page in pages.items()}
            listener = Listener(Address("127.0.0.1", 0), routes)
            stack.callback(listener.close)
            clients = Clients(listener.address.port)
            stack.callback(clients.close)
            return clients

        yield start


def threads() -> int:
    """How many threads answer requests."""
    return sum("process_request_thread" in each.name for each in threading.enumerate())


def test_request_that_comes_byte_by_byte_is_dropped(
    listen: Callable[[], Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patience is for the whole request: further bytes do not prolong it."""
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    clients = listen()
    slow = clients.connect(20, sent=b"GET /livez HTTP/1.1\r\nX: ")

    def all_are_dropped() -> bool:
        for client in slow[:]:
            with suppress(OSError):
                client.send(b"x")
            if is_dropped(client):
                slow.remove(client)
        return not slow

    wait_until(all_are_dropped, "every slow client is dropped")
    assert clients.ask("/livez").endswith(b"ok")


def test_response_that_is_not_read_is_dropped(listen: Callable[[], Clients], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads a byte now and then keeps a thread no longer than the patience."""
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    clients = listen()
    slow = clients.connect(5, sent=b"GET /big HTTP/1.0\r\n\r\n", buffer=4096)
    wait_until(lambda: threads() == 5, "all are answered")

    def are_gone() -> bool:
        for client in slow:
            with suppress(OSError):
                client.recv(1)
        return not threads()

    wait_until(are_gone, "no thread waits for a reader")
    assert clients.ask("/livez").endswith(b"ok")


def test_probe_is_answered_beside_any_number_of_silent_clients(listen: Callable[[], Clients]) -> None:
    """The connections are bounded: for each new one beyond, the oldest unfinished one is dropped."""
    clients = listen()
    silent = clients.connect(MOST_CONNECTIONS * 4)
    for _ in range(10):
        assert clients.ask("/livez").endswith(b"ok")
    wait_until(lambda: threads() <= MOST_CONNECTIONS, "the threads are bounded")
    oldest, newest = silent[:MOST_CONNECTIONS], silent[-MOST_CONNECTIONS // 2 :]
    wait_until(lambda: all(map(is_dropped, oldest)), "the oldest are dropped")
    assert not any(map(is_dropped, newest))


def test_probe_is_answered_while_clients_come_without_end(listen: Callable[[], Clients]) -> None:
    """Silent clients connect as fast as they can: every probe is answered."""
    clients, is_over = listen(), threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            attackers = Clients(clients._port)
            with suppress(OSError):
                attackers.connect(50, sent=b"G")
            attackers.close()

    attack = threading.Thread(target=flood)
    attack.start()
    try:
        assert [clients.ask("/livez")[-2:] for _ in range(30)] == [b"ok"] * 30
    finally:
        is_over.set()
        attack.join()


def test_probe_is_answered_when_all_descriptors_are_in_use() -> None:
    """A process with few file descriptors: a connection that cannot be accepted ends the oldest one."""
    with subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        clients = Clients(int(process.stdout.readline()))
        try:
            silent = clients.connect(60)
            assert clients.ask("/livez").endswith(b"ok")
            wait_until(lambda: is_dropped(silent[0]), "the oldest is dropped")
        finally:
            clients.close()
            process.communicate(timeout=20)


def test_two_servers_do_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Python let all servers of HTTP do that: a scrape would see the one or the other."""
    monkeypatch.setattr(HTTPServer, "allow_reuse_port", True, raising=False)
    first = Listener(Address("127.0.0.1", 0), {})
    try:
        with pytest.raises(ConfigError, match=r"cannot listen at .*: Address already in use"):
            Listener(first.address, {}).close()
    finally:
        first.close()
