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

from rsmq.errors import RsmqError
from rsmq.pipeline.jobs.archive_store import COMPACTED, ArchiveStore, Compaction, Part
from rsmq.pipeline.jobs.arrow_archive import ArrowArchive
from rsmq.pipeline.jobs.spark_archive import SparkArchive
from rsmq.pipeline.spark.errors import spark_errors

FEW_BATCHES: Final = 20
"""Today is rewritten when so many new batches are there: a day that still grows is not rewritten for each of them."""
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
    archive: SparkArchive | ArrowArchive,
    *,
    until: date,
    topics: Sequence[str] = (),
    file_bytes: int = FILE_BYTES,
    today: date | None = None,
    few: int = FEW_BATCHES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CompactResult:
    """Compact all days up to `until`, included; `today` and later only if they have `few` new batches. Raises
    RsmqError."""
    with spark_errors():
        result = CompactResult(archive.folder.address)
        archive.sweep()
        work = [(topic, day) for topic in topics or archive.topics() for day in archive.days(topic) if day <= until]
        for number, (topic, day) in enumerate(work):
            on_progress(number, len(work))
            parts = archive.parts([topic], day, day)
            if is_compact(parts, few if today is not None and day >= today else 1):
                result.skipped += 1
            else:
                result.days.append(rewrite(archive, topic, day, parts, file_bytes))
        on_progress(len(work), len(work))
        return result


def is_compact(parts: Sequence[Part], few: int) -> bool:
    """Whether a day need not be rewritten: fewer than `few` batches are not compacted yet."""
    return sum(not part.batch.startswith(COMPACTED) for part in parts) < few


def day_bytes(archive: ArchiveStore, until: date, topics: Sequence[str] = ()) -> int:
    """The size of the largest day that `compact` would rewrite."""
    sizes = [
        archive.size_of(parts)
        for topic in topics or archive.topics()
        for day in archive.days(topic)
        if day <= until and not is_compact(parts := archive.parts([topic], day, day), 1)
    ]
    return max(sizes, default=0)


def rewrite(
    archive: SparkArchive | ArrowArchive, topic: str, day: date, parts: Sequence[Part], file_bytes: int
) -> CompactedDay:
    """Compact one day."""
    files_before = sum(count_files(archive, part.path) for part in parts)
    size = archive.size_of(parts)
    previous = archive.compaction(topic, day)
    replaces = tuple(part.batch for part in parts)
    plan = Compaction(topic, day, previous.generation + 1 if previous else 1, uuid4().hex[:12], replaces, 0)
    had, has = archive.rewrite(parts, plan.staged, max(1, round(size / file_bytes)))
    if not archive.replace(dataclasses.replace(plan, rows=has)):
        raise RsmqError(
            f"another compaction has rewritten {topic} of {day.isoformat()} meanwhile: this one changed nothing"
        )
    path = plan.part.path
    return CompactedDay(
        topic, day, has, had - has, files_before, count_files(archive, path), size, archive.folder.size(path)
    )


def count_files(archive: ArchiveStore, path: str) -> int:
    """How many data files a folder has."""
    return sum(item.name.endswith(".parquet") for item in archive.folder.list(path))
