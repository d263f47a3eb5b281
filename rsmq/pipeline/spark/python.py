"""Makes a session start a Python that has rsmq, or asks its executors whether theirs has it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.pipeline.python_program import VARIABLE, has_rsmq, spark_python
from rsmq.pipeline.spark.errors import spark_errors

PROBED_TASKS: Final = 4
"""Tasks that ask their executors. One executor without rsmq is enough to fail, and most clusters are uniform."""


def use_python(spark: SparkSession) -> None:
    """See to it that the session's Python processes have rsmq. Raises ConfigError with what to set if they do not.

    On this machine the session will start the driver's Python, unless PYSPARK_PYTHON names another one. On a
    cluster, and behind a server of Spark Connect, executors are asked which Python they run.
    """
    if is_remote(spark) or not str(spark.sparkContext.master).startswith("local"):
        check_executors(spark)
    elif not os.environ.get(VARIABLE):
        spark.sparkContext.pythonExec = sys.executable
    elif not has_rsmq(spark_python()):
        raise ConfigError(
            f"{VARIABLE}={spark_python()} names a Python without rsmq: set it to {sys.executable}, or install "
            f"'rsmq[spark]' there"
        )


def is_remote(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect: its Spark runs behind a server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


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
