"""The dashboard's server with clients that send slowly or are too many: real sockets."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from rsmq.dashboard.connection_limits import MOST_CONNECTIONS
from tests.servers import wait_until

Connect = Callable[[int, bytes], list[socket.socket]]


@pytest.fixture(scope="module")
def url(open_dashboard: Callable[..., str]) -> str:
    """The address of a dashboard."""
    return open_dashboard()


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """Open connections that have sent this; all are closed after the test."""
    with ExitStack() as stack:

        def open_some(count: int, sent: bytes) -> list[socket.socket]:
            found = []
            for _ in range(count):
                address = urlsplit(url)
                client = stack.enter_context(socket.create_connection((address.hostname, address.port), 20))
                client.sendall(sent)
                found.append(client)
            return found

        yield open_some


def is_dropped(client: socket.socket) -> bool:
    """Whether the other side has ended this connection."""
    if not select.select([client], [], [], 0)[0]:
        return False
    try:
        return not client.recv(1 << 16)
    except OSError:
        return True


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", id="header"),
        pytest.param(b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", id="body"),
        pytest.param(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nX: ", id="second request"),
    ],
)
def test_request_that_comes_byte_by_byte_is_dropped(url: str, connect: Connect, sent: bytes) -> None:
    """The patience is for the whole request, its body included; others are served meanwhile."""
    slow = connect(20, sent)

    def all_are_dropped() -> bool:
        for client in slow[:]:
            with suppress(OSError):
                client.send(b"x")
            if is_dropped(client):
                slow.remove(client)
        return not slow

    assert httpx.get(url).status_code == 200
    wait_until(all_are_dropped, "every slow client is dropped")


def test_page_is_served_beside_any_number_of_silent_clients(url: str, connect: Connect) -> None:
    """The connections are bounded: for each new one beyond, the oldest silent one is dropped."""
    silent = connect(MOST_CONNECTIONS * 2, b"G")
    wait_until(lambda: all(map(is_dropped, silent[:50])), "the oldest are dropped")
    with httpx.Client(base_url=url) as visitor:
        assert [visitor.get("/").status_code for _ in range(3)] == [200] * 3
