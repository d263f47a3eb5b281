"""A throw-away server for measurements, and what it says about its own work."""

from __future__ import annotations

import os
import resource
import socket as sockets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis

from rsmq.redis.embedded.server import server_binary


def cpu() -> float:
    """User and system CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def listens(path: Path) -> bool:
    """Whether a server answers at a socket file: the file exists a moment before its server listens."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


@contextmanager
def server() -> Iterator[str]:
    """A server of its own with the append-only file on, so that only keys of this bench are measured.

    SERVER_BINARY in the environment names another executable than the embedded one.
    """
    binary = os.environ.get("SERVER_BINARY") or server_binary()
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "s.sock"
        command = [binary, "--port", "0", "--unixsocket", str(socket), "--dir", directory, "--save", ""]
        # no rewrite of the file meanwhile: it would fall on one of those compared, by chance
        command += ["--appendonly", "yes", "--auto-aof-rewrite-percentage", "0"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not listens(socket):
                time.sleep(0.02)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            process.wait()


OWN: Final = (b"CONFIG", b"SLOWLOG", b"INFO", b"FLUSHALL", b"SCRIPT")
"""Commands of what measures."""
LOGGED_US: Final = 50
"""Calls that took longer are in the slow log: not the commands within a script, whose logging would be measured."""


class ServerMeter:
    """The server's own figures, over a connection that stays the same: wall-clock time would measure the neighbours.

    `start` begins a measurement; everything else is counted from there.
    """

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url, protocol=2)
        self._client.config_set("slowlog-max-len", 10_000)
        self._cpu = self._memory = 0.0

    def start(self, *, empty: bool = False, log: bool = False) -> None:
        """Begin. `empty` drops all data before; `log` is for `longest_us`, and would be weighed with the data."""
        if empty:
            self._client.execute_command("FLUSHALL", "SYNC")
        self._client.config_set("slowlog-log-slower-than", LOGGED_US if log else -1)
        self._client.slowlog_reset()
        self._cpu, self._memory = self._cpu_seconds(), self._client.info("memory")["used_memory"]

    @property
    def cpu_us(self) -> float:
        """CPU microseconds of the server process, everything included."""
        return (self._cpu_seconds() - self._cpu) * 1e6

    @property
    def memory(self) -> int:
        """Bytes more than at the start."""
        return int(self._client.info("memory")["used_memory"] - self._memory)

    def _logged(self) -> list[tuple[int, bytes]]:
        """What took long: microseconds by the wall, and which command or script it was. The longest first."""
        rows = self._client.execute_command("SLOWLOG GET", -1)
        found = [(int(row["duration"]), b" ".join(row["command"].split()[:2])) for row in rows]
        return sorted((each for each in found if not each[1].startswith(OWN)), reverse=True)

    @property
    def longest_us(self) -> int:
        """Microseconds of the longest call, of what kind soever; 0 when none took long."""
        return next((duration for duration, _ in self._logged()), 0)

    @property
    def usual_us(self) -> int:
        """Microseconds of the median call of the kind that the longest one is of: that one may have been held up."""
        logged = self._logged()
        alike = [duration for duration, kind in logged if kind == logged[0][1]]
        return alike[len(alike) // 2] if alike else 0

    @property
    def calls(self) -> int:
        """Commands processed since the server started, our own questions included."""
        return int(self._client.info("stats")["total_commands_processed"])

    @property
    def connections(self) -> int:
        """Clients connected now, but this one."""
        return int(self._client.info("clients")["connected_clients"]) - 1

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()

    def _cpu_seconds(self) -> float:
        cpu = self._client.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])
