"""A real server for a test run: it can be killed, paused and restarted. Also: deleting all keys under a prefix."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, Self

from anyio.from_thread import start_blocking_portal

from rsmq.errors import BrokerUnavailable
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.embedded.keeper import dies_with_us
from rsmq.redis.embedded.server import server_binary

START_SECONDS: Final = 30.0


class ThrowawayServer:
    """The server of the extra `embedded`, for as long as the block lasts.

    `tcp` listens on 127.0.0.1, else on a unix socket. `durable` keeps every write over `restart`; otherwise nothing is
    written to disk. Started in the main thread it ends with its process, also when that is killed (Linux).
    """

    ends_with_process = True
    """Whether Linux ends the server when the process that started it is killed."""

    def __init__(self, *, tcp: bool = False, durable: bool = False) -> None:
        self.port = free_port() if tcp else 0
        self.is_durable = durable
        self.directory = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The value for `RSMQ_URL`."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.directory / 's'}"

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """The output of the server."""
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> Self:
        """Start it and wait until it answers. Raises ConfigError without the extra, BrokerUnavailable with its log."""
        if self.directory == Path():
            self.directory = new_directory()
        in_main_thread = threading.current_thread() is threading.main_thread()
        with (self.directory / "log").open("ab") as log:
            # a session of its own: Ctrl-C is for the test run, which then ends the server in order
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=dies_with_us() if self.ends_with_process and in_main_thread else None,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if not self.is_running or time.monotonic() > deadline:
                printed = self.log()[-2000:]
                self.close()
                raise BrokerUnavailable(f"the test server did not start: {printed}")
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it and start it at the same address, with its data if it is durable."""
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
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = Path()

    def command(self) -> list[str]:
        """The command line of the server.

        Without `appendfsync`, each write is in the file before its reply, so that a killed server has lost nothing that
        it has confirmed. With `everysec` it may: while a sync is running, the server confirms writes up to 2 s before
        it writes them.
        """
        sockets = () if self.port else ("--unixsocket", str(self.directory / "s"), "--unixsocketperm", "700")
        return [
            self.binary(), "--port", str(self.port), "--bind", "127.0.0.1", *sockets, "--dir", str(self.directory),
            "--save", "", "--appendonly", "yes" if self.is_durable else "no", "--appendfsync", "no",
            "--maxmemory-policy", "noeviction",
        ]  # fmt: skip

    def binary(self) -> str:
        """The path of the executable."""
        return server_binary()

    def answers(self) -> bool:
        """Whether it can serve now."""
        kind = socket.AF_INET if self.port else socket.AF_UNIX
        address = ("127.0.0.1", self.port) if self.port else str(self.directory / "s")
        with socket.socket(kind) as connection, contextlib.suppress(OSError):
            connection.settimeout(1)
            connection.connect(address)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server does not run: start it first")
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} {'running' if self.is_running else 'not running'}>"


def new_directory() -> Path:
    """A directory for a server's data: in memory if there is room.

    On a busy disk a sync takes seconds, the log is written only after it, and a server that is killed meanwhile loses
    what it had confirmed. Not the test's own directory: the path of a unix socket may have about 100 bytes.
    """
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return Path(tempfile.mkdtemp(prefix="rsmq-test-", dir=memory if has_room else "/tmp"))


def free_port() -> int:
    """A TCP port that is free now, and so is the one 10 000 above it, for the bus of a cluster.

    The range is one from which no outgoing connection gets its port: one could take it before the server is up.
    """
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as probe, socket.socket() as bus, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


def remove_keys(url: str, prefix: str) -> int:
    """Delete all keys under a prefix and return how many there were. For code without an event loop."""
    with start_blocking_portal() as portal:
        return portal.call(_connect_and_remove, Connector(url, Settings(url=url, prefix=prefix)), prefix)


async def _connect_and_remove(connector: Connector, prefix: str) -> int:
    async with connector.connected() as client:
        return await remove_prefix(client, prefix)


async def remove_prefix(client: Client, prefix: str) -> int:
    """Delete all keys under a prefix, on every node, and return how many there were."""
    await client.refresh()
    return sum([await _remove_on(node, client, prefix) for node in client.nodes])


async def _remove_on(node: Client, client: Client, prefix: str) -> int:
    """The keys of one node. One UNLINK a key: on a cluster the keys of one command would have to share a slot."""
    cursor, removed = b"", 0
    while cursor != b"0":
        cursor, keys = await node.execute_command("SCAN", cursor or 0, "MATCH", f"{prefix}:*", "COUNT", 1000)
        removed += sum(await client.pipelined([("UNLINK", key) for key in keys])) if keys else 0
    return removed
