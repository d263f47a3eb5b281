"""Batch reads: which entries belong to them, in how many tasks, and what happens when some are missing."""

from __future__ import annotations

import operator
import pickle
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as ds
from pyspark.sql.types import IntegerType, StructType

import rsmq.pipeline.format.selected_streams
from rsmq.errors import ConfigError
from rsmq.pipeline.format.columns import SCHEMA
from rsmq.pipeline.format.offsets import DataLoss, Range
from rsmq.pipeline.format.options import read_options
from rsmq.pipeline.format.plain_errors import WithoutClosedPipe
from rsmq.pipeline.format.push_down import read_window
from rsmq.pipeline.format.reader import REPLY_BYTES, BatchReader, next_count
from rsmq.pipeline.source import PushingSource, RsmqSource
from rsmq.pipeline.spark.errors import spark_errors
from tests.pipeline.conftest import Store


class Reading:
    """Batch reads as Spark makes them, without Spark."""

    def __init__(self, connection: dict[str, str]) -> None:
        self.connection = connection

    def reader(self, **options: object) -> BatchReader:
        """The reader of a source with these options, as an executor gets it: pickled."""
        source = RsmqSource({**self.connection, **{name: str(value) for name, value in options.items()}})
        reader: BatchReader = pickle.loads(pickle.dumps(source.reader(source.schema())))
        return reader

    def ranges(self, **options: object) -> list[Range]:
        """The work of its tasks."""
        return [each for each in self.reader(**options).partitions() if isinstance(each, Range)]

    def rows(self, **options: object) -> list[dict[str, Any]]:
        """All rows."""
        reader = self.reader(**options)
        return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    def offsets(self, **options: object) -> list[str]:
        """The stream ids of all rows."""
        return [row["offset"] for row in self.rows(**options)]


@pytest.fixture
def reads(connection: dict[str, str]) -> Reading:
    """Reads from the shared server under the key prefix of the test."""
    return Reading(connection)


@pytest.fixture
def numbered(store: Store, topic: str) -> str:
    """A topic of one partition with the entries 1000-0, 1001-0 ... 1009-0."""
    store.make(topic, 1)
    for number in range(10):
        store.add(topic, 0, {"data": str(number)}, f"{1000 + number}-0")
    return topic


def test_spark_reads_a_topic(reading: Callable[..., DataFrame], store: Store, topic: str) -> None:
    """Every message once, in order within a partition, with schema and types as documented."""
    store.fill(topic, 300)
    store.add(topic, 0, {"data": b"\x00\xff", "key": "k", "h": '{"trace": "t"}', "type": "a/b", "id": "odd"})
    frame = reading(subscribe=topic, includeHeaders="true")
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:string,id_ms:bigint,id_seq:bigint,"
        "timestamp:timestamp,headers:array<struct<key:string,value:binary>>,id:string,type:string,expires:bigint,"
        "on_expiry:string,unique:string,cancelled:string,band:string>"
    )
    rows = frame.collect()
    found = [(row.partition, row.offset, bytes(row.value), row.id) for row in rows]
    there = [(n, i, f[b"data"], f[b"id"].decode()) for n in (0, 1) for i, f in store.entries(topic, n)]
    assert sorted(found) == sorted(there)
    assert len(there) == 301
    for partition in (0, 1):
        ids = [(row.id_ms, row.id_seq) for row in rows if row.partition == partition]
        assert ids == sorted(ids)
    (odd,) = [row for row in rows if row.id == "odd"]
    assert [(bytes(odd.key), bytes(odd.value), odd.type)] == [(b"k", b"\x00\xff", "a/b")]
    assert [(header.key, bytes(header.value)) for header in odd.headers] == [("trace", b"t")]
    assert abs(odd.timestamp.timestamp() * 1000 - odd.id_ms) < 1


def test_spark_says_our_errors(reading: Callable[..., DataFrame], store: Store, topic: str) -> None:
    """The caller gets an error of rsmq with one line."""
    store.make(topic)
    with (
        pytest.raises(ConfigError, match=f"^there is no topic '{topic}x'. Did you mean {topic}\\?") as caught,
        spark_errors(),
    ):
        reading(subscribe=f"{topic}x").count()
    assert "\n" not in str(caught.value)


def test_spark_reads_only_the_columns_and_ranges_that_are_asked_for(
    reading: Callable[..., DataFrame], spark: SparkSession, connection: dict[str, str], store: Store, topic: str
) -> None:
    """A schema chooses columns; filters give the rows that they gave without push-down."""
    store.make(topic)
    for partition in (0, 1):
        for ms in range(1000, 1100):
            store.add(topic, partition, {"data": b"x"}, f"{ms}-{partition}")
    reader = spark.read.format("rsmq").options(**connection, subscribe=topic)
    rows = reader.schema("id_ms bigint, partition int").load().where("id_ms >= 1090").orderBy("id_ms", "partition")
    assert rows.take(1)[0] == (1090, 0)
    where = "partition = 1 AND timestamp >= timestamp_millis(1010) AND timestamp < timestamp_millis(1020)"
    assert [row.id_ms for row in reading(subscribe=topic).where(where).orderBy("id_ms").collect()] == [
        *range(1010, 1020)
    ]


COMPARISONS = st.sampled_from([ds.EqualTo, ds.GreaterThan, ds.GreaterThanOrEqual, ds.LessThan, ds.LessThanOrEqual])
HOLDS: dict[Any, Callable[[Any, Any], bool]] = {
    ds.EqualTo: operator.eq, ds.GreaterThan: operator.gt, ds.GreaterThanOrEqual: operator.ge, ds.LessThan: operator.lt,
    ds.LessThanOrEqual: operator.le,
}  # fmt: skip


@given(
    st.lists(st.tuples(COMPARISONS, st.sampled_from(["partition", "id_ms", "timestamp"]), st.integers(-1, 12))),
    st.integers(0, 10), st.integers(0, 10),
)  # fmt: skip
def test_a_window_holds_all_that_matches_its_filters(
    chosen: list[tuple[Any, str, int]], partition: int, ms: int
) -> None:
    """What Spark would show is read; a timestamp between two milliseconds, too."""
    start = datetime(1970, 1, 1, tzinfo=UTC)
    row = {"partition": partition, "id_ms": ms, "timestamp": start + timedelta(milliseconds=ms)}
    filters, is_shown = [], True
    for kind, column, number in chosen:
        value: Any = start + timedelta(microseconds=500 * number) if column == "timestamp" else number
        filters.append(kind((column,), value))
        is_shown &= HOLDS[kind](row[column], value)
    window = read_window(filters)
    is_read = window.contains("t", partition) and window.lowest <= (ms, 5) <= window.highest
    assert is_read or not is_shown
    if not is_shown and all(column != "timestamp" for _, column, _ in chosen):
        assert not is_read, "and nothing else"


def test_filters_leave_out_what_cannot_match(reads: Reading, store: Store, topic: str) -> None:
    """No task for other topics, partitions and ids; each range still has its exact count."""
    store.make(topic, 3)
    for partition in (0, 1, 2):
        for ms in range(1000, 1100):
            store.add(topic, partition, {"data": b"x"}, f"{ms}-0")

    def planned(*filters: ds.Filter) -> list[tuple[int, int]]:
        reader: Any = PushingSource({**reads.connection, "subscribe": topic}).reader(SCHEMA)
        assert [*reader.pushFilters([*filters])] == [*filters], "Spark applies them to the rows, too"
        return [(each.partition, each.expected) for each in reader.partitions()]

    assert planned(ds.In(("partition",), (1, 2)), ds.LessThan(("partition",), 2)) == [(1, 100)]
    assert planned(ds.EqualTo(("topic",), "other")) == []
    assert planned(ds.GreaterThanOrEqual(("id_ms",), 1090), ds.EqualTo(("partition",), 0)) == [(0, 10)]
    assert planned(ds.EqualTo(("offset",), "1005-0")) == [(0, 1), (1, 1), (2, 1)]
    assert planned(ds.GreaterThan(("timestamp",), datetime(2030, 1, 1, tzinfo=UTC))) == []
    assert planned(ds.LessThan(("timestamp",), datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))) == []


def test_a_column_that_a_topic_does_not_have_is_refused(connection: dict[str, str]) -> None:
    """A schema chooses columns, and makes none."""
    with pytest.raises(ConfigError, match=r"schema\(...\) chooses columns of a topic, and n int is not one"):
        RsmqSource({**connection, "subscribe": "a"}).reader(StructType().add("n", IntegerType()))


def test_spark_itself_says_our_sentence_first(spark: SparkSession, connection: dict[str, str]) -> None:
    """Not behind the traceback of a Python worker."""
    with pytest.raises(AnalysisException) as caught:
        spark.read.format("rsmq").options(**connection, subscribe="a", includeHeader="true").load()
    assert "unknown option 'includeheader'. Did you mean includeHeaders?" in str(caught.value).splitlines()[0]
    assert "Traceback" not in str(caught.value)


def test_a_closed_pipe_is_no_error_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """PySpark prints a traceback when Spark has enough rows, as at `limit`; everything else is passed on."""
    stream = WithoutClosedPipe(sys.stderr)
    print("PySpark daemon failed to flush the output to the worker process:\nBrokenPipeError: 32", file=stream)
    print("PySpark daemon failed to flush the output to the worker process:\nOSError: full", file=stream)
    print("else", file=stream)
    assert capsys.readouterr().err.splitlines()[1:] == ["OSError: full", "else"]


def test_topics_are_chosen_by_name_pattern_or_partition(reads: Reading, store: Store, topic: str) -> None:
    """By name, several names, a pattern that fits whole names, and single partitions."""
    names = [f"{topic}{letter}" for letter in "abc"]
    for name in names:
        store.fill(name, 20)
    chosen = {
        "one": reads.ranges(subscribe=names[0]),
        "two": reads.ranges(subscribe=f"{names[0]},{names[2]}"),
        "pattern": reads.ranges(subscribePattern=f"{topic}[bc]"),
        "part": reads.ranges(subscribePattern=topic),
        "assign": reads.ranges(assign=f'{{"{names[1]}": [1]}}'),
    }
    assert {name: [(each.topic[-1], each.partition) for each in ranges] for name, ranges in chosen.items()} == {
        "one": [("a", 0), ("a", 1)],
        "two": [("a", 0), ("a", 1), ("c", 0), ("c", 1)],
        "pattern": [("b", 0), ("b", 1), ("c", 0), ("c", 1)],
        "part": [],
        "assign": [("b", 1)],
    }


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, range(10)),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, range(10)),
        ({"startingOffsets": '{"TOPIC": {"0": "1003-0"}}'}, range(4, 10)),
        ({"endingOffsets": '{"TOPIC": {"0": "1003-0"}}'}, range(4)),
        ({"startingOffsets": '{"TOPIC": {"0": "1002-5"}}', "endingOffsets": '{"TOPIC": {"0": "1005"}}'}, range(3, 6)),
        ({"startingOffsets": '{"TOPIC": {"0": "1"}}', "endingOffsets": '{"TOPIC": {"0": "9999-0"}}'}, range(10)),
        ({"startingTimestamp": "1004"}, range(4, 10)),
        ({"endingTimestamp": "1004"}, range(4)),
        ({"startingTimestamp": "1002", "endingTimestamp": "1970-01-01T00:00:01.005+00:00"}, range(2, 5)),
        ({"startingTimestamp": "1005", "endingTimestamp": "1002"}, []),
        ({"startingTimestamp": "99999999"}, []),
    ],
)
def test_where_a_read_starts_and_ends(reads: Reading, numbered: str, options: dict[str, str], found: range) -> None:
    """After a starting id and up to an ending id; times include the start, not the end."""
    options = {name: text.replace("TOPIC", numbered) for name, text in options.items()}
    assert reads.offsets(subscribe=numbered, **options) == [f"{1000 + number}-0" for number in found]


def test_a_start_within_trimmed_entries_begins_after_them(reads: Reading, store: Store, numbered: str) -> None:
    """Trimmed before the read was planned: the read is what there is, no loss."""
    store.client.xtrim(store.keys.stream(numbered, 0), maxlen=4, approximate=False)
    assert len(reads.offsets(subscribe=numbered, startingOffsets=f'{{"{numbered}": {{"0": "1003-0"}}}}')) == 4
    assert len(reads.offsets(subscribe=numbered)) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets=latest reads nothing in a batch read"),
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for readStream"),
        ({"startingOffsets": '{"other": {"0": "1-0"}}'}, "startingOffsets names topic 'other', which is not read"),
        ({"subscribe": "", "assign": '{"TOPIC": [7]}'}, "topic 'TOPIC' has the partitions 0 to 0, not 7"),
        ({"subscribe": "nothing.like.it"}, "there is no topic 'nothing.like.it'. See `rsmq topic list`"),
    ],
)
def test_reads_that_make_no_sense_are_refused(
    reads: Reading, numbered: str, options: dict[str, str], words: str
) -> None:
    """Refused instead of reading nothing, or something else."""
    options = {
        name: text.replace("TOPIC", numbered) for name, text in {"subscribe": numbered, **options}.items() if text
    }
    with pytest.raises(ConfigError, match=words.replace("TOPIC", numbered)):
        reads.ranges(**options)


@pytest.mark.parametrize("least", [1, 2, 5, 9])
def test_min_partitions_splits_ranges_exactly(reads: Reading, store: Store, topic: str, least: int) -> None:
    """At least so many tasks, of about the same size, each exact by itself."""
    store.make(topic, 2)
    for number in range(100):
        store.add(topic, number // 90, {"data": str(number)})
    ranges = reads.ranges(subscribe=topic, minPartitions=least)
    assert max(least, 2) <= len(ranges) <= least + 2
    assert all(each.expected <= max(100 // least + 1, 90 if least <= 2 else 0) for each in ranges)
    values = [row["value"] for row in reads.rows(subscribe=topic, minPartitions=least)]
    assert values == [str(number).encode() for number in range(100)]


def test_large_messages_make_small_replies(reads: Reading, store: Store, topic: str) -> None:
    """A reply is bounded in bytes, with any `fetchSize`; small messages come `fetchSize` at a time."""
    store.make(topic, 1)
    for _ in range(60):
        store.add(topic, 0, {"data": b"x" * 200_000})
    reader = reads.reader(subscribe=topic)
    (work,) = reader.partitions()
    sizes = [batch.num_rows for batch in reader.read(work)]
    assert sum(sizes) == 60
    assert max(sizes[1:]) * 200_000 <= REPLY_BYTES
    assert next_count(10, 10, 77) == 77
    assert next_count(10, 10 * REPLY_BYTES, 77) == 1


def test_entries_trimmed_before_read_are_data_loss(reads: Reading, store: Store, topic: str) -> None:
    """Entries that were trimmed before a task reads them are an error with exact counts, or a warning."""
    store.make(topic, 1)
    store.fill(topic, 100, partitions=1)
    strict, lenient = reads.reader(subscribe=topic), reads.reader(subscribe=topic, failOnDataLoss="false")
    (work,), (other,) = strict.partitions(), lenient.partitions()
    store.client.xtrim(store.keys.stream(topic, 0), maxlen=50, approximate=False)
    with pytest.raises(DataLoss, match=rf"{topic}\.0 after 0-0 up to .*: expected 100, found 50: trimmed before read"):
        list(strict.read(work))
    assert sum(batch.num_rows for batch in lenient.read(other)) == 50


def test_spark_counts_what_is_lost(reading: Callable[..., DataFrame], store: Store, topic: str) -> None:
    """Trimmed, or deleted and created again, after Spark has planned: its read fails, with exact counts."""
    store.fill(topic, 100, partitions=1)
    planned = plan(reading(subscribe=topic))
    store.client.xtrim(store.keys.stream(topic, 0), maxlen=50, approximate=False)
    with (
        pytest.raises(DataLoss, match=rf"{topic}\.0 after 0-0 .*: expected 100, found 50: trimmed before read"),
        spark_errors(),
    ):
        planned.count()
    planned = plan(reading(subscribe=topic, failOnDataLoss="false"))
    store.client.delete(store.keys.stream(topic, 0))
    store.fill(topic, 60, partitions=1)
    assert planned.count() == 0, "nothing of what was promised is there"
    planned = plan(reading(subscribe=topic))
    store.client.delete(store.keys.stream(topic, 0))
    for number in range(70):
        store.add(topic, 0, {"data": "x"}, f"{number + 1}-0")
    with (
        pytest.raises(DataLoss, match="expected 60, found 70: the stream was created again or restored"),
        spark_errors(),
    ):
        planned.count()


def plan(frame: DataFrame) -> Any:
    """The frame planned, ranges and all, and not yet read; `.count()` reads."""
    rows = frame._jdf.queryExecution().toRdd()
    assert rows.getNumPartitions() == 1
    return rows


def test_a_topic_recreated_before_read_is_data_loss(reads: Reading, store: Store, topic: str) -> None:
    """More entries than promised cannot be those that were promised."""
    store.fill(topic, 40, partitions=1)
    reader = reads.reader(subscribe=topic)
    (work,) = reader.partitions()
    store.client.delete(store.keys.stream(topic, 0))
    for number in range(60):
        store.add(topic, 0, {"data": "x"}, f"{number + 1}-0")
    with pytest.raises(DataLoss, match="expected 40, found 60: the stream was created again or restored"):
        list(reader.read(work))


def test_a_deleted_entry_is_a_loss(reads: Reading, store: Store, numbered: str) -> None:
    """XDEL in the middle after planning: one is missing, and it is counted."""
    reader = reads.reader(subscribe=numbered)
    (work,) = reader.partitions()
    store.client.xdel(store.keys.stream(numbered, 0), "1004-0")
    with pytest.raises(DataLoss, match="expected 10, found 9"):
        list(reader.read(work))


def test_counting_goes_in_steps(reads: Reading, store: Store, numbered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a step of the server's script is, the count is the same."""
    monkeypatch.setattr(rsmq.pipeline.format.selected_streams, "MAX_SEEK", 3)
    (work,) = reads.ranges(subscribe=numbered, startingTimestamp="1001")
    assert work.expected == 9


def test_a_topic_without_messages_gives_no_rows(reading: Callable[..., DataFrame], store: Store, topic: str) -> None:
    """Has no streams yet: no rows, and no error."""
    store.make(topic)
    assert reading(subscribe=topic).count() == 0


def test_nothing_is_asked_before_options_are_right() -> None:
    """A wrong option is found without a server."""
    with pytest.raises(ConfigError, match="Did you mean url"):
        read_options({"ulr": "redis://h/0", "subscribe": "a"})
