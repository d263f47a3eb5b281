"""Counts the messages of a report by Arrow, in this process: for what fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rsmq.model.clock import from_epoch_ms
from rsmq.model.stream_id import sent_ms
from rsmq.pipeline.format.columns import int64_scalar
from rsmq.pipeline.format.offsets import Range
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.format.reader import BatchReader, read_range
from rsmq.pipeline.format.selected_streams import SelectedStreams
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.jobs.arrow_archive import STORED, ArrowArchive, is_first, stored_between
from rsmq.pipeline.jobs.engine import MOST_BYTES, MOST_MESSAGES
from rsmq.pipeline.report.data import (
    HOT_KEYS,
    HotKey,
    PublishLatency,
    ReportOptions,
    TrafficHistory,
    Volume,
    partition_counts,
    percentile,
    step_for,
)

COLUMNS: Final = ("topic", "partition", "offset", "id_ms", "id_seq", "key", "value", "id")
COUNTED: Final = ("topic", "partition", "offset", "id_ms", "key", "id", "size")


def count_by_arrow(options: ReportOptions) -> TrafficHistory:
    """Count the messages of the window, from the archive or from the topics."""
    rows = pa.concat_tables(tables(options)).combine_chunks()
    order = [(name, "ascending") for name in ("topic", "partition", "id_ms", "offset")]
    rows = rows.take(pc.sort_indices(rows, sort_keys=order)).combine_chunks()
    rows = rows.filter(is_first(rows, ("topic", "partition", "offset")))
    times = pc.min_max(rows.column("id_ms")).as_py()
    step = step_for(times["min"], times["max"])
    rows = rows.append_column("at", intervals(rows.column("id_ms"), step))
    return TrafficHistory(
        first=None if times["min"] is None else from_epoch_ms(times["min"]),
        last=None if times["max"] is None else from_epoch_ms(times["max"]),
        step=step,
        volumes=volumes(rows),
        latencies=latencies(rows),
        hot_keys=hot_keys(rows),
        spreads=partition_counts(
            (row["topic"], row["partition"], row["size_count"])
            for row in rows.group_by(["topic", "partition"]).aggregate([("size", "count")]).to_pylist()
        ),
    )


def tables(options: ReportOptions) -> Iterator[pa.Table]:
    """The rows to count, payloads as their size only, so that they need little memory."""
    yield sized(pa.schema([field_of(name) for name in COLUMNS]).empty_table())
    if options.archive is None:
        source = replace(read_options(options.source), columns=COLUMNS)
        for each in BatchReader(source).partitions():
            if isinstance(each, Range):
                yield from (sized(pa.Table.from_batches([batch])) for batch in read_range(source, each))
        return
    store = ArrowArchive(options.archive)
    wanted = stored_between(options.since, options.until)
    for part in store.parts_between(options.names(store.topics()), options.since, options.until):
        yield sized(store.read([part], COLUMNS, wanted))


def field_of(name: str) -> pa.Field:
    """A column as Arrow has it."""
    return pa.field("topic", pa.string()) if name == "topic" else STORED.field(name)


def sized(rows: pa.Table) -> pa.Table:
    """Rows with the size of key and payload instead of the payload."""
    lengths = (pc.fill_null(pc.binary_length(rows.column(name)).cast(pa.int64()), 0) for name in ("key", "value"))
    return rows.append_column("size", pc.add(*lengths)).select(COUNTED).replace_schema_metadata(None)


def intervals(ms: pa.ChunkedArray, step: timedelta) -> pa.ChunkedArray:
    """The start of each row's interval, as ms since 1970."""
    width = int64_scalar(int(step.total_seconds() * 1000))
    return pc.multiply(pc.divide(ms, width), width)


def volumes(rows: pa.Table) -> tuple[Volume, ...]:
    """Messages and bytes of each topic and interval."""
    counts = rows.group_by(["topic", "at"]).aggregate([("size", "count"), ("size", "sum")]).to_pylist()
    found = sorted((row["topic"], row["at"], row["size_count"], row["size_sum"]) for row in counts)
    return tuple(Volume(topic, from_epoch_ms(at), count, size) for topic, at, count, size in found)


def latencies(rows: pa.Table) -> tuple[PublishLatency, ...]:
    """From the creation of the message id, if it has a time, to the stream."""
    by_time: dict[int, list[float]] = {}
    known = rows.filter(pc.equal(pc.utf8_length(rows.column("id")), 36))
    columns = (known.column(name).to_pylist() for name in ("id", "id_ms", "at"))
    for message_id, stored, at in zip(*columns, strict=True):
        created = sent_ms(message_id)
        if created is not None:
            by_time.setdefault(at, []).append(float(stored - created))
    found = []
    for at, took in sorted(by_time.items()):
        took.sort()
        found.append(
            PublishLatency(from_epoch_ms(at), len(took), *(percentile(took, part) for part in (0.5, 0.95, 0.99)))
        )
    return tuple(found)


def hot_keys(rows: pa.Table) -> tuple[HotKey, ...]:
    """The most frequent keys of each topic."""
    totals = {
        row["topic"]: row["size_count"] for row in rows.group_by("topic").aggregate([("size", "count")]).to_pylist()
    }
    keyed = rows.filter(pc.is_valid(rows.column("key")))
    counts: dict[str, list[tuple[int, bytes]]] = {}
    for row in keyed.group_by(["topic", "key"]).aggregate([("size", "count")]).to_pylist():
        counts.setdefault(row["topic"], []).append((-row["size_count"], row["key"]))
    return tuple(
        HotKey(topic, key.decode(errors="backslashreplace"), -count, -count / totals[topic])
        for topic, found in sorted(counts.items())
        for count, key in sorted(found)[:HOT_KEYS]
    )


def is_large_report(options: ReportOptions) -> bool:
    """Whether there are many messages to count."""
    if options.archive is None:
        source = read_options(options.source)
        with TaskConnection(source.access) as connection:
            streams = SelectedStreams(connection, source.selection)
            return sum(streams.info(each).length for each in streams.epochs()) > MOST_MESSAGES
    archive = ArrowArchive(options.archive)
    parts = archive.parts_between(options.topics or archive.topics(), options.since, options.until)
    return archive.size_of(parts) > MOST_BYTES
