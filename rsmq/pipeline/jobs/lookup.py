"""One message in the archive, without a JVM. The days and the parts of files that its id rules out are not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, timedelta
from typing import Any, Final

import pyarrow.compute as pc
import pyarrow.dataset as ds

from rsmq.errors import ConfigError
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.stream_id import LOCATED_ID, sent_ms
from rsmq.pipeline.jobs.archive_store import Compaction
from rsmq.pipeline.jobs.arrow_archive import ArrowArchive
from rsmq.pipeline.jobs.folder import ArrowFolder

DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """A message of the archive; `part` is the folder that has it. `data` is None if the entry had none."""

    topic: str
    partition: int
    id: str
    stream_id: str
    key: str | None
    type: str | None
    headers: dict[str, str] = field(repr=False)
    data: bytes | None = field(repr=False)
    part: str


class ArchiveReader(ArrowArchive):
    """The committed part of an archive. It changes nothing: an interrupted compaction is left to the jobs."""

    def compaction(self, topic: str, day: date) -> Compaction | None:
        """The newest one of a day whose data are in place; before that, what it replaces is still there."""
        found = super().compaction(topic, day)
        return found if found is not None and self.folder.exists(found.part.path) else None

    def _complete(self, compaction: Compaction) -> None:
        """Change nothing."""

    def find(self, message_id: str, topic: str) -> ArchivedMessage | None:
        """A message of a topic, by its message id or its stream id."""
        match, time = LOCATED_ID.fullmatch(message_id), sent_ms(message_id)
        wanted = pc.field("id") == message_id
        if match is not None:
            ms, _, seq = match[2].partition("-")
            wanted = (pc.field("id_ms") == int(ms)) & (pc.field("id_seq") == int(seq))
            if match[1] is not None:
                wanted &= pc.field("partition") == int(match[1])
        for start, end in spans(time, is_exact=match is not None):
            for part in self.parts([topic], start, end):
                for row in rows(self.folder, self.files_of(part), wanted):
                    return message(topic, part.path, row)
        return None


def spans(sent: int | None, *, is_exact: bool) -> Iterator[tuple[date | None, date | None]]:
    """The days to look at, in turn: clocks differ, and a delayed message is stored when it is due."""
    if sent is None:
        yield None, None
        return
    day = from_epoch_ms(min(sent, LATEST_MS - 86_400_000)).astimezone(UTC).date()
    if is_exact:
        yield day, day
        return
    yield day - DAY, day + DAY
    yield day + 2 * DAY, None


def rows(folder: ArrowFolder, paths: list[str], wanted: Any) -> list[dict[str, Any]]:
    """The first row of some files for which a condition holds. Row groups whose statistics exclude it are not read."""
    if not paths:
        return []
    data = ds.dataset(paths, filesystem=folder.files, format="parquet")
    found: list[dict[str, Any]] = data.head(1, filter=wanted).to_pylist()
    return found


def message(topic: str, part: str, row: dict[str, Any]) -> ArchivedMessage:
    """A row as a message."""
    headers = {name["key"]: (name["value"] or b"").decode(errors="backslashreplace") for name in row["headers"] or ()}
    key, stream_id = row["key"], f"{row['id_ms']}-{row['id_seq']}"
    return ArchivedMessage(
        topic, row["partition"], row["id"] or stream_id, stream_id,
        None if key is None else key.decode(errors="backslashreplace"), row["type"], headers, row["value"], part,
    )  # fmt: skip


def find_archived(archive: str, message_id: str, *, topic: str | None = None) -> ArchivedMessage | None:
    """A message that `rsmq pipeline archive` has written, by its message id or its stream id (`3/1718000000000-0`).

    `archive`: a directory, or a URL that `pyarrow.fs` knows. Without `topic` all of the archive are searched. The time
    in the id says which day it is, and a later one if the message was delayed. Raises ConfigError if there is none.
    """
    reader = ArchiveReader(archive)
    topics = reader.topics()
    if not topics:
        raise ConfigError(f"there is no archive at {archive}: give what `rsmq pipeline archive --to` has written")
    for each in topics if topic is None else [topic]:
        found = reader.find(str(message_id), each)
        if found is not None:
            return found
    return None
