"""The archive on disk: which batches are committed, which were replaced, and how far each archive is.

    <archive>/topic=orders/date=2026-05-01/batch=<query>-<number>/*.parquet      as `rsmq pipeline archive` wrote them
    <archive>/topic=orders/date=2026-05-01/batch=compact-<generation>/*.parquet  as `rsmq pipeline compact` wrote them
    <archive>/_rsmq/batches/<query>-<number>.json       the newest committed batch of a query, and so all before it
    <archive>/_rsmq/days/<topic>/<date>/<generation>.json   a compaction: commits its batch, drops what it replaces

Data without a record is left over from a crash: the commands do not read it. Spark and other readers of Parquet ignore
`_rsmq`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from typing import Any, Final, cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DateType, StringType, StructField, StructType

from rsmq.errors import RsmqError
from rsmq.model.clock import epoch_ms, now_ms
from rsmq.model.stream_id import parse_stream_id
from rsmq.pipeline.format.columns import WITH_HEADERS

BATCHES: Final = "_rsmq/batches"
DAYS: Final = "_rsmq/days"
STAGED: Final = "_rsmq/staged"
COMPACTED: Final = "compact"
DAY_MS: Final = 86_400_000

SCHEMA: Final = StructType(
    [field for field in WITH_HEADERS.fields if field.name != "topic"]
    + [StructField("topic", StringType()), StructField("date", DateType()), StructField("batch", StringType())]
)
FOLDERS: Final = ("topic", "date", "batch")
IDENTITY: Final = ["topic", "partition", "offset"]
"""What two copies of one message have in common."""

Ends = dict[str, dict[str, str]]
"""Topic -> partition (as text, for JSON) -> the newest stream id."""


@dataclass(frozen=True, slots=True)
class ArchivedBatch:
    """A committed batch. `offsets`: this batch and those before it hold everything up to there."""

    archive: str
    query: str
    number: int
    offsets: Ends


@dataclass(frozen=True, slots=True)
class Part:
    """One folder of data: a topic, a day (UTC, by the stream id) and the batch that wrote it."""

    topic: str
    day: date
    batch: str

    @property
    def path(self) -> str:
        """Its path within the archive."""
        return f"topic={self.topic}/date={self.day.isoformat()}/batch={self.batch}"


@dataclass(frozen=True, slots=True)
class Compaction:
    """A rewritten day of a topic. `generation` counts from 1; `attempt` tells two attempts at one generation apart."""

    topic: str
    day: date
    generation: int
    attempt: str
    replaces: tuple[str, ...]
    rows: int

    @property
    def part(self) -> Part:
        """The folder of its data."""
        return Part(self.topic, self.day, f"{COMPACTED}-{self.generation}")

    @property
    def record(self) -> str:
        """Its record. Only one writer can create that file, so two compactions of one day cannot both commit."""
        return f"{DAYS}/{self.topic}/{self.day.isoformat()}/{self.generation}.json"

    @property
    def staged(self) -> str:
        """The folder of its data until it is committed."""
        return f"{STAGED}/{self.topic}-{self.day.isoformat()}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Item:
    """One file or folder of a listing. `size` in bytes."""

    name: str
    size: int
    is_folder: bool
    modified_ms: int


class Folder:
    """A folder on any file system that Spark can use (a disk, HDFS, S3). Paths are relative to its address.

    It goes through the JVM that runs Spark, so it needs no client and no credentials of its own.
    """

    def __init__(self, spark: SparkSession, address: str) -> None:
        context = spark.sparkContext
        self._jvm = cast(Any, context._jvm)
        self._gateway = cast(Any, context._gateway)
        hadoop = context._jsc.hadoopConfiguration()
        self._root = self._jvm.org.apache.hadoop.fs.Path(address)
        self._files = self._root.getFileSystem(hadoop)
        self._root = self._files.makeQualified(self._root)
        self._renamer = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._root.toUri(), hadoop)
        self.address: str = self._root.toString()

    def exists(self, path: str = "") -> bool:
        """Whether a file or folder exists."""
        return bool(self._files.exists(self._at(path)))

    def list(self, path: str = "") -> list[Item]:
        """Its content, sorted by name; empty if it does not exist."""
        if not self.exists(path):
            return []
        found = self._files.listStatus(self._at(path))
        items = (
            Item(each.getPath().getName(), each.getLen(), each.isDirectory(), each.getModificationTime())
            for each in found
        )
        return sorted(items, key=lambda item: item.name)

    def size(self, path: str) -> int:
        """Bytes of the files in a folder, without those that Spark ignores."""
        return sum(item.size for item in self.list(path) if not item.is_folder and item.name[0] not in "._")

    def read(self, path: str) -> str:
        """The text of a small file."""
        stream = self._files.open(self._at(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, path: str, text: str) -> bool:
        """Create a small file, whole or not at all. Returns False and changes nothing if it exists."""
        draft = self._at(f"{path}.draft")
        stream = self._files.create(draft, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        return self._rename(draft, self._at(path))

    def move(self, source: str, target: str) -> bool:
        """Rename a file or folder; parents of the target are created. False if the target exists."""
        self._files.mkdirs(self._at(target).getParent())
        return self._rename(self._at(source), self._at(target))

    def delete(self, path: str) -> None:
        """Remove a file or a folder with its content, if it exists."""
        self._files.delete(self._at(path), True)

    def _rename(self, source: Any, target: Any) -> bool:
        modes = self._gateway.new_array(getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename"), 0)
        if self._files.exists(target):
            return False
        self._renamer.rename(source, target, modes)
        return True

    def _at(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path) if path else self._root


class ArchiveStore:
    """The archive at one address. Writers commit here, and readers see only committed data."""

    def __init__(self, spark: SparkSession, address: str) -> None:
        self._spark = spark
        self.folder = Folder(spark, address)

    # -- batches --------------------------------------------------------------------------------------------------

    def commit(self, batch: ArchivedBatch) -> None:
        """Record that the batch is complete."""
        name = f"{BATCHES}/{batch.query}-{batch.number}.json"
        self.folder.delete(name)  # of a first attempt with the same rows that stopped before Spark committed it
        self.folder.write(name, json.dumps(asdict(batch)))
        for query, number in self._records():
            if query == batch.query and number < batch.number:
                self.folder.delete(f"{BATCHES}/{query}-{number}.json")

    def batches(self) -> list[ArchivedBatch]:
        """The newest committed batch of every query."""
        newest = dict(sorted(self._records()))
        texts = (self.folder.read(f"{BATCHES}/{query}-{number}.json") for query, number in newest.items())
        return [ArchivedBatch(**json.loads(text)) for text in texts]

    def offsets(self, archive: str | None = None) -> Ends:
        """The newest archived id of each partition, over all queries or those of one archive name."""
        merged: Ends = {}
        for batch in self.batches():
            if archive in (None, batch.archive):
                for topic, ids in batch.offsets.items():
                    known = merged.setdefault(topic, {})
                    known.update({n: max(each, known.get(n, each), key=_order) for n, each in ids.items()})
        return merged

    def writers(self, topic: str) -> int:
        """How many queries have archived a topic. One query writes each message once; two may overlap."""
        return sum(topic in batch.offsets for batch in self.batches())

    def _records(self) -> Iterator[tuple[str, int]]:
        for item in self.folder.list(BATCHES):
            query, _, number = item.name.removesuffix(".json").rpartition("-")
            if item.name.endswith(".json") and query and number.isdecimal():
                yield query, int(number)

    # -- parts ----------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """The topics that have data here."""
        return [item.name.removeprefix("topic=") for item in self.folder.list() if item.name.startswith("topic=")]

    def messages(self, topics: Sequence[str], since: datetime | None, until: datetime | None) -> DataFrame:
        """The committed rows of some topics, stored at `since` or later and before `until`."""
        days = (None if time is None else time.astimezone(UTC).date() for time in (since, until))
        return between(self.read(self.parts(topics, *days)), since, until)

    def parts(self, topics: Sequence[str], start: date | None = None, end: date | None = None) -> list[Part]:
        """The committed parts of some topics and days, both ends included."""
        committed = {batch.query: batch.number for batch in self.batches()}
        return [
            part
            for topic in topics
            for day in self.days(topic)
            if (start is None or start <= day) and (end is None or day <= end)
            for part in self._parts_of(topic, day, committed)
        ]

    def days(self, topic: str) -> list[date]:
        """The days for which a topic has data."""
        names = (item.name.removeprefix("date=") for item in self.folder.list(f"topic={topic}") if item.is_folder)
        return [date.fromisoformat(name) for name in names]

    def _parts_of(self, topic: str, day: date, committed: dict[str, int]) -> Iterator[Part]:
        compaction = self.compaction(topic, day)
        replaced = set(compaction.replaces) if compaction else set()
        for name in self.written(topic, day):
            query, _, number = name.rpartition("-")
            if query == COMPACTED:
                is_committed = compaction is not None and compaction.part.batch == name
            else:
                is_committed = query in committed and int(number) <= committed[query] and name not in replaced
            if is_committed:
                yield Part(topic, day, name)

    def written(self, topic: str, day: date) -> list[str]:
        """The batches that have a folder in a day, committed or not."""
        items = self.folder.list(f"topic={topic}/date={day.isoformat()}")
        return [item.name.removeprefix("batch=") for item in items if item.name.startswith("batch=")]

    def read(self, parts: Sequence[Part]) -> DataFrame:
        """The rows of some parts, with `topic`, `date` and `batch`."""
        if not parts:
            return self._spark.createDataFrame([], SCHEMA)
        paths = [f"{self.folder.address}/{part.path}" for part in parts]
        reader = self._spark.read.option("basePath", self.folder.address).schema(SCHEMA)
        return reader.parquet(*paths)

    # -- compactions ----------------------------------------------------------------------------------------------

    def compaction(self, topic: str, day: date) -> Compaction | None:
        """The newest one of a day, or None. If it was interrupted after its commit, it is completed first."""
        names = [item.name for item in self.folder.list(f"{DAYS}/{topic}/{day.isoformat()}")]
        generations = [int(name.removesuffix(".json")) for name in names if name.endswith(".json")]
        if not generations:
            return None
        record = json.loads(self.folder.read(f"{DAYS}/{topic}/{day.isoformat()}/{max(generations)}.json"))
        found = Compaction(topic, day, max(generations), record["attempt"], tuple(record["replaces"]), record["rows"])
        self._complete(found)
        return found

    def replace(self, compaction: Compaction) -> bool:
        """Commit staged data in place of what it replaces. False if another compaction of the day was first."""
        record = {"attempt": compaction.attempt, "replaces": compaction.replaces, "rows": compaction.rows}
        if not self.folder.write(compaction.record, json.dumps(record)):
            return False
        self._complete(compaction)
        return True

    def sweep(self) -> None:
        """Remove staged data that was never committed: it is a day old, so no job still writes it."""
        for item in self.folder.list(STAGED):
            if item.modified_ms < now_ms() - DAY_MS:
                self.folder.delete(f"{STAGED}/{item.name}")

    def _complete(self, compaction: Compaction) -> None:
        if self.folder.exists(compaction.staged):
            self.folder.move(compaction.staged, compaction.part.path)
        if not self.folder.exists(compaction.part.path):
            raise RsmqError(f"{self.folder.address}/{compaction.part.path} is missing: no other data was removed")
        for batch in set(self.written(compaction.topic, compaction.day)) & set(compaction.replaces):
            self.folder.delete(Part(compaction.topic, compaction.day, batch).path)


def between(rows: DataFrame, since: datetime | None, until: datetime | None) -> DataFrame:
    """The rows stored at `since` or later and before `until`."""
    if since is not None:
        rows = rows.where(F.col("id_ms") >= epoch_ms(since))
    return rows if until is None else rows.where(F.col("id_ms") < epoch_ms(until))


def message_bytes() -> Column:
    """The size of a row's key and payload."""
    return (F.length("value") + F.coalesce(F.length("key"), F.lit(0))).cast("bigint").alias("size")


def _order(stream_id: str) -> tuple[int, int]:
    return parse_stream_id(stream_id.encode())
