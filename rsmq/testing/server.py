"""A real server for a test run: in a directory of its own, gone without a trace, killed and paused at will."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, Self

from rsmq.embedded import server_binary
from rsmq.errors import BrokerUnavailable
from rsmq.keeper import dies_with_us

START_SECONDS: Final = 30.0


class ThrowawayServer:
    """The server of the extra `embedded`, for as long as the block lasts.

    `tcp` listens on 127.0.0.1, else on a unix socket. `durable` keeps every write over `restart`; otherwise nothing is
    written to disk. Started in the main thread it ends with its process, also when that is killed (Linux).
    """

    def __init__(self, *, tcp: bool = False, durable: bool = False) -> None:
        self.port = free_port() if tcp else 0
        self.is_durable = durable
        self._directory = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What `RSMQ_URL` would say."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self._directory / 's'}"

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers. Raises ConfigError without the extra, BrokerUnavailable with its log."""
        if self._directory == Path():
            # not the test's own directory: the path of a unix socket may have about 100 bytes
            self._directory = Path(tempfile.mkdtemp(prefix="rsmq-test-", dir="/tmp"))
        with (self._directory / "log").open("ab") as log:
            # a session of its own: Ctrl-C is for the test run, which then ends the server in order
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=dies_with_us() if threading.current_thread() is threading.main_thread() else None,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = (self._directory / "log").read_text(errors="replace")[-500:]
                self.close()
                raise BrokerUnavailable(f"the server of the tests did not start: {words}")
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

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
        if self._directory != Path():
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = Path()

    def _command(self) -> list[str]:
        place = ("--port", str(self.port), "--bind", "127.0.0.1")
        sockets = () if self.port else ("--unixsocket", str(self._directory / "s"), "--unixsocketperm", "700")
        return [
            server_binary(), *place, *sockets, "--dir", str(self._directory), "--save", "",
            "--appendonly", "yes" if self.is_durable else "no", "--appendfsync", "everysec",
            "--maxmemory-policy", "noeviction",
        ]  # fmt: skip

    def _answers(self) -> bool:
        kind = socket.AF_INET if self.port else socket.AF_UNIX
        address = ("127.0.0.1", self.port) if self.port else str(self._directory / "s")
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

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ThrowawayServer {self.url} {'running' if self._process else 'not running'}>"


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
