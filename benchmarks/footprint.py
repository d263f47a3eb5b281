"""What a process holds at a moment: memory, objects, files, threads, tasks. Linux only, for `/proc` says it exactly."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int | str = "self") -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """Counts of this process. `objects` are those that the collector tracks, after a collection."""

    rss: int
    objects: int
    files: int
    threads: int
    tasks: int

    @classmethod
    def now(cls) -> Self:
        """Look."""
        gc.collect()
        return cls(
            rss=resident(),
            objects=len(gc.get_objects()),
            files=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            tasks=len(asyncio.all_tasks()),
        )
