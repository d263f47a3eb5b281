"""The pipeline on Spark: topics as DataFrames and back, archive, replay and report.

`spark.read.format("rsmq")` finds the source by itself where rsmq is installed (through the module `pyspark_rsmq`);
`register(spark)` is for where it is not, such as `--py-files`. Columns and options: `rsmq.pipeline.source`.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from rsmq.pipeline.source import RsmqSource


def register(spark: SparkSession) -> None:
    """Make `format("rsmq")` known to a session."""
    spark.dataSource.register(RsmqSource)


__all__ = ["RsmqSource", "register"]
