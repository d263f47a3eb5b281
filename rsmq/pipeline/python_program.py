"""The Python that Spark on this machine starts: PYSPARK_PYTHON, else the `python3` of the PATH.

In a virtual environment that is not activated (an IDE, a notebook, cron, systemd) that is another Python than this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

VARIABLE: Final = "PYSPARK_PYTHON"
DEFAULT: Final = "python3"
PROBE_SECONDS: Final = 60
HAS_RSMQ: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('rsmq') is None)"


def spark_python() -> str:
    """The name or the path of the Python that Spark starts here, unless a session says otherwise."""
    return os.environ.get(VARIABLE) or DEFAULT


def has_rsmq(python: str) -> bool:
    """Whether a Python of this machine has rsmq."""
    if shutil.which(python) == sys.executable:
        return True
    try:
        done = subprocess.run([python, "-c", HAS_RSMQ], capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
