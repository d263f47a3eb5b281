"""Processes that start at once: a server process has imported a module and forks for each start of it.

`python -m rsmq` imports for most of a second, a fork of a process that has done so is ready in a few milliseconds. What
runs is the same: an own process with its own arguments, environment, directory and output, ended by signals, and with
the exit code of the interpreter. The start itself is not tested this way: some tests use `python -m` for that.

    start("rsmq", "topic", "list", cwd=path, env=environment, stdout=file)
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from rsmq.cli import COMMANDS
from rsmq.redis.embedded.keeper import dies_with_us

ROOT: Final = Path(__file__).parents[1]
IMPORTS: Final = {
    "rsmq": (
        *(where.partition(":")[0] for where in COMMANDS.values()),
        *(each.value.partition(":")[0] for each in entry_points(group="rsmq.commands")),
        "anyio._backends._asyncio",
    )
}  # fmt: skip
"""What is imported beforehand, where that is more than the module that runs."""


class ForkedProcess:
    """A started process, with the face of `subprocess.Popen`. The fork server is its parent and sends its end."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = int(status.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative after a signal, or None while it runs."""
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired after `timeout`."""
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and is_readable(self._status, timeout):
            self.returncode = int(self._status.recv(64))
            self._status.close()
        return self.returncode


def is_readable(connection: socket.socket, seconds: float | None) -> bool:
    """Wait until there is something to receive."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def start(
    module: str, *args: str, cwd: Path, env: Mapping[str, str], stdin: Any = None, stdout: Any, stderr: Any = None
) -> ForkedProcess:
    """Run a module as `python -m` would. Files or descriptors; stdin is empty and stderr is stdout unless given."""
    request = json.dumps({"module": module, "args": args, "cwd": str(cwd), "env": dict(env)}).encode()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull, "rb") as nothing:
        files = [nothing if stdin is None else stdin, stdout, stdout if stderr is None else stderr, theirs]
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        socket.send_fds(fork_server(module), [request], numbers)
    return ForkedProcess(ours)


@cache
def fork_server(module: str) -> socket.socket:
    """The way to the server that has imported a module. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", module, str(theirs.fileno())], cwd=ROOT, start_new_session=True,
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the child only, with what it shall run."""
    children: dict[int, tuple[int, socket.socket]] = {}  # pid and status socket by pidfd
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fd)
                pid, status = children.pop(key.fd)
                os.close(key.fd)
                with status, contextlib.suppress(OSError):  # the process that started it may have ended
                    status.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                continue
            text, files, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not text:
                os._exit(0)
            if (pid := os.fork()) == 0:
                selector.close()
                control.close()
                for pidfd, (_, status) in children.items():
                    os.close(pidfd)
                    status.close()
                become(files)
                return dict(json.loads(text))
            for file in files[:3]:
                os.close(file)
            status = socket.socket(fileno=files[3])
            status.send(str(pid).encode())
            selector.register(pidfd := os.pidfd_open(pid), selectors.EVENT_READ)
            children[pidfd] = (pid, status)


def become(files: list[int]) -> None:
    """Take the descriptors of a request, and a session of one's own that Ctrl-C at the tests does not reach."""
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.setsid()


def main(module: str, control: str) -> None:
    """Import, fork, and in the child run what was asked for until the interpreter ends as always."""
    for name in IMPORTS.get(module, (module,)):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child would copy and look through all of it when it ends: 0.2 s of CPU
    ends_with_server = dies_with_us()
    request = serve(socket.socket(fileno=int(control)))
    ends_with_server()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv = [request["module"], *request["args"]]
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
