"""A job on a Spark of several JVMs, one of which dies: `python cluster_job.py MASTER URL PREFIX SOURCE TARGET FLAG`.

Copies a topic exactly once. The first task that has written its rows makes the file FLAG and kills the JVM above it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from rsmq.pipeline.source import RsmqSource
from rsmq.pipeline.writer import Writer

JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    "spark.executor.memory": "512m",
    "spark.python.daemon.module": "rsmq.pipeline.daemon",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def deadly_source(flag: str) -> type[RsmqSource]:
    """The source with such a sink. Made in a function, so that it travels to the executors whole."""

    def executor() -> int:
        """The JVM above this process."""
        process = os.getppid()
        while Path(f"/proc/{process}/comm").read_text().strip() != "java":
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return process

    class DeadlyWriter(Writer):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            written = super().write(iterator)
            with suppress(FileExistsError):  # once: a stage that is run again counts its attempts from 0
                Path(flag).touch(exist_ok=False)
                os.kill(executor(), signal.SIGKILL)
            return written

    class DeadlySource(RsmqSource):
        @classmethod
        def name(cls) -> str:
            return "rsmq_deadly"

        def writer(self, schema: StructType, overwrite: bool) -> Writer:
            return DeadlyWriter(super().writer(schema, overwrite)._options)

    return DeadlySource


def main(master: str, url: str, prefix: str, source: str, target: str, flag: str) -> None:
    """Copy it: a task reads a partition in order and writes it, which is all that a mark needs."""
    builder = SparkSession.builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(deadly_source(flag))
    place = {"url": url, "prefix": prefix}
    rows = spark.read.format("rsmq_deadly").options(**place, subscribe=source, includeHeaders="true").load()
    options = {**place, "topic": target, "idempotence": "marker", "jobId": "copy"}
    rows.write.format("rsmq_deadly").options(**options).mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
