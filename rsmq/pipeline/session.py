"""The Spark session of a command: the one that `spark-submit` brings, or one on this machine with small settings."""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

from rsmq.pipeline.failure import spoken
from rsmq.pipeline.java import use_java

LOCAL: Final = "local[*]"
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    "spark.python.daemon.module": "rsmq.pipeline.daemon",
}
SMALL: Final = {
    # a few tasks on one machine: starting and planning cost more than they save
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",
}


def open_session(master: str | None = None, name: str = "rsmq") -> SparkSession:
    """A session: the active one, that of `spark-submit`, or a new one on `master` (default: all cores here)."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(name)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit, which has its own Java and master
        use_java()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the default is any python3 on the PATH
        where = LOCAL if master is None else master
        settings = SETTINGS | (SMALL if where.startswith("local[") or where == "local" else {})
        builder = builder.master(where)
        for key, value in settings.items():
            builder = builder.config(key, value)
    with spoken():
        return builder.getOrCreate()
