"""`rsmq pipeline compact`: each day of a topic as few files, sorted, each message once.

A day is first written to a staging folder. Then one record commits it, and it takes the place of the data that it
replaces (see `archive_store`). If it is interrupted, the day is either as before or as after, and the next command
completes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Final
from uuid import uuid4

from pyspark.sql import SparkSession

from rsmq.errors import RsmqError
from rsmq.pipeline.jobs.archive_store import COMPACTED, FOLDERS, ArchiveStore, Compaction, Part
from rsmq.pipeline.spark.errors import spark_errors

FILE_BYTES: Final = 256 << 20
"""The aim for the size of one file: few enough files to list, small enough for one task."""


@dataclass(frozen=True, slots=True)
class CompactedDay:
    """One rewritten day of a topic."""

    topic: str
    day: date
    messages: int
    duplicates: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


@dataclass(slots=True)
class CompactResult:
    """The result of one run. `skipped`: days that were compact already."""

    archive: str
    days: list[CompactedDay] = field(default_factory=list)
    skipped: int = 0


def compact(
    spark: SparkSession,
    address: str,
    *,
    until: date,
    topics: Sequence[str] = (),
    file_bytes: int = FILE_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CompactResult:
    """Compact all days up to `until`, included. Raises RsmqError."""
    with spark_errors():
        store = ArchiveStore(spark, address)
        result = CompactResult(store.folder.address)
        store.sweep()
        work = [(topic, day) for topic in topics or store.topics() for day in store.days(topic) if day <= until]
        for number, (topic, day) in enumerate(work):
            on_progress(number, len(work))
            parts = store.parts([topic], day, day)
            if len(parts) < 2 and all(part.batch.startswith(COMPACTED) for part in parts):
                result.skipped += 1
            else:
                result.days.append(rewrite(spark, store, topic, day, parts, file_bytes))
        on_progress(len(work), len(work))
        return result


def rewrite(
    spark: SparkSession, store: ArchiveStore, topic: str, day: date, parts: Sequence[Part], file_bytes: int
) -> CompactedDay:
    """Compact one day."""
    files_before = sum(count_files(store, part.path) for part in parts)
    size = sum(store.folder.size(part.path) for part in parts)
    previous = store.compaction(topic, day)
    replaces = tuple(part.batch for part in parts)
    plan = Compaction(topic, day, previous.generation + 1 if previous else 1, uuid4().hex[:12], replaces, 0)
    rows, target = store.read(parts), f"{store.folder.address}/{plan.staged}"
    (
        rows.dropDuplicates(["partition", "offset"])
        .drop(*FOLDERS)
        .repartitionByRange(max(1, round(size / file_bytes)), "partition", "id_ms", "id_seq")
        .sortWithinPartitions("partition", "id_ms", "id_seq")
        .write.option("compression", "zstd")
        .parquet(target)
    )
    had, has = rows.count(), spark.read.parquet(target).count()
    if not store.replace(dataclasses.replace(plan, rows=has)):
        raise RsmqError(
            f"another compaction has rewritten {topic} of {day.isoformat()} meanwhile: this one changed nothing"
        )
    path = plan.part.path
    return CompactedDay(
        topic, day, has, had - has, files_before, count_files(store, path), size, store.folder.size(path)
    )


def count_files(store: ArchiveStore, path: str) -> int:
    """How many data files a folder has."""
    return sum(item.name.endswith(".parquet") for item in store.folder.list(path))
