"""The archive as Spark reads and rewrites it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DateType, StringType, StructField, StructType

from rsmq.model.clock import epoch_ms
from rsmq.pipeline.format.columns import WITH_HEADERS
from rsmq.pipeline.jobs.archive_store import FOLDERS, IDENTITY, ArchiveStore, Part
from rsmq.pipeline.jobs.hadoop_folder import HadoopFolder

SCHEMA: Final = StructType(
    [field for field in WITH_HEADERS.fields if field.name != "topic"]
    + [StructField("topic", StringType()), StructField("date", DateType()), StructField("batch", StringType())]
)


class SparkArchive(ArchiveStore):
    """The archive at one address, on any file system that Spark knows."""

    def __init__(self, spark: SparkSession, address: str) -> None:
        super().__init__(HadoopFolder(spark, address))
        self.spark = spark

    def messages(self, topics: Sequence[str], since: datetime | None, until: datetime | None) -> DataFrame:
        """The committed rows of some topics, stored at `since` or later and before `until`."""
        return between(self.read(self.parts_between(topics, since, until)), since, until)

    def read(self, parts: Sequence[Part]) -> DataFrame:
        """The rows of some parts, with `topic`, `date` and `batch`; `cancelled` has what was cancelled after it was
        archived, too."""
        if not parts:
            return self.spark.createDataFrame([], SCHEMA)
        paths = [f"{self.folder.address}/{part.path}" for part in parts]
        reader = self.spark.read.option("basePath", self.folder.address).schema(SCHEMA)
        return self._with_later(reader.parquet(*paths), dict.fromkeys(part.topic for part in parts))

    def _with_later(self, rows: DataFrame, topics: Iterable[str]) -> DataFrame:
        later = [
            (topic, *name.split("/"), groups)
            for topic in topics
            for name, groups in zip(*self.later_cancelled(topic), strict=True)
        ]
        if not later:
            return rows
        notes = self.spark.createDataFrame(later, "topic string, partition string, offset string, later string")
        notes = notes.withColumn("partition", F.col("partition").cast("int"))
        found = rows.join(F.broadcast(notes), IDENTITY, "left")
        return found.withColumn("cancelled", F.coalesce("later", "cancelled")).select(*rows.columns)

    def rewrite(self, parts: Sequence[Part], path: str, files: int) -> tuple[int, int]:
        """Write the rows of some parts of a day into a folder, sorted, each once. Returns the rows before and after."""
        rows, target = self.read(parts), f"{self.folder.address}/{path}"
        (
            rows.dropDuplicates(["partition", "offset"])
            .drop(*FOLDERS)
            .repartitionByRange(files, "partition", "id_ms", "id_seq")
            .sortWithinPartitions("partition", "id_ms", "id_seq")
            .write.option("compression", "zstd")
            .parquet(target)
        )
        return rows.count(), self.spark.read.parquet(target).count()


def between(rows: DataFrame, since: datetime | None, until: datetime | None) -> DataFrame:
    """The rows stored at `since` or later and before `until`."""
    if since is not None:
        rows = rows.where(F.col("id_ms") >= epoch_ms(since))
    return rows if until is None else rows.where(F.col("id_ms") < epoch_ms(until))


def message_bytes() -> Column:
    """The size of a row's key and payload."""
    return (F.length("value") + F.coalesce(F.length("key"), F.lit(0))).cast("bigint").alias("size")
