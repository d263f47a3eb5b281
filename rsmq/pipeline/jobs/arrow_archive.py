"""The archive as Arrow reads and rewrites it, in this process: no JVM is started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema

from rsmq.errors import RsmqError
from rsmq.model.clock import epoch_ms
from rsmq.pipeline.format.columns import WITH_HEADERS, binary_array, timestamps
from rsmq.pipeline.jobs.archive_store import ArchiveStore, Part
from rsmq.pipeline.jobs.folder import ArrowFolder

SCHEMA: Final = pa.schema([each for each in to_arrow_schema(WITH_HEADERS, timezone="UTC") if each.name != "topic"])
"""The columns in a file; the topic is in its path."""
STORED: Final = pa.schema([each for each in SCHEMA if each.name != "timestamp"])
"""The columns that are read: Spark stores timestamps in an older form, and `id_ms` says the same."""
FILE_FORMAT: Final = ds.ParquetFileFormat()
GROUP_BYTES: Final = 64 << 20
"""The aim for the size of a row group: what one open file holds in memory."""


class ArrowArchive(ArchiveStore):
    """The archive at one address: a directory, or a URL that `pyarrow.fs` knows."""

    folder: ArrowFolder

    def __init__(self, address: str) -> None:
        super().__init__(ArrowFolder(address))

    def read(self, parts: Sequence[Part], columns: Sequence[str], wanted: Any = None) -> pa.Table:
        """The rows of some parts with some columns, `topic` among them if asked for. `wanted`: a condition of Arrow.

        `cancelled` has what was cancelled after it was archived, too.
        """
        tables = []
        for topic in dict.fromkeys(part.topic for part in parts):
            paths = [path for part in parts if part.topic == topic for path in self.files_of(part)]
            if paths:
                data = ds.dataset(paths, STORED, filesystem=self.folder.files, format=FILE_FORMAT)
                rows = self._with_later(topic, data, [name for name in columns if name != "topic"], wanted)
                if "topic" in columns:
                    name = binary_array([topic.encode()], pa.string())[0]
                    rows = rows.append_column("topic", pa.repeat(name, len(rows)))
                tables.append(rows.select(columns))
        fields = [pa.field("topic", pa.string()) if name == "topic" else STORED.field(name) for name in columns]
        return pa.concat_tables(tables) if tables else pa.schema(fields).empty_table()

    def _with_later(self, topic: str, data: ds.Dataset, columns: list[str], wanted: Any) -> pa.Table:
        names, groups = self.later_cancelled(topic) if "cancelled" in columns else ([], [])
        if not names:
            return self._table(data, columns, wanted)
        rows = self._table(data, list(dict.fromkeys([*columns, "partition", "offset"])), wanted)
        slash = binary_array([b"/"], pa.string())[0]
        messages = pc.binary_join_element_wise(rows.column("partition").cast(pa.string()), rows.column("offset"), slash)
        known, said = (binary_array([each.encode() for each in some], pa.string()) for some in (names, groups))
        later = pc.take(said, pc.index_in(messages, value_set=known))
        at = rows.column_names.index("cancelled")
        rows = rows.set_column(at, STORED.field("cancelled"), pc.coalesce(later, rows.column("cancelled")))
        return rows.select(columns)

    def _table(self, data: ds.Dataset, columns: Sequence[str], wanted: Any) -> pa.Table:
        try:
            return data.to_table(columns=list(columns), filter=wanted)
        except (pa.ArrowInvalid, OSError) as error:
            damaged = next((path for path in data.files if not is_readable(self.folder, path)), None)
            if damaged is None:
                raise RsmqError(f"the archive {self.folder.address} cannot be read: {error}") from None
            raise RsmqError(
                f"{damaged} cannot be read as Parquet: it is damaged. Restore it from a copy, or move it away and run "
                f"this again without its messages"
            ) from None

    def files_of(self, part: Part) -> list[str]:
        """The full paths of the files of a part."""
        return [
            self.folder.at(f"{part.path}/{item.name}")
            for item in self.folder.list(part.path)
            if item.name.endswith(".parquet") and item.name[0] not in "._"
        ]

    def rewrite(self, parts: Sequence[Part], path: str, files: int) -> tuple[int, int]:
        """Write the rows of some parts of a day into a folder, sorted, each once. Returns the rows before and after."""
        rows = self.read(parts, STORED.names)
        order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in ("partition", "id_ms", "id_seq")])
        chosen = rows.take(order).combine_chunks()
        kept = chosen.filter(is_first(chosen, ("partition", "offset")))
        size = max(1, -(-len(kept) // files))
        for number, start in enumerate(range(0, max(1, len(kept)), size)):
            with ParquetFile(self.folder, f"{path}/part-{number:05}.parquet") as file:
                file.write(with_timestamps(kept.slice(start, size)))
        return len(rows), len(kept)


class ParquetFile:
    """A file that is being written, a row group at a time."""

    def __init__(self, folder: ArrowFolder, path: str) -> None:
        with ExitStack() as stack:
            self._stream = stack.enter_context(folder.create(path))
            self._writer = stack.enter_context(pq.ParquetWriter(self._stream, SCHEMA, compression="zstd"))
            self._open = stack.pop_all()
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows."""
        self._waiting += [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()
        self._bytes += rows.nbytes
        if self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what waits, and the end of the file."""
        with self._open:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, SCHEMA))
        self._waiting = []
        self._bytes = 0

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_readable(folder: ArrowFolder, path: str) -> bool:
    """Whether a file is Parquet, by its end."""
    try:
        with folder.files.open_input_file(path) as file:
            pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError):
        return False
    return True


def with_timestamps(rows: pa.Table) -> pa.Table:
    """Rows with the column that is not read, in the order of a file."""
    ms = rows.column("id_ms").combine_chunks()
    ms = ms if isinstance(ms, pa.Array) else pa.concat_arrays(ms.chunks)
    return rows.append_column("timestamp", timestamps(ms)).select(SCHEMA.names)


def is_first(rows: pa.Table, identity: Iterable[str]) -> pa.Array:
    """Whether each row differs from the one before it in a sorted table."""
    if not len(rows):
        return pa.nulls(0, pa.bool_())
    differs: Any = None
    for name in identity:
        column = rows.column(name)
        other = pc.not_equal(column.slice(1), column.slice(0, len(rows) - 1))
        differs = other if differs is None else pc.or_(differs, other)
    chunks = differs.chunks if isinstance(differs, pa.ChunkedArray) else [differs]
    first = pa.Array.from_buffers(pa.bool_(), 1, [None, pa.py_buffer(b"\x01")])
    return pa.concat_arrays([first, *chunks])


def stored_between(since: datetime | None, until: datetime | None) -> Any:
    """A condition for rows stored at `since` or later and before `until`; None: all rows."""
    parts = []
    if since is not None:
        parts.append(pc.field("id_ms") >= epoch_ms(since))
    if until is not None:
        parts.append(pc.field("id_ms") < epoch_ms(until))
    return both(parts)


def both(conditions: Iterable[Any]) -> Any:
    """All of some conditions; None if there are none."""
    found: Any = None
    for each in conditions:
        if each is not None:
            found = each if found is None else found & each
    return found
