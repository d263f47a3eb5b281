"""The pipeline on Spark: topics as DataFrames and back, archive, replay and report.

Where rsmq is installed, Spark finds `format("rsmq")` by itself, through the module `pyspark_rsmq`. Elsewhere, such as
with `--py-files`, call `register(spark)`. `rsmq.pipeline.source` describes the columns and options.

Map: `format` is the data source. `spark` opens sessions, shows progress and translates Spark's errors. `jobs` are the
commands that move data: archive, compact, replay and send. `report` counts messages and makes a page. Imports go one
way: `report` imports `jobs`, `jobs` import `spark`, `spark` imports `format`.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from rsmq.pipeline.source import RsmqSource


def register(spark: SparkSession) -> None:
    """Register `format("rsmq")` with a session."""
    spark.dataSource.register(RsmqSource)


__all__ = ["RsmqSource", "register"]
