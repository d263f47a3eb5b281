"""Power loss, a full or slow disk, clock steps and a suspended machine, injected with a preloaded C library.

Skips without a C compiler.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.compiler import MISSING, compiler, library
from tests.servers import Server

SOURCE = Path(__file__).with_name("fault.c")


class SystemFaults:
    """The faults of one process, switched on and off while it runs. Start the process with `environment`."""

    def __init__(self, directory: Path) -> None:
        if compiler() is None:
            pytest.skip(MISSING)
        self._library = library(SOURCE)
        self._control, self._synced = directory / "fault-control", directory / "fault-synced"
        self._control.write_bytes(bytes(32))
        self._file = self._control.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), 32)

    @property
    def environment(self) -> dict[str, str]:
        """What the process must be started with."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAULT_CONTROL": str(self._control),
            "FAULT_SYNCED": str(self._synced),
        }

    def step_clock(self, seconds: float) -> None:
        """Shift its wall clock by so many seconds."""
        self._memory[:8] = struct.pack("q", int(seconds * 1000))

    def suspend(self, seconds: float) -> None:
        """Let its machine have been suspended for so long by now. The process must have been stopped meanwhile."""
        self._memory[24:] = struct.pack("q", int(seconds * 1000))

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Let every write to a file fail during the block."""
        self._memory[8:16] = struct.pack("q", 1)
        try:
            yield
        finally:
            self._memory[8:16] = struct.pack("q", 0)

    @contextmanager
    def slow_disk(self, seconds: float) -> Iterator[None]:
        """Let every fsync take so long during the block; writes wait for it."""
        self._memory[16:24] = struct.pack("q", int(seconds * 1000))
        try:
            yield
        finally:
            self._memory[16:24] = struct.pack("q", 0)

    @property
    def synced(self) -> float:
        """Seconds since the last fsync."""
        return max(0.0, time.time() - self._synced.stat().st_mtime)

    def drop_unsynced(self, directory: Path) -> int:
        """Cut every file to what was synced, as a power loss does. Returns how many bytes were lost."""
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
        """Close the control file."""
        self._memory.close()
        self._file.close()


class FaultyServer(Server):
    """A server with system faults. `lose_power` is a SIGKILL that also drops what was not yet on the disk."""

    def __init__(self, *args: str, **options: Any) -> None:
        super().__init__(*args, **{"aof": True, **options})
        self.faults = SystemFaults(self.directory)

    def command(self) -> list[str]:
        """Through `env`, which replaces itself by the server: its process id stays the server's."""
        return ["env", *(f"{name}={value}" for name, value in self.faults.environment.items()), *super().command()]

    def lose_power(self) -> int:
        """Kill it and drop what it had not made durable. Returns the bytes that were dropped."""
        self.kill()
        return self.faults.drop_unsynced(self.directory / "appendonlydir")

    def close(self) -> None:
        """End it and remove its directory."""
        self.faults.close()
        super().close()
