"""The Python that Spark starts for the data source: it must be one that has rsmq.

PySpark starts the `python3` of the PATH unless PYSPARK_PYTHON is set. In a virtual environment that is not activated
(an IDE, a notebook, cron, systemd) that is another Python than the driver's.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.pipeline.spark.errors import spark_errors

VARIABLE: Final = "PYSPARK_PYTHON"
PROBE_SECONDS: Final = 60
HAS_RSMQ: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('rsmq') is None)"
PROBED_TASKS: Final = 4
"""Tasks that ask their executors. One executor without rsmq is enough to fail, and most clusters are uniform."""


def use_python(spark: SparkSession) -> None:
    """See to it that the session's Python processes have rsmq. Raises ConfigError with what to set if they do not.

    On this machine the session will start the driver's Python, unless PYSPARK_PYTHON names another one. On a
    cluster, and behind a server of Spark Connect, executors are asked which Python they run.
    """
    if is_remote(spark) or not str(spark.sparkContext.master).startswith("local"):
        check_executors(spark)
    elif VARIABLE not in os.environ:
        spark.sparkContext.pythonExec = sys.executable
    elif not has_rsmq(os.environ[VARIABLE]):
        raise ConfigError(
            f"{VARIABLE}={os.environ[VARIABLE]} names a Python without rsmq: set it to {sys.executable}, or install "
            f"'rsmq[spark]' there"
        )


def is_remote(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect: its Spark runs behind a server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def has_rsmq(python: str) -> bool:
    """Whether a Python of this machine has rsmq."""
    if shutil.which(python) == sys.executable:
        return True
    try:
        done = subprocess.run([python, "-c", HAS_RSMQ], capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def check_executors(spark: SparkSession) -> None:
    """Run a few tasks that say which Python they are. Raises ConfigError if one has no rsmq."""
    probe = probing()
    ask = F.udf(lambda _: probe(), "string", useArrow=False).asNondeterministic()  # it may have no pyarrow either
    with spark_errors():
        rows = spark.range(0, PROBED_TASKS, 1, PROBED_TASKS).select(ask("id").alias("python")).distinct().collect()
    without = sorted(row.python for row in rows if row.python)
    if without:
        raise ConfigError(
            f"Spark starts a Python without rsmq ({', '.join(without)}): install 'rsmq[spark]' there, or set "
            f"{VARIABLE} to a Python that has it before Spark starts, on every machine"
        )


def probing() -> Callable[[], str]:
    """A function that returns an empty text where rsmq is, else the Python that runs it. Spark sends it as code: a
    Python without rsmq could not import it."""

    def probe() -> str:
        return "" if find_spec("rsmq") else f"{sys.executable} of {platform.node()}"

    return probe
