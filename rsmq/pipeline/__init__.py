"""The pipeline on Spark: topics as DataFrames and back, archive, replay and report.

Where rsmq is installed, Spark finds `format("rsmq")` by itself, through the module `pyspark_rsmq`. Elsewhere, such as
with `--py-files`, call `register(spark)`. `rsmq.pipeline.source` describes the columns and options.

Map: `format` is the data source. `spark` opens sessions, shows progress and translates Spark's errors. `jobs` are the
commands that move data: archive, compact, replay and send, and the search for one message in the archive. `report`
counts messages and makes a page. Imports go one way: `report` imports `jobs`, `jobs` import `spark`, `spark` imports
`format`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from rsmq.model.lazy import loading
from rsmq.pipeline.source import RsmqSource

if TYPE_CHECKING:
    from rsmq.pipeline.jobs.lookup import ArchivedMessage, find_archived
else:
    __getattr__, __dir__ = loading(__name__, {"jobs.lookup": "ArchivedMessage find_archived"})


def register(spark: SparkSession) -> None:
    """Register `format("rsmq")` with a session."""
    spark.dataSource.register(RsmqSource)


__all__ = ["ArchivedMessage", "RsmqSource", "find_archived", "register"]
