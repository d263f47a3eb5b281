"""The bell: a thread that waits for a connection is woken by it, by the bell, or by the clock; each can be told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rsmq.connect import Connector
from rsmq.heartbeat.bell import Bell
from rsmq.settings import Settings
from tests.servers import wait_until

HOUR = 3600.0


@pytest.fixture
def bell() -> Iterator[Bell]:
    """One that is taken down afterwards."""
    bell = Bell()
    yield bell
    bell.take_down()
    bell.ring()
    assert repr(bell) == "<Bell down>"


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

    def __init__(self, bell: Bell, connection: Any) -> None:
        self.answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(bell.wait(connection, HOUR)))
        self._thread.start()

    def ends(self) -> bool:
        """Whether there was something to read."""
        self._thread.join(30)
        (answer,) = self.answers
        return answer


def test_it_ends_a_wait(bell: Bell, listener: Any) -> None:
    """Rung by another thread, before or while somebody waits; two rings before it are one."""
    bell.ring()
    bell.ring()
    assert not Waiting(bell, listener.connection).ends()
    waiting = Waiting(bell, listener.connection)
    assert not waiting.answers
    bell.ring()
    assert not waiting.ends()


def test_what_arrives_ends_a_wait(bell: Bell, listener: Any, settings: Settings) -> None:
    """Also what is out of the socket already: two messages that have come together are told one after the other."""
    waiting = Waiting(bell, listener.connection)
    assert settings.url is not None
    client = Connector(settings.url, settings).blocking_client()
    client.pipelined([("PUBLISH", settings.prefix, "1"), ("PUBLISH", settings.prefix, "2")])
    client.close()
    assert waiting.ends()
    assert listener.get_message(timeout=30)["data"] == b"1"
    assert bell.wait(listener.connection, HOUR)
    assert listener.get_message(timeout=30)["data"] == b"2"
    assert not bell.wait(listener.connection, 0)


def test_it_may_be_rung_for_ever(bell: Bell, listener: Any) -> None:
    """Nobody waits for a long time: ringing never blocks, and the next wait ends."""
    for _ in range(100_000):
        bell.ring()
    assert not bell.wait(listener.connection, HOUR)


def test_redis_py_shows_its_socket(listener: Any) -> None:
    """By a private name; without it a wait ends a fifth of a second late, and this test tells."""
    assert listener.connection._sock.fileno() >= 0


def test_without_a_socket_it_looks_often(bell: Bell) -> None:
    """A connection that does not show one is asked with a short time limit."""
    asked: list[float] = []

    class Closed:
        def can_read(self, timeout: float) -> bool:
            asked.append(timeout)
            return timeout > 0

    assert bell.wait(Closed(), HOUR)
    wait_until(lambda: asked == [0, 0.2], "it is asked twice")
