"""The process beside the embedded server: it runs the server for as long as anybody uses it, and not longer.

Started by path, detached, with nothing but the standard library: ``python keeper.py DIRECTORY SOCKET BINARY``. Files in
the directory, each a lock (flock, so that a killed process can never leave one behind):

- ``users.lock``: shared by every process that uses the server. The keeper blocks in an exclusive flock of it, wakes
  when the last user has gone, by SIGKILL too, and ends the server. Nothing polls.
- ``keeper.lock``: held by the keeper.
- ``server.lock``: held by the server itself, which inherits it, so that no second server ever opens the same data.
  It contains the server's pid, for people.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

USERS, KEEPER, SERVER, LOG = "users.lock", "keeper.lock", "server.lock", "server.log"
STOP_SECONDS = 10.0
START_SECONDS = 30.0
LOG_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1


def ask(path: str, command: bytes, seconds: float = 1.0) -> bytes:
    """One inline command to the server at a unix socket; empty when nothing answers in time."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(path)
            connection.sendall(command + b"\r\n")
            return connection.recv(256)
        except OSError:
            return b""


def answers(path: str) -> bool:
    """Whether a server at the socket can serve now (not while it loads its data)."""
    return ask(path, b"PING").startswith(b"+PONG")


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, not inherited by child processes."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take a flock without waiting; say whether it was free."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Keeper:
    """Runs one server until its last user has gone; starts it again, with its data, when it dies before that."""

    def __init__(self, directory: Path, socket_path: str, binary: str) -> None:
        self.directory, self.socket_path, self.binary = directory, socket_path, binary
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def run(self, report: Callable[[str], None]) -> None:
        """Blocks. `report` is called with nothing when the server answers, or with the reason why it does not."""
        lock = open_lock(self.directory / KEEPER)
        if not try_lock(lock):
            return report("")
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            # the server of a keeper that was killed, where the system has not ended it (macOS)
            ask(self.socket_path, b"SHUTDOWN NOSAVE")
            self._serve()
            report("")
            users = open_lock(self.directory / USERS)
            threading.Thread(target=self._wait_for_last_user, args=(users,), daemon=True).start()
            self._tend()
        except RuntimeError as error:
            print(f"rsmq keeper: {error}", file=sys.stderr, flush=True)
            report(str(error))
        finally:
            self._end_child()
            # before the users' lock, which the end of the process frees: who waits for that must find no keeper
            os.close(lock)

    def _wait_for_last_user(self, users: int) -> None:
        fcntl.flock(users, fcntl.LOCK_EX)
        self._stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()

    def _tend(self) -> None:
        """Wait for the end of the server; unless it was asked for, start the next one."""
        while self._child is not None and not self._stopping.is_set():
            self._child.wait()
            if self._stopping.is_set():
                return
            print("rsmq keeper: the server has died, starting it again", file=sys.stderr, flush=True)
            self._serve()

    def _serve(self) -> None:
        """Start the server and wait until it answers. Raises RuntimeError with the end of its log."""
        lock = open_lock(self.directory / SERVER)
        deadline = time.monotonic() + START_SECONDS
        while not try_lock(lock):
            if time.monotonic() > deadline:
                pid = os.pread(lock, 32, 0).decode().strip()
                raise RuntimeError(f"another server (pid {pid}) still uses {self.directory}: end it first")
            time.sleep(0.02)
        self._child = subprocess.Popen(
            self._command(), stdin=subprocess.DEVNULL, stdout=2, stderr=2, pass_fds=(lock,), preexec_fn=dies_with_us()
        )
        os.pwrite(lock, f"{self._child.pid}\n".encode(), 0)
        os.close(lock)  # the server has its own copy: the lock now lives exactly as long as the server
        while not answers(self.socket_path) and not self._stopping.is_set():
            if self._child.poll() is not None:
                raise RuntimeError(f"the embedded server ended at once: {self._last_words()}")
            time.sleep(0.01)

    def _command(self) -> list[str]:
        return [
            self.binary,
            *("--dir", str(self.directory), "--port", "0", "--unixsocket", self.socket_path, "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"),
        ]

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def _last_words(self) -> str:
        lines = (self.directory / LOG).read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) + f" (all of it: {self.directory / LOG})"


def dies_with_us() -> Callable[[], None] | None:
    """What a child does before it becomes the server: ask Linux to end it (cleanly) when this process is killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, keeper = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != keeper:
            os._exit(1)

    return ask_kernel


def detach(log: Path) -> Callable[[str], None]:
    """Leave the process that started us behind. Returns how to answer it, through what was our stdout: the first time
    ends its wait, later answers have nobody to go to.
    """
    if os.fork():
        os._exit(0)
    os.chdir("/")
    answer: int | None = os.dup(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fstat(output).st_size > LOG_BYTES:
        os.ftruncate(output, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)

    def report(text: str) -> None:
        nonlocal answer
        if answer is not None:
            with contextlib.suppress(BrokenPipeError):  # who started us has gone
                os.write(answer, text.encode())
            os.close(answer)
            answer = None

    return report


if __name__ == "__main__":
    where, path, program = sys.argv[1:4]
    Keeper(Path(where), path, program).run(detach(Path(where) / LOG))
