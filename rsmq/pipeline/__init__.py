"""The pipeline on Spark: topics as DataFrames and back, archive, replay and report.

`spark = open_session()` is a session that knows `format("rsmq")`, from any Python; `register(spark)` tells a session
that you have opened yourself. `typed_rows(frame, Order)` makes columns of JSON payloads. `rsmq.pipeline.source`
describes the columns and options of the source.

Map: `format` is the data source. `spark` opens sessions, shows progress and translates Spark's errors. `jobs` are the
commands that move data: archive, compact, replay and send, and the search for one message in the archive. `report`
counts messages and makes a page. Imports go one way: `report` imports `jobs`, `jobs` import `spark`, `spark` imports
`format`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsmq.model.lazy import loading

if TYPE_CHECKING:
    from rsmq.pipeline.jobs.lookup import ArchivedMessage, find_archived
    from rsmq.pipeline.payload_types import schema_of, typed_rows
    from rsmq.pipeline.source import RsmqSource
    from rsmq.pipeline.spark.session import open_session, register
else:
    __getattr__, __dir__ = loading(
        __name__,
        {
            "jobs.lookup": "ArchivedMessage find_archived",
            "payload_types": "schema_of typed_rows",
            "source": "RsmqSource",
            "spark.session": "open_session register",
        },
        extra="spark",
    )

__all__ = [
    "ArchivedMessage",
    "RsmqSource",
    "find_archived",
    "open_session",
    "register",
    "schema_of",
    "typed_rows",
]
