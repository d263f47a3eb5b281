"""`rsmq pipeline send`: the rows of Parquet, CSV or JSON files as messages, into a topic or into device inboxes, once.

A row is known by its file and its place in it, so that a send that is cut off goes on where it was when it is run
again. Rows of one file with the same key stay in order.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.keys import check_name
from rsmq.pipeline.failure import first_line, spoken

SPAN: Final = TypeAdapter(timedelta)
LANES: Final = 8
"""A file is sent by so many tasks at most; its rows are spread over them by key."""
FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
OPTIONS: Final[dict[str, dict[str, str]]] = {"csv": {"header": "true", "inferSchema": "true"}}


class File(NamedTuple):
    """One file, as Spark names it, and what tells whether it is still the same."""

    path: str
    size: int
    modified: str


@dataclass(frozen=True, slots=True)
class Order:
    """What to send. Columns by name: `key`, `id` and `value`; without `value` the whole row is the payload, as JSON.

    `topic`: where to, or, with `device` (the column with the device's id), what the letters are sent under.
    """

    path: str
    topic: str
    key: str | None = None
    value: str | None = None
    id: str | None = None
    device: str | None = None
    where: str | None = None
    job: str | None = None
    expiry: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a send would do."""

    job: str
    files: int
    rows: int
    examples: tuple[str, ...]


class Send:
    """One job: the same files with the same options are one job, which is done once."""

    def __init__(self, spark: SparkSession, order: Order, connection: dict[str, str]) -> None:
        if order.device is None:
            check_name("topic", order.topic)
        self._spark, self._order, self._connection = spark, order, connection
        self._files = files(spark, order.path)
        self._paths = [file.path for file in self._files]
        self._kind = kind_of(self._paths)
        self.job = check_name("job", order.job) if order.job is not None else self._digest()

    def plan(self) -> Plan:
        """Count the rows. Changes nothing. Raises RsmqError."""
        with spoken():
            rows = self._rows()
            examples = tuple(shown(row.value) for row in rows.select("value").limit(3).collect())
            return Plan(self.job, len(self._files), rows.count(), examples)

    def run(self) -> None:
        """Send, or go on sending. Raises RsmqError."""
        order = self._order
        options = {"jobId": self.job, "idempotence": "marker", "topic": order.topic}
        if order.device is not None:
            options["target"] = "inbox"
        if order.expiry is not None:
            options["expiry"] = SPAN.dump_python(order.expiry, mode="json")
        with spoken():
            (
                self._ordered(self._rows())
                .write.format("rsmq")
                .options(**self._connection, **options)
                .mode("append")
                .save()
            )

    def _ordered(self, rows: DataFrame) -> DataFrame:
        """What a mark belongs to (a device; a lane of a file) in one task, in the order of the files."""
        if self._order.device is not None:
            return rows.repartition("device").sortWithinPartitions("device", "id_ms", "id_seq")
        tasks = min(len(self._files) * LANES, self._spark.sparkContext.defaultParallelism)
        return rows.repartitionById(tasks, F.col("partition") % tasks).sortWithinPartitions("id_seq", "partition")

    def _rows(self) -> DataFrame:
        """The rows as messages; where each comes from: topic `file`, a lane as partition, file and row as place."""
        order = self._order
        frame = self._spark.read.options(**OPTIONS.get(self._kind, {})).format(self._kind).load(order.path)
        columns = frame.columns
        for name in filter(None, (order.key, order.value, order.id, order.device)):
            if name not in columns:
                raise ConfigError(f"the file has no column {name!r}: it has {', '.join(columns)}")
        placed = filtered(numbered(frame, self._paths), order.where)
        lane = F.pmod(F.xxhash64(order.key or "_row"), F.lit(LANES))
        chosen = {
            "value": F.to_json(F.struct(*columns)) if order.value is None else as_text(frame, order.value),
            "topic": F.lit("file"),
            "partition": ((F.col("_file") - 1) * LANES + lane).cast("int"),
            "id_ms": F.col("_file").cast("bigint"),
            "id_seq": F.col("_row"),
            **{name: F.col(column).cast("string") for name, column in self._named().items()},
        }
        return placed.select(*(column.alias(name) for name, column in chosen.items()))

    def _named(self) -> dict[str, str]:
        found = {"key": self._order.key, "id": self._order.id, "device": self._order.device}
        return {name: column for name, column in found.items() if column is not None}

    def _digest(self) -> str:
        """The files as they are and the options: changed files are another job."""
        order = self._order
        about = [self._files, order.topic, order.key, order.value, order.id, order.device, order.where]
        return f"send-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]}"


def filtered(rows: DataFrame, where: str | None) -> DataFrame:
    """The rows for which an SQL expression is true. Raises ConfigError for one that is not understood."""
    try:
        return rows if where is None else rows.where(where)
    except (AnalysisException, ParseException) as error:
        raise ConfigError(f"--where {where!r} is not understood: {first_line(str(error))}") from None


def numbered(frame: DataFrame, paths: list[str]) -> DataFrame:
    """Rows with `_file` (the place of their file in the list) and `_row` (their own in it), both from 1.

    The place does not depend on how Spark cuts files into tasks: pieces are in the order of the file, and rows in the
    order of their piece.
    """
    index = F.array_position(F.array(*map(F.lit, paths)), F.col("_metadata.file_path")).cast("int")
    known = frame.where(F.col("_metadata.file_path").isin(paths))  # a file that has come since is none of this job
    placed = known.withColumns(
        {"_file": index, "_start": F.col("_metadata.file_block_start"), "_order": F.monotonically_increasing_id()}
    )
    order = Window.partitionBy("_file").orderBy("_start", "_order")
    return placed.withColumn("_row", F.row_number().over(order).cast("bigint"))


def files(spark: SparkSession, path: str) -> list[File]:
    """The files behind a path, sorted. Raises ConfigError for none."""
    names = ("file_path", "file_size", "file_modification_time")
    with spoken():
        try:
            listed = spark.read.format("binaryFile").load(path).selectExpr(*(f"_metadata.{name}" for name in names))
            found = [File(path, size, str(modified)) for path, size, modified in map(tuple, listed.collect())]
        except AnalysisException:
            raise ConfigError(f"there is no file {path}") from None
    if not found:
        raise ConfigError(f"there is no file in {path}")
    return sorted(found)


def kind_of(paths: list[str]) -> str:
    """Their format, by their names. Raises ConfigError."""
    suffixes = {PurePosixPath(path.removesuffix(".gz")).suffix.lower() for path in paths}
    if len(suffixes) != 1 or not suffixes <= FORMATS.keys():
        raise ConfigError(f"files of one kind are needed ({', '.join(FORMATS)}), not {', '.join(sorted(suffixes))}")
    return FORMATS[suffixes.pop()]


def as_text(frame: DataFrame, name: str) -> Column:
    """A column as a payload: text and bytes as they are, anything with parts as JSON."""
    kind = frame.schema[name].dataType.typeName()
    if kind in ("struct", "array", "map"):
        return F.to_json(name)
    return F.col(name) if kind == "binary" else F.col(name).cast("string")


def shown(value: Any) -> str:
    """A payload for people."""
    text = bytes(value).decode(errors="backslashreplace") if isinstance(value, bytearray | bytes) else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
