"""`python -m bench.pipeline [--count N] [--json]`: the Spark pipeline beside plain pyarrow and redis-py, in one run.

Messages per CPU second of everything on the client's side: driver, JVM and Python workers; the server's work is not in
it. Each measurement is preceded by one of a tenth, so that what has to be compiled and started is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.server import server
from rsmq.keys import Keys
from rsmq.pipeline.session import open_session
from rsmq.pipeline.source import RsmqSource

KEYS: Final = Keys("bench")
PARTITIONS: Final = 8
LETTERS_EACH: Final = 10
PAYLOAD: Final = "x" * 140
TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figure:
    """One line of the table. `base`: the line it is compared with; `goal` in messages per CPU second."""

    title: str
    rate: float
    per_cpu: float
    base: str = ""
    goal: int = 0


class Rows(RsmqSource):
    """The same source handing rows to Spark instead of Arrow batches, to see what those save."""

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


class Bench:
    """One server, one Spark session, and topics on it."""

    def __init__(self, url: str, spark: SparkSession, folder: Path, count: int) -> None:
        self.url, self.spark, self.folder, self.count = url, spark, folder, count
        self.client: Any = redis.Redis.from_url(url, protocol=2)
        spark.dataSource.register(Rows)

    def make(self, topic: str) -> None:
        """A topic that is not there yet."""
        self.client.hset(KEYS.topic(topic), mapping={"partitions": PARTITIONS, "created_ms": 1})
        self.client.sadd(KEYS.topics, topic)

    def read(self, kind: str, topic: str) -> DataFrame:
        """A topic as a DataFrame."""
        return self.spark.read.format(kind).options(url=self.url, prefix=KEYS.prefix, subscribe=topic).load()

    def messages(self, count: int) -> DataFrame:
        """Messages of about 176 bytes in two tasks, with everything that any way of writing needs."""
        return self.spark.range(0, count, 1, 2).selectExpr(
            f"concat('{{\"n\":', id, ',\"x\":\"{PAYLOAD}\"}}') AS value", "concat('m', id) AS id", "'src' AS topic",
            f"CAST(id DIV {-(-count // 2)} * 4 + id % 4 AS INT) AS partition", "id + 1 AS id_ms", "0L AS id_seq",
        )  # fmt: skip

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
        """The bare client: XADD in pipelines of 100."""
        self.client.flushall()
        self.make("target")
        for start in range(0, count, 100):
            with self.client.pipeline(transaction=False) as pipe:
                for number in range(start, start + 100):
                    fields = {"data": f'{{"n":{number},"x":"{PAYLOAD}"}}', "id": f"m{number}"}
                    pipe.xadd(KEYS.stream("target", number % PARTITIONS), fields)
                pipe.execute()
        self.check("target", count)

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

    def check(self, topic: str, count: int) -> None:
        """A measurement of something else than was meant is none."""
        stored = sum(self.client.xlen(KEYS.stream(topic, number)) for number in range(PARTITIONS))
        if stored != count:
            raise RuntimeError(f"{stored} messages are stored instead of {count}")


def measure(title: str, act: Callable[[int], object], count: int, base: str = "", goal: int = 0) -> Figure:
    """Do a tenth of it, then all of it."""
    act(count // 10)
    with Meter() as meter:
        start = time.perf_counter()
        act(count)
        passed = time.perf_counter() - start
    return Figure(title, count / passed, count / meter.seconds, base, goal)


class Meter(threading.Thread):
    """CPU time of this process and all below it within the block.

    Looks several times a second and remembers who has ended: the time of Spark's Python workers is told to nobody.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._first = dict[int, int]()
        self._last = dict[int, int]()
        self._own = 0.0

    @property
    def seconds(self) -> float:
        """Of all, without the meter's own."""
        return sum(spent - self._first.get(number, 0) for number, spent in self._last.items()) / TICK - self._own

    def run(self) -> None:
        """Look until the end of the block."""
        start = time.thread_time()
        while not self._ended.wait(0.1):
            self._last.update(cpu_ticks())
        self._last.update(cpu_ticks())
        self._own = time.thread_time() - start

    def __enter__(self) -> Self:
        self._first = cpu_ticks()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def cpu_ticks() -> dict[int, int]:
    """The CPU time of each process that is this one or below it, the server's left out."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue  # ended at this moment
        fields, number = rest.split(), int(path.parent.name)
        parents[number] = int(fields[1])
        if "-server" not in name:
            ticks[number] = int(fields[11]) + int(fields[12])

    def is_ours(number: int) -> bool:
        while number > 1 and number != os.getpid():
            number = parents.get(number, 0)
        return number == os.getpid()

    return {number: spent for number, spent in ticks.items() if is_ours(number)}


def run(bench: Bench) -> Iterator[Figure]:
    """All lines, in order."""
    count, folder = bench.count, str(bench.folder / "spark")
    for name, number in (("warm", count // 10), ("full", count)):
        bench.make(name)
        bench.write(bench.messages(number), topic=name)
    topic = {count // 10: "warm", count: "full"}

    def parquet(kind: str) -> Callable[[int], None]:
        return lambda n: bench.read(kind, topic[n]).write.mode("overwrite").parquet(folder)

    plain = "read: pyarrow without Spark → Parquet"
    yield measure(plain, lambda n: bench.plain(topic[n]), count)
    yield measure("read: rows → Parquet", parquet("rsmq_rows"), count, plain)
    yield measure("read: Arrow → Parquet", parquet("rsmq"), count, plain, 100_000)
    yield measure(
        "read: Arrow, discarded",
        lambda n: bench.read("rsmq", topic[n]).write.format("noop").mode("overwrite").save(),
        count,
        plain,
    )
    pipelined = "write: redis-py pipeline"
    yield measure(pipelined, bench.pipelined, count)
    for mode, goal in (("none", 0), ("id", 0), ("marker", 170_000), ("dedupe", 0)):
        yield measure(f"write: {mode}", lambda n, mode=mode: bench.sink(n, mode), count, pipelined, goal)  # type: ignore[misc]
    yield measure("write: inbox", bench.inbox, count, pipelined, 90_000)


def show(figures: list[Figure], count: int) -> None:
    """The table."""
    table = Table(title=f"{count} messages of 176 bytes, {PARTITIONS} partitions, AOF everysec, {os.cpu_count()} cores")
    for title in ("", "messages/s", "per CPU second", "× base", "goal"):
        table.add_column(title, justify="right" if title else "left")
    per_cpu = {figure.title: figure.per_cpu for figure in figures}
    for each in figures:
        ratio = f"{each.per_cpu / per_cpu[each.base]:.2f}" if each.base else ""
        mark = "" if not each.goal else f"{each.goal:,} {'met' if each.per_cpu >= each.goal else 'MISSED'}"
        table.add_row(each.title, f"{each.rate:,.0f}", f"{each.per_cpu:,.0f}", ratio, mark)
    Console(width=120).print(table)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500_000, help="messages, a multiple of 1000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rsmq-bench-"))
    figures = []
    try:
        with server() as url, Progress(transient=True) as progress:
            task = progress.add_task("starting Spark", total=10)
            spark = open_session("local[2]")
            for figure in run(Bench(url, spark, folder, options.count)):
                figures.append(figure)
                progress.update(task, advance=1, description=figure.title)
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
    else:
        show(figures, options.count)


if __name__ == "__main__":
    main()
