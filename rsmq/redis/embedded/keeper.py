"""The keeper process of the embedded server: runs the server while at least one process uses it.

Started by path, detached, with only the standard library: ``python keeper.py DIRECTORY SOCKET BINARY``. The directory
has three lock files (flock: the kernel releases the locks of a killed process):

- ``users.lock``: shared by every process that uses the server. The keeper waits for an exclusive lock on it, which it
  gets when the last user has ended, also by SIGKILL. Then it ends the server. No polling.
- ``keeper.lock``: held by the keeper.
- ``server.lock``: inherited and held by the server, so that no second server opens the same data. It contains the pid
  of the server, for error messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

USERS, KEEPER, SERVER, LOG = "users.lock", "keeper.lock", "server.lock", "server.log"
STOP_SECONDS = 10.0
START_SECONDS = 30.0
LOG_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1


def ask(path: str, command: bytes, seconds: float = 1.0) -> bytes:
    """The reply to one inline command, sent to a unix socket; empty without a reply in time."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(path)
            connection.sendall(command + b"\r\n")
            return connection.recv(256)
        except OSError:
            return b""


def answers(path: str) -> bool:
    """Whether the server at the socket is ready; not while it loads its data."""
    return ask(path, b"PING").startswith(b"+PONG")


def open_lock(path: Path) -> int:
    """Open a lock file; child processes do not inherit the descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take a flock without waiting. Returns False when another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Keeper:
    """Runs one server until its last user has ended, and restarts it with its data if it dies earlier."""

    def __init__(self, directory: Path, socket_path: str, binary: str) -> None:
        self.directory = directory
        self.socket_path = socket_path
        self.binary = binary
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def run(self, report: Callable[[str], None]) -> None:
        """Blocks. Calls `report` with an empty text when the server answers, or with the reason why it does not."""
        lock = open_lock(self.directory / KEEPER)
        if not try_lock(lock):
            return report("")
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        try:
            # end the server of a keeper that was killed: macOS does not end it
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
            # release this lock first: the users' lock is released at exit, and who waits for it must find no keeper
            os.close(lock)

    def _wait_for_last_user(self, users: int) -> None:
        fcntl.flock(users, fcntl.LOCK_EX)
        self._stop()

    def _stop(self, *_: object) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()

    def _tend(self) -> None:
        """Restart the server each time it ends, until the keeper stops."""
        while self._child is not None and not self._stopping.is_set():
            self._child.wait()
            if self._stopping.is_set():
                return
            print("rsmq keeper: the server has died, restarting it", file=sys.stderr, flush=True)
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
        os.close(lock)  # the server has inherited it: the lock is released when the server ends
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
        text = (self.directory / LOG).read_text(errors="replace")
        return damage(text, self.directory / "appendonlydir", self.binary) or (
            " | ".join(text.splitlines()[-3:]) + f" (full log: {self.directory / LOG})"
        )


def damage(log: str, files: Path, binary: str) -> str:
    """The words of the last start about a damaged file, and what to run; empty if it was something else."""
    said = log.rpartition("is starting oO0")[2]
    if bad := re.search(r"(?:Bad file format|Unexpected end of file) reading the append only file ([^\s:]+)", said):
        # the server's executable is its own checking tool under this name
        check = f"exec -a valkey-check-aof {shlex.quote(binary)} --fix {shlex.quote(str(files / bad[1]))}"
        return (
            f"its file {bad[1]} is damaged. Copy {files}, then cut off the damage and all that was written after it: "
            f"bash -c {shlex.quote(check)}"
        )
    if "Wrong RDB checksum" in said or "error in RDB" in said:
        return (
            f"its snapshot in {files} is damaged: bring back a copy of that directory, or move it away and begin empty"
        )
    return ""


def dies_with_us() -> Callable[[], None] | None:
    """The `preexec_fn` of the server: on Linux the kernel sends it SIGTERM when the keeper is killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, keeper = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != keeper:
            os._exit(1)

    return ask_kernel


def detach(log: Path) -> Callable[[str], None]:
    """Detach from the starting process, which waits for the end of our stdout. Returns a function that sends it one
    text and ends its wait; later texts are dropped.
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
            with contextlib.suppress(BrokenPipeError):  # the starting process has ended
                os.write(answer, text.encode())
            os.close(answer)
            answer = None

    return report


if __name__ == "__main__":
    where, path, program = sys.argv[1:4]
    Keeper(Path(where), path, program).run(detach(Path(where) / LOG))
