"""The worker processes of the demo: real ones, under the supervisor that `rsmq worker` brings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rsmq.demo.ledger import VARIABLE

STOP_SECONDS = 40


@contextmanager
def workers(count: int, directory: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`rsmq worker --processes count`, stopped gracefully at the end. Its log is `directory/workers.log`."""
    command = [sys.executable, "-m", "rsmq", "worker", "rsmq.demo.service:broker", "--processes", str(max(2, count))]
    with (directory / "workers.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **environment, VARIABLE: str(directory)},
        )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def kill_member(member: str) -> int:
    """SIGKILL the process of a member of this machine: its id carries the process id."""
    pid = int(member.rsplit("-", 2)[1])
    os.kill(pid, signal.SIGKILL)
    return pid
