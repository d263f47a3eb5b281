"""Writes: rows become messages in the right partitions, and a task that runs again does no more harm than it may."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

import rsmq.pipeline.format.topic_sink
from rsmq.errors import ConfigError, TooLarge, TopicFull
from rsmq.model.layout import RESIZED, single
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.partition import partition_for
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.topic_sink import TaskResult
from rsmq.pipeline.format.writer import BatchWriter, check_results, write_rows
from rsmq.pipeline.source import RsmqSource
from rsmq.pipeline.spark.errors import spark_errors
from rsmq.redis.streams import SEALED
from tests.pipeline.conftest import Store

PLAIN = {"encode": "none"}
"""The Python workers of the session have keys."""
Rows = dict[str, list[Any]]
Write = Callable[..., TaskResult]


@pytest.fixture
def write(connection: dict[str, str]) -> Write:
    """`write({"value": [...]}, topic="orders", ...)`: one task, without Spark; each dict of columns is a batch."""

    def task(*batches: Rows, **options: object) -> TaskResult:
        given = {**connection, **{name: str(value) for name, value in options.items()}}
        return write_rows(write_options(given), (pa.RecordBatch.from_pydict(each) for each in batches))

    return task


def numbered(numbers: range, **columns: list[Any]) -> Rows:
    """Rows with values and positions `numbers`, from partition 0 of topic `src` unless said otherwise."""
    count = len(numbers)
    return {
        "value": [str(number).encode() for number in numbers], "topic": ["src"] * count, "partition": [0] * count,
        "id_ms": list(numbers), "id_seq": [0] * count, **columns,
    }  # fmt: skip


def values(store: Store, topic: str, partitions: int = 1) -> list[str]:
    """The payloads, partition by partition."""
    return [fields[b"data"].decode() for part in range(partitions) for _, fields in store.entries(topic, part)]


# -- one task ---------------------------------------------------------------------------------------------------------


def test_a_row_becomes_a_message(write: Write, store: Store, topic: str) -> None:
    """All that a row says reaches the handler; a key decides the partition as it does for every publisher."""
    store.make(topic, 8)
    done = write(
        {
            "value": [b"\x00\xff", b"2"], "key": ["ключ", None], "id": ["m1", None], "type": ["a/b", None],
            "headers": [[{"key": "trace", "value": b"t"}], None],
        },
        topic=topic,
    )  # fmt: skip
    assert (done.stored, done.skipped) == (2, 0)
    (first,) = store.client.xrange(store.keys.stream(topic, partition_for("ключ", 8)))[:1]
    message = Message(MessageOrigin(topic, 0, "g"), first[0], [part for pair in first[1].items() for part in pair])
    seen = (message.data, message.key, message.id, message.type, message.headers)
    assert seen == (b"\x00\xff", "ключ", "m1", "a/b", {"trace": "t"})
    assert sum(len(store.entries(topic, part)) for part in range(8)) == 2


def test_rows_without_a_key_go_by_partition_or_id(write: Write, store: Store, topic: str) -> None:
    """Stay in their source's partition if there is such a one, go by message id, or in turn."""
    store.make(topic, 4)
    write({"value": ["a"], "partition": [2], "id": ["m"]}, topic=topic)
    write({"value": ["b"], "partition": [9], "id": ["m"]}, topic=topic)
    write({"value": ["c", "d", "e"]}, topic=topic)
    found = {each: [f[b"data"].decode() for _, f in store.entries(topic, each)] for each in range(4)}
    expected: dict[int, list[str]] = {0: ["c"], 1: ["d"], 2: ["a", "e"], 3: []}
    expected[partition_for("m", 4)].insert(0 if partition_for("m", 4) != 2 else 1, "b")
    assert found == expected


def test_a_topic_is_made_by_its_first_message(write: Write, store: Store, topic: str) -> None:
    """As by every publisher: with the defaults of the settings."""
    write({"value": ["a", "b"], "topic": [f"{topic}1", f"{topic}2"]})
    for name in (f"{topic}1", f"{topic}2"):
        assert store.client.hget(store.keys.topic(name), "partitions") == b"8"
        assert len(values(store, name, 8)) == 1
    with pytest.raises(ConfigError, match="a row names no topic"):
        write({"value": ["a"], "topic": pa.array([None], pa.string())})


def test_batches_are_bounded(write: Write, store: Store, topic: str) -> None:
    """500 messages a call, fewer when they are large; order within a partition is kept throughout."""
    store.make(topic, 2)
    before = store.client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
    rows = [str(number) for number in range(2300)]
    write({"value": rows[:1000], "key": ["k"] * 1000}, {"value": rows[1000:], "key": ["k"] * 1300}, topic=topic)
    assert store.client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 5
    assert values(store, topic, 2) == rows
    write({"value": [b"x" * 200_000] * 60, "key": ["k"] * 60}, topic=topic)
    assert store.client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 5 + 3


def test_rows_that_do_not_fit_are_refused(write: Write, store: Store, topic: str) -> None:
    """Too large a payload, and a topic that is full, are errors that say what to do."""
    store.make(topic, 1, max_length=3, on_full="reject")
    with pytest.raises(TooLarge, match="raise RSMQ_PAYLOAD_LIMIT"):
        write({"value": [b"x" * 300_000]}, topic=topic)
    for mode in ({}, {"idempotence": "marker", "jobId": "j"}, {"idempotence": "dedupe"}):
        store.client.delete(store.keys.stream(topic, 0))
        ids = [f"{mode}{number}" for number in range(5)]
        with pytest.raises(TopicFull, match=f"partition 0 of topic '{topic}' holds 3"):
            write(numbered(range(5), id=ids), topic=topic, **mode)
        assert values(store, topic) == ["0", "1", "2"]


# -- idempotence ------------------------------------------------------------------------------------------------------


def test_marker_counts_by_source(write: Write, store: Store, topic: str) -> None:
    """The same rows again are skipped; other sources, other jobs and later rows are not."""
    store.make(topic, 1)
    options = {"topic": topic, "idempotence": "marker", "jobId": "j"}
    assert write(numbered(range(1)), numbered(range(1, 10)), **options).stored == 10
    again = write(numbered(range(5)), numbered(range(5, 15)), **options)
    assert (again.stored, again.skipped) == (5, 10)
    assert write(numbered(range(10), partition=[1] * 10), **options).stored == 10
    assert write(numbered(range(10)), **{**options, "jobId": "k"}).stored == 10
    assert len(values(store, topic)) == 35
    marks: Any = store.client.hkeys(store.keys.jobs(topic, 0))
    assert sorted(marks) == [b"j|src.0", b"j|src.1", b"k|src.0"]


def test_marker_finds_its_mark_again(write: Write, store: Store, topic: str) -> None:
    """A row that says nothing about its partition goes to the same one however the batches are cut."""
    store.make(topic, 4)
    rows = {name: column for name, column in numbered(range(20)).items() if name not in ("topic", "partition")}
    cut = [{name: column[part] for name, column in rows.items()} for part in (slice(3), slice(3, 20))]
    options = {"topic": topic, "idempotence": "marker", "jobId": "j"}
    assert [write(rows, **options).stored, write(*cut, **options).skipped] == [20, 20]
    assert sorted(values(store, topic, 4), key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize("with_keys", [True, False])
def test_marker_counts_over_a_resize_of_the_target(write: Write, store: Store, topic: str, *, with_keys: bool) -> None:
    """What the job has stored before is not stored again in the partitions that follow, by key or by turn."""
    store.make(topic, 2)
    keys = {"key": [f"k{number % 7}" for number in range(20)]} if with_keys else {}
    first = {name: column[:12] for name, column in numbered(range(20), partition=[1] * 20, **keys).items()}
    options = {"topic": topic, "idempotence": "marker", "jobId": "j"}
    assert write(first, **options).stored == 12
    layout = single(2).with_partitions(6).sealed()
    store.client.hset(store.keys.topic(topic), mapping={"partitions": RESIZED, "layout": layout.stored})
    for number in range(2):
        stream = store.keys.stream(topic, number)
        store.client.xgroup_create(stream, "g", mkstream=True)
        store.client.execute_command("XSETID", stream, SEALED)
    again = write(numbered(range(20), partition=[1] * 20, **keys), **options)
    assert (again.stored, again.skipped) == (8, 12)
    assert sorted(values(store, topic, 8), key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    "batches",
    [
        [numbered(range(5, 10)), numbered(range(5))],
        [{name: column[::-1] for name, column in numbered(range(5)).items()}],
        [numbered(range(5), id_ms=[1, 2, 2, 3, 4])],
    ],
    ids=["batches", "rows", "twice"],
)
def test_marker_refuses_rows_out_of_order(write: Write, store: Store, topic: str, batches: list[Rows]) -> None:
    """A mark would hide those that come late."""
    store.make(topic, 1)
    with pytest.raises(ConfigError, match=r"the rows of src\.0 are out of order. Bring each source into one task"):
        write(*batches, topic=topic, idempotence="marker", jobId="j")


def test_marker_refuses_a_source_in_two_tasks() -> None:
    """Seen at the commit: one of the two marks may have hidden messages of the other."""
    pairs = ({("t", 0, "src.0"), ("t", 1, "src.0")}, {("t", 0, "src.1")}, {("t", 1, "src.0")})
    tasks = [TaskResult(1, 0, each) for each in pairs]
    check_results([*tasks[:2], None])
    with pytest.raises(ConfigError, match=r"in one task, but src\.0 into t\.1 came through several \(1 such\)"):
        check_results(tasks)


def test_id_restores_a_topic(write: Write, store: Store, topic: str) -> None:
    """Original ids in original partitions, once; not beside messages of others, and not into fewer partitions."""
    store.make(topic, 2)
    options = {"topic": topic, "idempotence": "id"}
    rows = numbered(range(5, 9), partition=[0, 1, 0, 1])
    assert [write(rows, **options).stored, write(rows, **options).skipped] == [4, 4]
    assert [entry_id for part in (0, 1) for entry_id, _ in store.entries(topic, part)] == ["5-0", "7-0", "6-0", "8-0"]
    with pytest.raises(ConfigError, match=f"{topic}.0 has newer entries than 2-0, but not this one"):
        write(numbered(range(2, 3)), **options)
    with pytest.raises(ConfigError, match=r"restores partition 7, but topic .* has 2 partitions"):
        write(numbered(range(10, 11), partition=[7]), **options)
    with pytest.raises(ConfigError, match="column 'id_ms' is null in a row"):
        write(numbered(range(1), id_ms=pa.array([None], pa.int64())), **options)


def test_dedupe_goes_by_message_id(write: Write, store: Store, topic: str) -> None:
    """Each id once, in one batch and in two; the keys that remember them are those of every publisher."""
    store.make(topic, 1)
    rows = {"value": ["1", "2", "3"], "id": ["a", "b", "a"]}
    options = {"topic": topic, "idempotence": "dedupe", "dedupeWindow": "PT1M"}
    first, second = write(rows, **options), write(rows, **options)
    assert [(each.stored, each.skipped) for each in (first, second)] == [(2, 1), (0, 3)]
    assert values(store, topic) == ["1", "2"]
    assert 0 < int(store.client.pttl(store.keys.dedup(topic, 0, "a"))) <= 60_000  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a message id of 1 to 256 bytes in column 'id' of every row"):
        write({"value": ["1"], "id": pa.array([None], pa.string())}, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"idempotence": "marker", "jobId": "j"}, "has no column 'id_ms' .target=topic, idempotence=marker"),
        ({"idempotence": "id"}, "has no column 'partition' .target=topic"),
        ({"idempotence": "dedupe"}, "has no column 'id' .target=topic"),
        ({"topic": ""}, "has no column 'topic'"),
        ({"target": "inbox"}, "has no column 'device' .target=inbox"),
    ],
)
def test_columns_that_a_write_needs(options: dict[str, str], words: str) -> None:
    """Said before a task starts."""
    given = {name: text for name, text in {"url": "redis://h/0", "topic": "t", **options}.items() if text}
    schema = StructType.fromJson({"fields": [{"name": "value", "type": "string", "nullable": True, "metadata": {}}]})
    with pytest.raises(ConfigError, match=words):
        RsmqSource(given).writer(schema, overwrite=False)
    with pytest.raises(ConfigError, match="never overwritten"):
        RsmqSource({"url": "redis://h/0", "topic": "t"}).writer(schema, overwrite=True)


def test_rate_per_task_spreads_writes_evenly(
    write: Write, store: Store, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 rows at 100 a second take four seconds, evenly; run again, what is there costs no time."""
    now, naps = [100.0], list[float]()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            naps.append(seconds)
            now[0] += seconds

    monkeypatch.setattr(rsmq.pipeline.format.topic_sink, "time", Clock)
    store.make(topic, 2)
    options = {"topic": topic, "idempotence": "marker", "jobId": "j", "ratePerTask": "100"}
    keys = [f"k{number % 10}" for number in range(400)]
    assert write(numbered(range(400), key=keys), **options).stored == 400
    assert now[0] - 100 == pytest.approx(4, abs=0.5)
    assert max(naps) <= 0.5
    before = now[0]
    assert write(numbered(range(400), key=keys), **options).skipped == 400
    assert now[0] == before


# -- real Spark -------------------------------------------------------------------------------------------------------


def failing_source() -> type[RsmqSource]:
    """The source, with a sink whose first attempt at each task breaks off when it has sent most of its rows."""

    class FailingWriter(BatchWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            context = TaskContext.get()
            assert context is not None

            def broken() -> Iterator[pa.RecordBatch]:
                yield from iterator
                if context.attemptNumber() == 0:
                    raise OSError("pulled the plug")

            return super().write(broken())

    class FailingSource(RsmqSource):
        @classmethod
        def name(cls) -> str:
            return "rsmq_failing"

        def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
            return FailingWriter(super().writer(schema, overwrite)._options)

    return FailingSource


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"idempotence": "none"}, 4400),
        ({"idempotence": "id"}, 2400),
        ({"idempotence": "marker", "jobId": "j"}, 2400),
        ({"idempotence": "dedupe"}, 2400),
    ],
    ids=lambda value: value["idempotence"] if isinstance(value, dict) else "",
)
def test_spark_tries_failed_tasks_again(
    spark: SparkSession, connection: dict[str, str], store: Store, topic: str, options: dict[str, str], total: int
) -> None:
    """Two tasks of 1200 rows fail after 1000 each: `none` repeats those, every other way stores each row once."""
    spark.dataSource.register(failing_source())
    store.make(topic, 2)
    columns = ("CAST(id AS STRING) AS value", "concat('m', id) AS id", "'src' AS topic", "CAST(id DIV 1200 AS INT) AS "
               "partition", "id + 1 AS id_ms", "0L AS id_seq")  # fmt: skip
    frame = spark.range(0, 2400, 1, 2).selectExpr(*columns)
    frame.write.format("rsmq_failing").options(**PLAIN, **connection, topic=topic, **options).mode("append").save()
    found = values(store, topic, 2)
    assert len(found) == total
    assert sorted(set(found), key=int) == [str(number) for number in range(2400)]
    if total == 2400:
        assert found == [str(number) for number in range(2400)]


def test_spark_copies_a_stream_once(
    spark: SparkSession, connection: dict[str, str], store: Store, topic: str, tmp_path: Path
) -> None:
    """From topic to topic by `writeStream`, with a lost commit: the batch runs again, and stores nothing twice."""
    copy, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    store.fill(topic, 200)
    store.make(copy, 2)

    def run() -> None:
        source = spark.readStream.format("rsmq").options(
            **connection, subscribe=topic, startingOffsets="earliest", includeHeaders="true"
        )
        options = {"topic": copy, "idempotence": "marker", "jobId": "copy", "checkpointLocation": str(checkpoint)}
        sink = source.load().writeStream.format("rsmq").options(**PLAIN, **connection, **options)
        assert sink.trigger(availableNow=True).start().awaitTermination(100)

    run()
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink()
    store.fill(topic, 50, start=200)
    run()
    assert store.ids(copy) == store.ids(topic)
    assert values(store, copy, 2) == values(store, topic, 2)


def test_spark_says_our_errors_of_writes(writing: Callable[..., None], spark: SparkSession, topic: str) -> None:
    """As one of our errors, one line."""
    frame: DataFrame = spark.range(3).selectExpr("id")
    with (
        pytest.raises(ConfigError, match="the DataFrame has no column 'value', it has id: select it") as caught,
        spark_errors(),
    ):
        writing(frame, topic=topic)
    assert "\n" not in str(caught.value)
    rows = spark.range(0, 4, 1, 2).selectExpr("'x' AS value", "'k' AS key", "id AS id_ms", "0 AS id_seq")
    with pytest.raises(ConfigError, match="needs all rows of a source in one task"), spark_errors():
        writing(rows, topic=topic, idempotence="marker", jobId="j")


def test_payloads_may_be_text_or_bytes(write: Write, store: Store, topic: str) -> None:
    """Text in a string column is stored as it is."""
    store.make(topic, 1)
    write({"value": [json.dumps({"n": 1}), "ü"]}, topic=topic)
    assert values(store, topic) == ['{"n": 1}', "ü"]
