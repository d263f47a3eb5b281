"""What no signal can do to a process: power loss, a full disk, a clock that steps. Needs a C compiler, or skips."""

from __future__ import annotations

import functools
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server

SOURCE = Path(__file__).with_name("fault.c")


@functools.cache
def library() -> Path:
    """The compiled `fault.c`. Skips the test where it cannot be compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) to build tests/chaos/fault.c with")
    target = Path(tempfile.gettempdir()) / f"rsmq-fault-{os.getuid()}-{SOURCE.stat().st_mtime_ns}.so"
    if not target.exists():
        built = target.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{compiler} cannot build tests/chaos/fault.c: {done.stderr.strip()[:200]}")
        built.replace(target)
    return target


class Weather:
    """The faults of one process, switched on and off while it runs. Start the process with `environment`."""

    def __init__(self, directory: Path) -> None:
        self._library = library()
        self._control, self._synced = directory / "fault-control", directory / "fault-synced"
        self._control.write_bytes(bytes(16))
        self._file = self._control.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), 16)

    @property
    def environment(self) -> dict[str, str]:
        """What the process must be started with."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAULT_CONTROL": str(self._control),
            "FAULT_SYNCED": str(self._synced),
        }

    def step_clock(self, seconds: float) -> None:
        """From now on its wall clock is so far off."""
        self._memory[:8] = struct.pack("q", int(seconds * 1000))

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """No write to a file succeeds during the block."""
        self._memory[8:] = struct.pack("q", 1)
        try:
            yield
        finally:
            self._memory[8:] = struct.pack("q", 0)

    @property
    def synced(self) -> float:
        """Seconds since something was last made durable."""
        return max(0.0, time.time() - self._synced.stat().st_mtime)

    def drop_unsynced(self, directory: Path) -> int:
        """Cut every file to what was made durable, as a power loss does. Returns how many bytes were lost."""
        sizes: dict[int, int] = {}
        for line in self._synced.read_text().splitlines():
            inode, size = line.split()
            sizes[int(inode)] = int(size)
        lost = 0
        for path in directory.iterdir():
            if path.suffix in (".aof", ".rdb"):  # the manifest is written beside and renamed: durable or not there
                durable = sizes.get(path.stat().st_ino, 0)
                lost += max(0, path.stat().st_size - durable)
                os.truncate(path, min(durable, path.stat().st_size))
        return lost

    def close(self) -> None:
        """Let go of the control file."""
        self._memory.close()
        self._file.close()


class WeatheredServer(Server):
    """A server with weather. `lose_power` is a SIGKILL that also forgets what was not yet on the disk."""

    def __init__(self, *args: str, **options: Any) -> None:
        super().__init__(*args, **{"aof": True, **options})
        self.weather = Weather(self.directory)

    def command(self) -> list[str]:
        """Through `env`, which replaces itself by the server: its process id stays the server's."""
        return ["env", *(f"{name}={value}" for name, value in self.weather.environment.items()), *super().command()]

    def lose_power(self) -> int:
        """Kill it and drop what it had not made durable. Returns the bytes that were dropped."""
        self.kill()
        return self.weather.drop_unsynced(self.directory / "appendonlydir")

    def close(self) -> None:
        """End it and remove its directory."""
        self.weather.close()
        super().close()
