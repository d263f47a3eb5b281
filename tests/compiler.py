"""Libraries in C that the tests load into a server or a client, and the compiler that makes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

MISSING: Final = "no C compiler: install gcc, or `.venv/bin/pip install ziglang`"
"""Why a test is skipped."""


def compiler() -> list[str] | None:
    """The command of a C compiler, if there is one: of the system, or out of a wheel."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is not None:
        return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") is not None else None


def library(source: Path) -> Path:
    """A compiled library, made once for each version of its source. Raises RuntimeError where it cannot be made."""
    target = Path(tempfile.gettempdir()) / f"rsmq-{source.stem}-{os.getuid()}-{source.stat().st_mtime_ns}.so"
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise RuntimeError(MISSING)
    built = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [*command, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[0]} cannot build {source.name}: {done.stderr.strip()[:500]}")
    built.replace(target)
    return target
