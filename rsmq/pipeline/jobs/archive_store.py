"""The archive on disk: which batches are committed, which were replaced, and how far each archive is.

    <archive>/topic=orders/date=2026-05-01/batch=<query>-<number>/*.parquet      as `rsmq pipeline archive` wrote them
    <archive>/topic=orders/date=2026-05-01/batch=compact-<generation>/*.parquet  as `rsmq pipeline compact` wrote them
    <archive>/_rsmq/batches/<query>-<number>.json       the newest committed batch of a query, and so all before it
    <archive>/_rsmq/gaps/<query>-<number>.json          what a batch lacks: lost before it was archived
    <archive>/_rsmq/cancelled/<ms>-<random>.json        what was cancelled or replaced after it was archived
    <archive>/_rsmq/days/<topic>/<date>/<generation>.json   a compaction: commits its batch, drops what it replaces

Data without a record is left over from a crash: the commands do not read it. Spark and other readers of Parquet ignore
`_rsmq`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Final

from rsmq.errors import RsmqError
from rsmq.model.clock import now_ms
from rsmq.model.stream_id import parse_stream_id
from rsmq.pipeline.format.offsets import Offsets, Position
from rsmq.pipeline.jobs.folder import Folder

BATCHES: Final = "_rsmq/batches"
GAPS: Final = "_rsmq/gaps"
CANCELLED: Final = "_rsmq/cancelled"
DAYS: Final = "_rsmq/days"
STAGED: Final = "_rsmq/staged"
COMPACTED: Final = "compact"
DAY_MS: Final = 86_400_000

FOLDERS: Final = ("topic", "date", "batch")
IDENTITY: Final = ["topic", "partition", "offset"]
"""What two copies of one message have in common."""

Ends = dict[str, dict[str, str]]
"""Topic -> partition (as text, for JSON) -> the newest stream id."""
Cancellations = dict[tuple[str, int], dict[str, str]]
"""Topic and partition -> stream id -> the groups for which that message was cancelled, as in column `cancelled`."""


@dataclass(frozen=True, slots=True)
class ArchivedBatch:
    """A committed batch. `offsets`: this batch and those before it hold everything up to there.

    `positions`: the same with counts and epochs, as JSON, so that the next run notices what is missing after them, even
    if Spark's checkpoint is lost.
    """

    archive: str
    query: str
    number: int
    offsets: Ends
    positions: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that the archive does not have: `missing` of the `expected` ones after one stream id up to another."""

    topic: str
    partition: int
    after: str
    upto: str
    expected: int
    missing: int
    noticed_ms: int


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


class ArchiveStore:
    """The records of the archive in one folder. Writers commit here, and readers see only committed data.

    `SparkArchive` and `ArrowArchive` are this with the data: the same files, by Spark or in this process.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.newest_note: str | None = None
        """Later notes about cancellations are not read; None: all are."""
        self._cancellations: Cancellations | None = None

    # -- batches --------------------------------------------------------------------------------------------------

    def commit(self, batch: ArchivedBatch, gaps: Sequence[Gap] = (), *, is_repeated: bool = False) -> None:
        """Record that the batch is complete, and what is missing in it.

        `is_repeated`: a first attempt with the same rows may have committed it. Otherwise RsmqError is raised if
        another process has committed this batch.
        """
        name = f"{batch.query}-{batch.number}.json"
        self.folder.delete(f"{GAPS}/{name}")  # of an attempt that was not committed
        if gaps:
            self.folder.write(f"{GAPS}/{name}", json.dumps([asdict(gap) for gap in gaps]))
        if is_repeated:
            self.folder.delete(f"{BATCHES}/{name}")
        if not self.folder.write(f"{BATCHES}/{name}", json.dumps(asdict(batch))):
            raise RsmqError(
                f"another archive job named {batch.archive!r} has committed to {self.folder.address} meanwhile: this "
                f"one changed nothing. Run one of them at a time"
            )
        for query, number in self._records():
            if query == batch.query and number < batch.number:
                self.folder.delete(f"{BATCHES}/{query}-{number}.json")

    def gaps(self) -> list[Gap]:
        """What the archive is known not to have."""
        committed = {batch.query: batch.number for batch in self.batches()}
        found = []
        for item in self.folder.list(GAPS):
            query, _, number = item.name.removesuffix(".json").rpartition("-")
            if item.name.endswith(".json") and int(number) <= committed.get(query, -1):
                found += [Gap(**gap) for gap in json.loads(self.folder.read(f"{GAPS}/{item.name}"))]
        return found

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

    def positions(self, archive: str) -> Offsets:
        """How far an archive is, with counts and epochs. Streams whose batches have none of these are left out."""
        found = [
            Offsets.from_json(batch.positions)
            for batch in self.batches()
            if batch.archive == archive and batch.positions
        ]
        epochs: dict[str, int] = {}
        for each in found:
            for topic, epoch in each.epochs.items():
                epochs[topic] = max(epoch, epochs.get(topic, epoch))
        newest: dict[tuple[str, int], Position] = {}
        for each in found:
            for stream, position in each.positions.items():
                is_current = each.epochs[stream[0]] == epochs[stream[0]]
                if is_current and _order(position.id) >= _order(newest.get(stream, position).id):
                    newest[stream] = position
        return Offsets(epochs, newest)

    def writers(self, topic: str) -> int:
        """How many queries have archived a topic. One query writes each message once; two may overlap."""
        return sum(topic in batch.offsets for batch in self.batches())

    def _records(self) -> Iterator[tuple[str, int]]:
        for item in self.folder.list(BATCHES):
            query, _, number = item.name.removesuffix(".json").rpartition("-")
            if item.name.endswith(".json") and query and number.isdecimal():
                yield query, int(number)

    # -- cancellations --------------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """The names of the notes about what was cancelled after it was archived, the oldest first."""
        names = sorted(item.name for item in self.folder.list(CANCELLED) if item.name.endswith(".json"))
        return [name for name in names if self.newest_note is None or name <= self.newest_note]

    def cancellations(self) -> Cancellations:
        """What these notes say; a later one counts more. It is read once, for the topics in it."""
        found: Cancellations = {}
        for name in self.notes():
            for topic, partitions in json.loads(self.folder.read(f"{CANCELLED}/{name}")).items():
                for number, ids in partitions.items():
                    found.setdefault((topic, int(number)), {}).update(ids)
        return found

    def later_cancelled(self, topic: str) -> tuple[list[str], list[str]]:
        """Of a topic: `partition/stream id` of the messages that the notes name, and their groups. Read once."""
        if self._cancellations is None:
            self._cancellations = self.cancellations()
        rows = [
            (f"{number}/{each}", groups)
            for (name, number), ids in self._cancellations.items()
            for each, groups in ids.items()
            if name == topic
        ]
        return [name for name, _ in rows], [groups for _, groups in rows]

    # -- parts ----------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """The topics that have data here."""
        return [item.name.removeprefix("topic=") for item in self.folder.list() if item.name.startswith("topic=")]

    def parts_between(self, topics: Sequence[str], since: datetime | None, until: datetime | None) -> list[Part]:
        """The committed parts of the days of a window of time."""
        return self.parts(topics, *(None if time is None else time.astimezone(UTC).date() for time in (since, until)))

    def size_of(self, parts: Sequence[Part]) -> int:
        """Bytes of the files of some parts."""
        return sum(self.folder.size(part.path) for part in parts)

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

    def parts_of_batch(self, batch: str, topics: Sequence[str]) -> list[Part]:
        """The folders that a batch has written, committed or not."""
        return [
            Part(topic, day, batch)
            for topic in topics
            for day in self.days(topic)
            if self.folder.exists(Part(topic, day, batch).path)
        ]

    def written(self, topic: str, day: date) -> list[str]:
        """The batches that have a folder in a day, committed or not."""
        items = self.folder.list(f"topic={topic}/date={day.isoformat()}")
        return [item.name.removeprefix("batch=") for item in items if item.name.startswith("batch=")]

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


def _order(stream_id: str) -> tuple[int, int]:
    return parse_stream_id(stream_id.encode())
