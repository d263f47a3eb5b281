"""`rsmq pipeline compact`: each day of a topic as few files, sorted, each message once.

A day is written beside the others first, then counts by one record, then takes the place of what it replaces (see
`store`): cut off anywhere, the day is either as before or as after, and the next command completes it.
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
from rsmq.pipeline.failure import spoken
from rsmq.pipeline.store import COMPACTED, FOLDERS, Compaction, Part, Store

FILE_BYTES: Final = 256 << 20
"""What one file should weigh: few enough to list, small enough for one task."""


@dataclass(frozen=True, slots=True)
class Day:
    """What became of one day of a topic."""

    topic: str
    day: date
    messages: int
    duplicates: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


@dataclass(slots=True)
class Done:
    """What came of it. `skipped`: days that were as they should be."""

    archive: str
    days: list[Day] = field(default_factory=list)
    skipped: int = 0


def compact(
    spark: SparkSession,
    address: str,
    *,
    until: date,
    topics: Sequence[str] = (),
    file_bytes: int = FILE_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Done:
    """Compact all days up to `until`, included. Raises RsmqError."""
    with spoken():
        store = Store(spark, address)
        done = Done(store.folder.address)
        store.sweep()
        work = [(topic, day) for topic in topics or store.topics() for day in store.days(topic) if day <= until]
        for number, (topic, day) in enumerate(work):
            on_progress(number, len(work))
            parts = store.parts([topic], day, day)
            if len(parts) < 2 and all(part.batch.startswith(COMPACTED) for part in parts):
                done.skipped += 1
            else:
                done.days.append(rewrite(spark, store, topic, day, parts, file_bytes))
        on_progress(len(work), len(work))
        return done


def rewrite(spark: SparkSession, store: Store, topic: str, day: date, parts: Sequence[Part], file_bytes: int) -> Day:
    """One day."""
    before = [(files(store, part.path), store.folder.size(part.path)) for part in parts]
    size = sum(weight for _, weight in before)
    known = store.compaction(topic, day)
    replaces = tuple(part.batch for part in parts)
    plan = Compaction(topic, day, known.generation + 1 if known else 1, uuid4().hex[:12], replaces, 0)
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
        raise RsmqError(f"another compaction has done {topic} of {day.isoformat()} meanwhile: this one changed nothing")
    path = plan.part.path
    return Day(
        topic, day, has, had - has, sum(number for number, _ in before), files(store, path), size,
        store.folder.size(path),
    )  # fmt: skip


def files(store: Store, path: str) -> int:
    """How many files of data a folder has."""
    return sum(item.name.endswith(".parquet") for item in store.folder.list(path))
