"""What a process tells operators about itself."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any, Final

from rsmq.model.clock import now_ms
from rsmq.model.distribution import OWN
from rsmq.model.words import installed

STATM: Final = Path("/proc/self/statm")


def about_process(app_version: str | None) -> dict[str, Any]:
    """Where it runs, since when (ms since 1970), and with which version of rsmq and, if that is known, of its service:
    one look, when it begins to work."""
    about = {"host": platform.node(), "pid": os.getpid(), "version": own_version(), "started_ms": now_ms()}
    return about if app_version is None else about | {"app_version": app_version}


@cache
def own_version() -> str:
    """The version of rsmq."""
    return installed(OWN)


def memory_bytes() -> int | None:
    """What it has in main memory now, as Linux counts it; None on other systems."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
