"""A job on a Spark of several JVMs, one of which dies: `python cluster_job.py MASTER URL PREFIX SOURCE TARGET FLAG`.

Copies a topic exactly once. The first task that has taken all its rows, and sent most of them, makes the file FLAG and
kills the JVM above it. With a TARGET that is a path the topic is archived there, and the first task that has read half
of its rows does so.
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
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from rsmq.pipeline.format.reader import StreamReader
from rsmq.pipeline.format.writer import BatchWriter
from rsmq.pipeline.jobs.archive import ArchiveOptions, archive
from rsmq.pipeline.source import RsmqSource
from rsmq.pipeline.spark.python import check_executors

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


def deadly_source(flag: str, name_of_source: str) -> type[RsmqSource]:
    """The source under this name, deadly once. Made in a function, so that it travels to the executors whole."""

    def executor() -> int:
        """The JVM above this process."""
        process = os.getppid()
        while Path(f"/proc/{process}/comm").read_text().strip() != "java":
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return process

    def die() -> None:
        with suppress(FileExistsError):  # once: a stage that is run again counts its attempts from 0
            Path(flag).touch(exist_ok=False)
            os.kill(executor(), signal.SIGKILL)

    class DeadlyWriter(BatchWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            def until_death() -> Iterator[pa.RecordBatch]:
                yield from iterator
                die()  # what has not filled a batch has not been sent

            return super().write(until_death())

    class DeadlyReader(StreamReader):
        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(super().read(partition)):
                if number == 1:
                    die()
                yield batch

    class DeadlySource(RsmqSource):
        @classmethod
        def name(cls) -> str:
            return name_of_source

        def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
            return DeadlyWriter(super().writer(schema, overwrite)._options)

        def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
            return DeadlyReader(super().streamReader(schema)._options)

    return DeadlySource


def main(master: str, url: str, prefix: str, source: str, target: str, flag: str) -> None:
    """Copy or archive it."""
    builder = SparkSession.builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    (archived if "/" in target else copied)(spark, {"url": url, "prefix": prefix}, source, target, flag)
    spark.stop()


def copied(spark: SparkSession, connection: dict[str, str], source: str, target: str, flag: str) -> None:
    """A task reads a partition in order and writes it, which is all that a mark needs."""
    found = spark.read.format("rsmq").options(**connection, subscribe=source).load()
    assert "id_ms" in found.columns, "wherever rsmq is installed, it is found by its name alone"
    check_executors(spark)
    spark.dataSource.register(deadly_source(flag, "rsmq_deadly"))
    rows = spark.read.format("rsmq_deadly").options(**connection, subscribe=source, includeHeaders="true").load()
    options = {**connection, "topic": target, "idempotence": "marker", "jobId": "copy"}
    rows.write.format("rsmq_deadly").options(**options).mode("append").save()


def archived(spark: SparkSession, connection: dict[str, str], source: str, target: str, flag: str) -> None:
    """In two batches."""
    spark.dataSource.register(deadly_source(flag, "rsmq"))
    archive(spark, ArchiveOptions({**connection, "subscribe": source}, target, batch=1200))


if __name__ == "__main__":
    main(*sys.argv[1:])
