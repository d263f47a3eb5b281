"""Wakeup: a thread that waits for a connection is woken by data, by another thread, or by the clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rsmq.heartbeat.presence import Wakeup
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
from tests.servers import wait_until

HOUR = 3600.0


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    """One that is closed afterwards."""
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()
    wakeup.wake()
    assert repr(wakeup) == "<Wakeup closed>"


@pytest.fixture
def listener(settings: Settings) -> Iterator[Any]:
    """A subscription that has been confirmed."""
    assert settings.url is not None
    client = Connector(settings.url, settings).blocking_client()
    pubsub = client.subscriber()
    pubsub.subscribe(settings.prefix)
    assert pubsub.get_message(timeout=30)["type"] == "subscribe"
    yield pubsub
    pubsub.close()
    client.close()


class Waiting:
    """A thread that waits for a connection, for an hour."""

    def __init__(self, wakeup: Wakeup, connection: Any) -> None:
        self.answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(wakeup.wait(connection, HOUR)))
        self._thread.start()

    def ends(self) -> bool:
        """Whether there was something to read."""
        self._thread.join(30)
        (answer,) = self.answers
        return answer


def test_wake_before_or_during_a_wait_ends_it(wakeup: Wakeup, listener: Any) -> None:
    """Another thread wakes it; two calls before a wait count as one."""
    wakeup.wake()
    wakeup.wake()
    assert not Waiting(wakeup, listener.connection).ends()
    waiting = Waiting(wakeup, listener.connection)
    assert not waiting.answers
    wakeup.wake()
    assert not waiting.ends()


def test_arriving_data_ends_a_wait(wakeup: Wakeup, listener: Any, settings: Settings) -> None:
    """Data that was already read from the socket counts: two messages that arrive together are read one by one."""
    waiting = Waiting(wakeup, listener.connection)
    assert settings.url is not None
    client = Connector(settings.url, settings).blocking_client()
    client.pipelined([("PUBLISH", settings.prefix, "1"), ("PUBLISH", settings.prefix, "2")])
    client.close()
    assert waiting.ends()
    assert listener.get_message(timeout=30)["data"] == b"1"
    assert wakeup.wait(listener.connection, HOUR)
    assert listener.get_message(timeout=30)["data"] == b"2"
    assert not wakeup.wait(listener.connection, 0)


def test_wake_with_a_full_buffer_does_not_block(wakeup: Wakeup, listener: Any) -> None:
    """100 000 calls without a waiting thread do not block, and the next wait ends."""
    for _ in range(100_000):
        wakeup.wake()
    assert not wakeup.wait(listener.connection, HOUR)


def test_connection_of_redis_py_shows_its_socket(listener: Any) -> None:
    """The attribute is private. If redis-py renames it, a wait ends up to 0.2 s late, and this test fails."""
    assert listener.connection._sock.fileno() >= 0


def test_wait_without_a_socket_polls_the_connection(wakeup: Wakeup) -> None:
    """A connection that does not show its socket is asked with a short time limit."""
    asked: list[float] = []

    class Closed:
        def can_read(self, timeout: float) -> bool:
            asked.append(timeout)
            return timeout > 0

    assert wakeup.wait(Closed(), HOUR)
    wait_until(lambda: asked == [0, 0.2], "it is asked twice")
