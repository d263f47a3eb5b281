"""What is measured: each operation with Spark and without, on one server. The result of each is checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from benchmarks.pipeline.figure import PARTITIONS, PIPELINE
from rsmq.model.keys import Keys
from rsmq.pipeline.jobs.archive import ArchiveOptions, archive
from rsmq.pipeline.jobs.archive_by_arrow import archive_by_arrow
from rsmq.pipeline.jobs.replay import ReplayOptions, SparkReplay
from rsmq.pipeline.source import RsmqSource

KEYS: Final = Keys("bench")
LETTERS_EACH: Final = 10
PAYLOAD: Final = "x" * 140


class Rows(RsmqSource):
    """The source with rows instead of Arrow batches, to measure what Arrow saves."""

    @classmethod
    def name(cls) -> str:
        return "rsmq_rows"

    def reader(self, schema: StructType) -> Any:
        inner = super().reader(schema)

        class RowReader(DataSourceReader):
            def partitions(self) -> Any:
                return inner.partitions()

            def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
                for batch in inner.read(partition):
                    yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

        return RowReader()


class Work:
    """One server, one Spark session, a folder, and topics of several sizes."""

    def __init__(self, url: str, spark: SparkSession, folder: Path) -> None:
        self.url, self.spark, self.folder = url, spark, folder
        self.client: Any = redis.Redis.from_url(url, protocol=2)
        spark.dataSource.register(Rows)

    # -- topics -------------------------------------------------------------------------------------------------------

    def make(self, topic: str) -> None:
        """Create a topic."""
        self.client.hset(KEYS.topic(topic), mapping={"partitions": PARTITIONS, "created_ms": 1})
        self.client.sadd(KEYS.topics, topic)

    def fill(self, topic: str, count: int) -> None:
        """Create a topic with messages."""
        self.make(topic)
        self.write(self.messages(count), topic=topic)

    def messages(self, count: int) -> DataFrame:
        """Messages of about 176 bytes in two tasks, with the columns that all ways of writing need."""
        return self.spark.range(0, count, 1, 2).selectExpr(
            f"concat('{{\"n\":', id, ',\"x\":\"{PAYLOAD}\"}}') AS value", "concat('m', id) AS id", "'src' AS topic",
            f"CAST(id DIV {-(-count // 2)} * 4 + id % 4 AS INT) AS partition", "id + 1 AS id_ms", "0L AS id_seq",
        )  # fmt: skip

    def check(self, topic: str, count: int) -> None:
        """Raise RuntimeError if a topic has another number of messages: then the measurement is void."""
        stored = sum(self.client.xlen(KEYS.stream(topic, number)) for number in range(PARTITIONS))
        expect(stored, count)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, kind: str, topic: str, columns: str = "") -> DataFrame:
        """A topic as a DataFrame, with all columns or some."""
        reader = self.spark.read.format(kind).options(url=self.url, prefix=KEYS.prefix, subscribe=topic)
        return reader.schema(columns).load() if columns else reader.load()

    def parquet(self, kind: str, topic: str) -> None:
        """A topic into Parquet files."""
        self.read(kind, topic).write.mode("overwrite").parquet(str(self.folder / "spark"))

    def nothing(self, topic: str) -> None:
        """Five queries that no row matches: no stored message is as young as that."""
        for _ in range(5):
            expect(self.read("rsmq", topic).where("timestamp > timestamp '2100-01-01'").count(), 0)

    def count_by_hand(self, topic: str, count: int) -> None:
        """XRANGE with redis-py, in a loop."""
        expect(sum(1 for _ in self.entries(topic)), count)

    def count(self, topic: str, count: int) -> None:
        """A count by Spark, of one small column."""
        expect(self.read("rsmq", topic, "partition int").count(), count)

    def sum_by_hand(self, topic: str, count: int) -> None:
        """XRANGE with redis-py, `json.loads` and a sum, in a loop."""
        expect(sum(json.loads(fields[b"data"])["n"] for fields in self.entries(topic)), count * (count - 1) // 2)

    def sum(self, topic: str, count: int) -> None:
        """The same by Spark: the JVM parses."""
        rows = self.read("rsmq", topic, "value binary").selectExpr("from_json(string(value), 'n BIGINT').n AS n")
        expect(rows.agg({"n": "sum"}).collect()[0][0], count * (count - 1) // 2)

    def entries(self, topic: str) -> Iterator[dict[bytes, bytes]]:
        """All entries of a topic, 5000 in a reply."""
        for number in range(PARTITIONS):
            after = "-"
            while found := self.client.xrange(KEYS.stream(topic, number), after, "+", 5000):
                after = f"({found[-1][0].decode()}"
                yield from (fields for _, fields in found)

    def archive_by_arrow(self, topic: str, count: int) -> None:
        """`rsmq pipeline archive --engine arrow`, in this process."""
        path = self.folder / f"arrow-{topic}"
        shutil.rmtree(path, ignore_errors=True)
        source = {"url": self.url, "prefix": KEYS.prefix, "subscribe": topic}
        expect(archive_by_arrow(ArchiveOptions(source, str(path))).messages, count)

    def discard(self, topic: str) -> None:
        """A topic into nothing."""
        self.read("rsmq", topic).write.format("noop").mode("overwrite").save()

    def plain(self, topic: str) -> None:
        """XRANGE with redis-py, columns and Parquet with pyarrow, no Spark."""
        schema = pa.schema([("offset", pa.string()), ("key", pa.binary()), ("value", pa.binary())])
        for number in range(PARTITIONS):
            after = "-"
            with pq.ParquetWriter(self.folder / f"{number}.parquet", schema, compression="zstd") as writer:
                while entries := self.client.xrange(KEYS.stream(topic, number), after, "+", 5000):
                    after = f"({entries[-1][0].decode()}"
                    columns = (
                        [entry_id for entry_id, _ in entries],
                        [fields.get(b"key") for _, fields in entries],
                        [fields[b"data"] for _, fields in entries],
                    )
                    arrays = [pa.array(each, kind) for each, kind in zip(columns, schema.types, strict=True)]
                    writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))

    def archive(self, topic: str, count: int) -> None:
        """`rsmq pipeline archive`, into an archive of this topic's own."""
        shutil.rmtree(self.archive_path(topic), ignore_errors=True)
        source = {"url": self.url, "prefix": KEYS.prefix, "subscribe": topic}
        expect(archive(self.spark, ArchiveOptions(source, str(self.archive_path(topic)))).messages, count)

    def archive_path(self, topic: str) -> Path:
        """Where the archive of a topic is."""
        return self.folder / f"archive-{topic}"

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, frame: DataFrame, **options: str) -> None:
        """A DataFrame into topics or inboxes."""
        frame.write.format("rsmq").options(url=self.url, prefix=KEYS.prefix, **options).mode("append").save()

    def sink(self, count: int, mode: str) -> None:
        """Messages into an empty topic."""
        self.client.flushall()
        self.make("target")
        extra = {"jobId": "bench"} if mode == "marker" else {}
        self.write(self.messages(count), topic="target", idempotence=mode, **extra)
        self.check("target", count)

    def inbox(self, count: int) -> None:
        """Letters into inboxes, ten each."""
        self.client.flushall()
        letters = self.messages(count).selectExpr(f"concat('d', id_ms DIV {LETTERS_EACH}) AS device", "value")
        self.write(letters, target="inbox")

    def pipelined(self, count: int) -> None:
        """The bare client: XADD in pipelines."""
        self.client.flushall()
        self.make("target")
        rows = ((f'{{"n":{number},"x":"{PAYLOAD}"}}', f"m{number}", number % PARTITIONS) for number in range(count))
        pipe_rows(self.client, rows)
        self.check("target", count)

    def by_hand(self, count: int) -> None:
        """The bare client in Spark's tasks."""
        self.client.flushall()
        self.make("target")
        url = self.url

        def put(rows: Iterator[Any]) -> None:
            with redis.Redis.from_url(url, protocol=2) as client:
                pipe_rows(client, rows)

        self.messages(count).select("value", "id", "partition").foreachPartition(put)
        self.check("target", count)

    def replay(self, topic: str, count: int) -> None:
        """`rsmq pipeline replay` of an archive into an empty topic: counted first, then published, exactly once."""
        self.client.flushall()
        shutil.rmtree(self.archive_path(topic) / "_rsmq" / "replays", ignore_errors=True)
        self.make("target")
        order = ReplayOptions(str(self.archive_path(topic)), (topic,), "target")
        job = SparkReplay(self.spark, order, {"url": self.url, "prefix": KEYS.prefix})
        job.run(job.plan())
        self.check("target", count)


def pipe_rows(client: Any, rows: Iterator[Any]) -> None:
    """Rows of (value, id, partition) into the topic `target`."""
    while some := list(islice(rows, PIPELINE)):
        with client.pipeline(transaction=False) as pipe:
            for value, message_id, partition in some:
                pipe.xadd(KEYS.stream("target", partition), {"data": value, "id": message_id})
            pipe.execute()


def expect(found: int, count: int) -> None:
    """Raise RuntimeError if the numbers differ."""
    if found != count:
        raise RuntimeError(f"{found} messages came through instead of {count}")
