"""The archive on disk: which batches count, which were replaced, and where each archive has come to.

    <archive>/topic=orders/date=2026-05-01/batch=<query>-<number>/*.parquet      as `rsmq pipeline archive` wrote them
    <archive>/topic=orders/date=2026-05-01/batch=compact-<generation>/*.parquet  as `rsmq pipeline compact` wrote them
    <archive>/_rsmq/batches/<query>-<number>.json       the newest batch of a query: it and all before it count
    <archive>/_rsmq/days/<topic>/<date>/<generation>.json   a compaction: its batch counts, what it replaces does not

Data that no such record names is the rest of a crash: readers here do not see it. Spark, and whoever else reads
Parquet, ignores `_rsmq`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, StringType, StructField, StructType

from rsmq.clock import now_ms
from rsmq.errors import RsmqError
from rsmq.pipeline.column import WITH_HEADERS
from rsmq.pipeline.folder import Folder
from rsmq.pipeline.survey import as_numbers

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

Ends = dict[str, dict[str, str]]
"""Topic -> partition (as text, for JSON) -> the newest stream id."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that is completely in the archive. `offsets`: all up to there is, counting the batches before it."""

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
        """Within the archive."""
        return f"topic={self.topic}/date={self.day.isoformat()}/batch={self.batch}"


@dataclass(frozen=True, slots=True)
class Compaction:
    """A day of a topic written anew. `generation` counts from 1; `attempt` tells two of one generation apart."""

    topic: str
    day: date
    generation: int
    attempt: str
    replaces: tuple[str, ...]
    rows: int

    @property
    def part(self) -> Part:
        """Where its data is."""
        return Part(self.topic, self.day, f"{COMPACTED}-{self.generation}")

    @property
    def record(self) -> str:
        """Its file: as it is made by one only, two compactions of one day cannot both count."""
        return f"{DAYS}/{self.topic}/{self.day.isoformat()}/{self.generation}.json"

    @property
    def staged(self) -> str:
        """Where its data is before it counts."""
        return f"{STAGED}/{self.topic}-{self.day.isoformat()}-{self.attempt}"


class Store:
    """The archive at one address. Writers commit through it, readers see only what is committed."""

    def __init__(self, spark: SparkSession, address: str) -> None:
        self._spark = spark
        self.folder = Folder(spark, address)

    # -- batches --------------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        """From now on the batch counts."""
        name = f"{BATCHES}/{batch.query}-{batch.number}.json"
        self.folder.delete(name)  # of a first attempt with the same rows, cut off before Spark heard of it
        self.folder.write(name, json.dumps(asdict(batch)))
        for query, number in self._records():
            if query == batch.query and number < batch.number:
                self.folder.delete(f"{BATCHES}/{query}-{number}.json")

    def batches(self) -> list[Batch]:
        """The newest batch of every query that has written here."""
        newest = dict(sorted(self._records()))
        return [self._batch(query, number) for query, number in newest.items()]

    def offsets(self, archive: str | None = None) -> Ends:
        """How far the archive has come, over all queries that wrote it, or one of that name."""
        merged: Ends = {}
        for batch in self.batches():
            if archive in (None, batch.archive):
                for topic, ids in batch.offsets.items():
                    known = merged.setdefault(topic, {})
                    known.update({n: newest(each, known.get(n, each)) for n, each in ids.items()})
        return merged

    def writers(self, topic: str) -> int:
        """How many queries have archived a topic. What one of them has written is here once, two may overlap."""
        return sum(topic in batch.offsets for batch in self.batches())

    def _records(self) -> Iterator[tuple[str, int]]:
        for item in self.folder.list(BATCHES):
            query, _, number = item.name.removesuffix(".json").rpartition("-")
            if item.name.endswith(".json") and query and number.isdecimal():
                yield query, int(number)

    def _batch(self, query: str, number: int) -> Batch:
        return Batch(**json.loads(self.folder.read(f"{BATCHES}/{query}-{number}.json")))

    # -- parts ----------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """All topics that have data here."""
        return [item.name.removeprefix("topic=") for item in self.folder.list() if item.name.startswith("topic=")]

    def parts(self, topics: Sequence[str], start: date | None = None, end: date | None = None) -> list[Part]:
        """The parts that count, of some topics and days, both ends included."""
        committed = {batch.query: batch.number for batch in self.batches()}
        return [
            part
            for topic in topics
            for day in self.days(topic)
            if (start is None or start <= day) and (end is None or day <= end)
            for part in self._parts_of(topic, day, committed)
        ]

    def days(self, topic: str) -> list[date]:
        """The days that have data of a topic."""
        names = (item.name.removeprefix("date=") for item in self.folder.list(f"topic={topic}") if item.is_folder)
        return [date.fromisoformat(name) for name in names]

    def _parts_of(self, topic: str, day: date, committed: dict[str, int]) -> Iterator[Part]:
        compaction = self.compaction(topic, day)
        replaced = set(compaction.replaces) if compaction else set()
        for name in self.written(topic, day):
            query, _, number = name.rpartition("-")
            if query == COMPACTED:
                counts = compaction is not None and compaction.part.batch == name
            else:
                counts = query in committed and int(number) <= committed[query] and name not in replaced
            if counts:
                yield Part(topic, day, name)

    def written(self, topic: str, day: date) -> list[str]:
        """The batches that have a folder in a day, whether they count or not."""
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
        """The newest one of a day, or None. One that was cut off after it had begun to count is completed first."""
        names = [item.name for item in self.folder.list(f"{DAYS}/{topic}/{day.isoformat()}")]
        generations = [int(name.removesuffix(".json")) for name in names if name.endswith(".json")]
        if not generations:
            return None
        told = json.loads(self.folder.read(f"{DAYS}/{topic}/{day.isoformat()}/{max(generations)}.json"))
        found = Compaction(topic, day, max(generations), told["attempt"], tuple(told["replaces"]), told["rows"])
        self._complete(found)
        return found

    def replace(self, compaction: Compaction) -> bool:
        """Let staged data count instead of what it replaces. False if another compaction of the day was first."""
        told = {"attempt": compaction.attempt, "replaces": compaction.replaces, "rows": compaction.rows}
        if not self.folder.write(compaction.record, json.dumps(told)):
            return False
        self._complete(compaction)
        return True

    def sweep(self) -> None:
        """Remove staged data that was cut off before it counted: a day old, so that nobody writes it any more."""
        for item in self.folder.list(STAGED):
            if item.modified_ms < now_ms() - DAY_MS:
                self.folder.delete(f"{STAGED}/{item.name}")

    def _complete(self, compaction: Compaction) -> None:
        if self.folder.exists(compaction.staged):
            self.folder.move(compaction.staged, compaction.part.path)
        if not self.folder.exists(compaction.part.path):
            raise RsmqError(f"{self.folder.address}/{compaction.part.path} is missing: nothing else was removed")
        for batch in set(self.written(compaction.topic, compaction.day)) & set(compaction.replaces):
            self.folder.delete(Part(compaction.topic, compaction.day, batch).path)

    def __repr__(self) -> str:
        return f"<Store {self.folder.address}>"


def newest(*ids: str) -> str:
    """The highest stream id."""
    return max(ids, key=as_numbers)
