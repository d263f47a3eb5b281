"""`rsmq pipeline send`: the rows of Parquet, CSV or JSON files as messages in a topic or letters in inboxes, each once.

A row is identified by its file and its number in the file. So a send that was interrupted continues when it is run
again. Rows of one file with the same key stay in order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.model.keys import check_name
from rsmq.model.layout import checked_band
from rsmq.pipeline.spark.errors import filter_rows, spark_errors

DURATION: Final = TypeAdapter(timedelta)
SLICES: Final = 8
"""The rows of a file are split into this many slices by key. At most so many tasks send one file."""
FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
READ_OPTIONS: Final[dict[str, dict[str, str]]] = {"csv": {"header": "true", "inferSchema": "true"}}
MAX_EXAMPLE: Final = 200


class File(NamedTuple):
    """One file with the path that Spark uses. Size and time of modification tell whether it has changed."""

    path: str
    size: int
    modified: str


@dataclass(frozen=True, slots=True)
class SendOptions:
    """The options of a send. `key`, `id`, `value`, `device` name columns; without `value` the row is sent as JSON.

    `topic`: the target, or, with `device`, the topic of the letters. `band`: of the target; None: `normal`. `is_plain`:
    payloads are stored readable, even where others are encrypted.
    """

    path: str
    topic: str
    key: str | None = None
    value: str | None = None
    id: str | None = None
    device: str | None = None
    where: str | None = field(default=None, repr=False)
    job: str | None = None
    expires: timedelta | None = None
    band: str | None = None
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The plan of a send."""

    job: str
    files: int
    rows: int
    examples: tuple[str, ...]


class SendResult(NamedTuple):
    """The result of a run: rows stored now, and rows that were stored before. Others had expired on the way."""

    stored: int = 0
    skipped: int = 0


class SendJob:
    """One send. The same files with the same options are the same job, and a job sends each row once."""

    def __init__(self, spark: SparkSession, options: SendOptions, connection: dict[str, str]) -> None:
        if options.device is None:
            check_name("topic", options.topic)
        if options.band is not None:
            checked_band(options.band)
        self._spark = spark
        self._options = options
        self._connection = connection
        self._files = list_files(spark, options.path)
        self._paths = [file.path for file in self._files]
        self._format = format_of(self._paths)
        self.job = check_name("job", options.job) if options.job is not None else self._digest()

    def plan(self) -> SendPlan:
        """Count the rows. Changes nothing. Raises RsmqError."""
        with spark_errors():
            rows = self._rows()
            examples = tuple(as_example(row.value) for row in rows.select("value").limit(3).collect())
            return SendPlan(self.job, len(self._files), rows.count(), examples)

    def run(self) -> SendResult:
        """Send the rows, or those that are left. Raises RsmqError."""
        options = {"jobId": self.job, "idempotence": "marker", "topic": self._options.topic}
        if self._options.device is not None:
            options["target"] = "inbox"
        if self._options.is_plain:
            options["encode"] = "none"
        if self._options.band is not None:
            options["band"] = self._options.band
        if self._options.expires is not None:
            options["expires"] = DURATION.dump_python(self._options.expires, mode="json")
        with spark_errors(), result_file() as path:
            rows = self._ordered(self._rows())
            rows.write.format("rsmq").options(**self._connection, **options, resultFile=path).mode("append").save()
            return SendResult(**json.loads(Path(path).read_text()))

    def _ordered(self, rows: DataFrame) -> DataFrame:
        """Bring all rows with the same mark (of a device, or of a slice of a file) into one task, in file order."""
        if self._options.device is not None:
            return rows.repartition("device").sortWithinPartitions("device", "id_ms", "id_seq")
        tasks = min(len(self._files) * SLICES, self._spark.sparkContext.defaultParallelism)
        return rows.repartitionById(tasks, F.col("partition") % tasks).sortWithinPartitions("id_seq", "partition")

    def _rows(self) -> DataFrame:
        """The rows as messages. Their source is topic `file`, a slice as partition; file and row make the id."""
        options = self._options
        frame = self._spark.read.options(**READ_OPTIONS.get(self._format, {})).format(self._format).load(options.path)
        columns = frame.columns
        named = {"key": options.key, "id": options.id, "device": options.device}
        for name in filter(None, (*named.values(), options.value)):
            if name not in columns:
                raise ConfigError(f"the file has no column {name!r}: it has {', '.join(columns)}")
        numbered = filter_rows(number_rows(frame, self._paths), options.where)
        slice_number = F.pmod(F.xxhash64(options.key or "_row"), F.lit(SLICES))
        message = {
            "value": F.to_json(F.struct(*columns)) if options.value is None else payload(frame, options.value),
            "topic": F.lit("file"),
            "partition": ((F.col("_file") - 1) * SLICES + slice_number).cast("int"),
            "id_ms": F.col("_file").cast("bigint"),
            "id_seq": F.col("_row"),
            **{name: F.col(column).cast("string") for name, column in named.items() if column is not None},
        }
        return numbered.select(*(column.alias(name) for name, column in message.items()))

    def _digest(self) -> str:
        """A name made of the files and the options. Files that have changed give another job."""
        options = self._options
        content = [
            self._files, options.topic, options.key, options.value, options.id, options.device, options.where,
            *([] if options.band is None else [options.band]),
        ]  # fmt: skip
        return f"send-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]}"


@contextmanager
def result_file() -> Iterator[str]:
    """The path of a file in which the commit, a process of its own on this machine, leaves its result."""
    with TemporaryDirectory(prefix="rsmq-send-") as folder:
        yield str(Path(folder, "result.json"))


def number_rows(frame: DataFrame, paths: list[str]) -> DataFrame:
    """Add `_file`, the number of a row's file, and `_row`, its number in the file, both from 1.

    The numbers do not depend on how Spark cuts files into tasks: blocks are sorted by their start in the file, and rows
    by their order in the block.
    """
    index = F.array_position(F.array(*map(F.lit, paths)), F.col("_metadata.file_path")).cast("int")
    listed = frame.where(F.col("_metadata.file_path").isin(paths))  # without files that were added since the listing
    located = listed.withColumns(
        {"_file": index, "_start": F.col("_metadata.file_block_start"), "_order": F.monotonically_increasing_id()}
    )
    order = Window.partitionBy("_file").orderBy("_start", "_order")
    return located.withColumn("_row", F.row_number().over(order).cast("bigint"))


def list_files(spark: SparkSession, path: str) -> list[File]:
    """The files of a path, sorted. Raises ConfigError if there are none."""
    names = ("file_path", "file_size", "file_modification_time")
    with spark_errors():
        try:
            listed = spark.read.format("binaryFile").load(path).selectExpr(*(f"_metadata.{name}" for name in names))
            found = [File(path, size, str(modified)) for path, size, modified in map(tuple, listed.collect())]
        except AnalysisException:
            raise ConfigError(f"there is no file {path}") from None
    if not found:
        raise ConfigError(f"there is no file in {path}")
    return sorted(found)


def format_of(paths: list[str]) -> str:
    """Spark's format for these files, by their suffix. Raises ConfigError."""
    suffixes = {PurePosixPath(path.removesuffix(".gz")).suffix.lower() for path in paths}
    if len(suffixes) != 1 or not suffixes <= FORMATS.keys():
        raise ConfigError(f"the files must be of one kind ({', '.join(FORMATS)}), not {', '.join(sorted(suffixes))}")
    return FORMATS[suffixes.pop()]


def payload(frame: DataFrame, name: str) -> Column:
    """A column as a payload: text and bytes as they are, structures as JSON."""
    kind = frame.schema[name].dataType.typeName()
    if kind in ("struct", "array", "map"):
        return F.to_json(name)
    return F.col(name) if kind == "binary" else F.col(name).cast("string")


def as_example(value: Any) -> str:
    """A payload as short text."""
    text = bytes(value).decode(errors="backslashreplace") if isinstance(value, bytearray | bytes) else str(value)
    return text if len(text) <= MAX_EXAMPLE else f"{text[: MAX_EXAMPLE - 1]}…"
