"""`rsmq pipeline replay` in one process, without a JVM: the same marks and records as by Spark, in the order of ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rsmq.model.clock import from_epoch_ms, now_ms
from rsmq.model.stream_id import parse_stream_id
from rsmq.pipeline.format.columns import ALL_GROUPS, binary_array, int64_scalar
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.writer import write_rows
from rsmq.pipeline.jobs.archive_store import Ends
from rsmq.pipeline.jobs.arrow_archive import STORED, ArrowArchive, both, is_first, stored_between
from rsmq.pipeline.jobs.replay import ReplayJob, ReplayOptions, TopicShare

COUNTED: Final = ("topic", "partition", "offset", "id_ms", "id_seq", "key", "value", "expires", "cancelled")
MOST_ROWS: Final = 5000
"""Rows in one batch for the sink."""


class ArrowReplay(ReplayJob):
    """A replay by Arrow. All rows are in memory, so it is for what fits. It knows no `where`: that is SQL of Spark."""

    def __init__(self, options: ReplayOptions, connection: dict[str, str]) -> None:
        self._archive = ArrowArchive(options.archive)
        super().__init__(self._archive, options, connection)

    def _count(self, ends: Ends) -> list[TopicShare]:
        rows = self._rows(ends, COUNTED)
        return [
            self._share(
                topic, rows.filter(pc.equal(rows.column("topic"), binary_array([topic.encode()], pa.string())[0]))
            )
            for topic in sorted(rows.column("topic").unique().to_pylist())
        ]

    def _share(self, topic: str, rows: pa.Table) -> TopicShare:
        kept = rows.filter(self._is_in(rows))
        key_bytes, value_bytes = (pc.sum(pc.binary_length(kept.column(name))).as_py() or 0 for name in ("key", "value"))
        times = pc.min_max(rows.column("id_ms")).as_py()
        return TopicShare(
            topic, len(kept), key_bytes + value_bytes, pc.count_distinct(kept.column("key")).as_py(),
            from_epoch_ms(times["min"]), from_epoch_ms(times["max"]), len(rows) - len(kept),
            len(kept) - kept.column("expires").null_count,
        )  # fmt: skip

    def _is_in(self, rows: pa.Table) -> pa.Array:
        """Whether each row is replayed: it was not cancelled or replaced for every group, or that is asked for."""
        every = binary_array([ALL_GROUPS.encode()], pa.string())[0]
        is_out = pc.fill_null(pc.equal(rows.column("cancelled"), every), False)
        return pc.or_(pc.invert(is_out), self._options.with_cancelled)

    def _rows(self, ends: Ends, columns: tuple[str, ...]) -> pa.Table:
        """The messages of the job, each once, in the order of their ids."""
        options = self._options
        parts = self._archive.parts_between(options.topics, options.since, options.until)
        wanted = [stored_between(options.since, options.until)]
        if options.keys:
            keys = binary_array([key.encode() for key in options.keys], pa.binary())
            wanted.append(pc.field("key").isin(keys))
        rows = self._archive.read(parts, columns, both(wanted))
        rows = rows.filter(is_up_to(rows, ends))
        names = ("id_ms", "id_seq", "topic", "partition")
        rows = rows.take(pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in names])).combine_chunks()
        return rows.filter(is_first(rows, ("topic", "partition", "offset"))) if self._is_shared else rows

    def _publish(self, ends: Ends, *, is_resized: bool) -> None:
        """Write to the topic in one order: the sink keeps that of each key."""
        options = self._options
        rate = {} if options.rate is None else {"ratePerTask": f"{options.rate:.9f}"}
        rows = self._rows(ends, ("topic", *STORED.names))
        rows = self._with_expiry(rows.filter(self._is_in(rows))).drop_columns(["cancelled"])
        write_rows(write_options(self._connection | rate | options.sink), rows_in_batches(rows))

    def _with_expiry(self, rows: pa.Table) -> pa.Table:
        """The rows with the moments at which their copies expire."""
        number, expires = rows.schema.get_field_index("expires"), rows.column("expires")
        if self._options.expiry == "drop":
            expires = pa.chunked_array([pa.nulls(len(rows), pa.int64())])
        elif self._options.expiry == "shift":
            expires = pc.add(expires, pc.subtract(int64_scalar(now_ms()), rows.column("id_ms")))
        return rows.set_column(number, "expires", expires)


def rows_in_batches(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows as the sink takes them."""
    yield from rows.to_batches(max_chunksize=MOST_ROWS)


def is_up_to(rows: pa.Table, ends: Ends) -> pa.Array:
    """Whether each row is not newer than the end of its stream."""
    found: Any = pc.less(rows.column("partition"), 0)
    for topic, ids in ends.items():
        of_topic = pc.equal(rows.column("topic"), binary_array([topic.encode()], pa.string())[0])
        for number, stream_id in ids.items():
            ms, seq = (int64_scalar(min(each, 2**63 - 1)) for each in parse_stream_id(stream_id.encode()))
            is_before = pc.or_(
                pc.less(rows.column("id_ms"), ms),
                pc.and_(pc.equal(rows.column("id_ms"), ms), pc.less_equal(rows.column("id_seq"), seq)),
            )
            of_stream = pc.and_(of_topic, pc.equal(rows.column("partition"), int(number)))
            found = pc.or_(found, pc.and_(of_stream, is_before))
    return found
