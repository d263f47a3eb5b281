"""Spark's source and sink on a Redis Cluster, and while slots move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import anyio.to_thread
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.topic_sink import TaskResult
from rsmq.pipeline.format.writer import write_rows
from rsmq.pipeline.source import RsmqSource
from rsmq.redis.client.connector import Client
from tests.cluster.cluster import Cluster

TOPIC = "orders"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three masters, three replicas."""
    with Cluster() as running:
        yield running


@pytest.fixture
def settings(cluster: Cluster, prefix: str) -> Settings:
    """Defaults on the cluster instead of the shared server."""
    return Settings(url=cluster.url, prefix=prefix)


async def fill(client: Client, keys: Keys, count: int) -> None:
    """A topic of three partitions, `count` messages in each."""
    await client.execute_command("SADD", keys.topics, TOPIC)
    await client.execute_command("HSET", keys.topic(TOPIC), "partitions", 3, "created_ms", 1)
    for partition in range(3):
        for number in range(count):
            await client.execute_command("XADD", keys.stream(TOPIC, partition), "*", "data", str(number))


def batches(connection: dict[str, str], **options: str) -> Iterator[list[bytes]]:
    """The values of a batch read, reply by reply."""
    source = RsmqSource({**connection, "subscribe": TOPIC, "fetchSize": "50", **options})
    reader = source.reader(source.schema())
    for part in reader.partitions():
        for batch in reader.read(part):
            yield batch["value"].to_pylist()


async def write(connection: dict[str, str], rows: Iterable[dict[str, Any]], **options: str) -> TaskResult:
    """One task, in a thread as in a process of its own."""
    options = {**connection, "topic": TOPIC, "idempotence": "marker", "jobId": "j", **options}
    batches = (pa.RecordBatch.from_pydict(each) for each in rows)
    return await anyio.to_thread.run_sync(write_rows, write_options(options), batches)


async def test_a_read_finds_all_nodes(client: Client, keys: Keys, connection: dict[str, str]) -> None:
    """Questions about topics, ranges and entries, and scripts, go to the node that has the key."""
    await fill(client, keys, 120)
    expected = [str(number).encode() for _ in range(3) for number in range(120)]
    assert [value for batch in batches(connection, minPartitions="9") for value in batch] == expected


async def test_a_slot_moves_in_the_middle_of_a_read(
    cluster: Cluster, client: Client, keys: Keys, connection: dict[str, str]
) -> None:
    """Half-way and moved: every entry once, in order, and the count is exact."""
    await fill(client, keys, 200)
    reading = batches(connection)
    found = next(reading)
    with cluster.moving(keys.stream(TOPIC, 0)):
        found += next(reading)
    found += [value for batch in reading for value in batch]
    assert found == [str(number).encode() for _ in range(3) for number in range(200)]


async def test_a_slot_moves_in_the_middle_of_a_write(
    cluster: Cluster, client: Client, keys: Keys, connection: dict[str, str]
) -> None:
    """Each message once, its job's mark moves along."""
    await fill(client, keys, 1)

    def rows() -> Iterator[dict[str, Any]]:
        for start in range(0, 3000, 1000):
            numbers = range(start, start + 1000)
            if start == 1000:
                cluster.migrate(keys.stream(TOPIC, 1))
            yield {
                "value": [str(n) for n in numbers],
                "partition": [1] * 1000,
                "id_ms": [*numbers],
                "id_seq": [0] * 1000,
            }

    assert (await write(connection, rows())).stored == 3000
    assert (await write(connection, rows())).skipped == 3000
    assert await client.execute_command("XLEN", keys.stream(TOPIC, 1)) == 3001


async def test_letters_for_devices_on_all_nodes(client: Client, keys: Keys, connection: dict[str, str]) -> None:
    """One write reaches inboxes everywhere, each letter once."""
    devices = sorted(f"d{number}" for number in range(60))
    row = {"device": devices, "value": ["1"] * 60, "id_ms": [1] * 60, "id_seq": [0] * 60}
    assert [(await write(connection, [row], target="inbox")).stored for _ in range(2)] == [60, 0]
    for device in devices:
        assert await client.execute_command("ZCARD", keys.inbox(device)) == 1


async def test_spark_while_a_slot_moves(
    spark: SparkSession, cluster: Cluster, client: Client, keys: Keys, connection: dict[str, str]
) -> None:
    """Real Spark reads and writes a partition that is between two nodes, and once more when it has moved."""
    await fill(client, keys, 200)
    stream, expected = keys.stream(TOPIC, 0), [str(number) for number in range(200)]

    def values() -> list[list[str]]:
        rows = spark.read.format("rsmq").options(**connection, subscribe=TOPIC, fetchSize="50").load()
        found = rows.select("partition", "value").collect()
        return [[bytes(row.value).decode() for row in found if row.partition == number] for number in range(3)]

    def append(count: int) -> None:
        columns = ("CAST(200 + id AS STRING) AS value", "0 AS partition", "id + 1 AS id_ms", "0 AS id_seq")
        options = {**connection, "topic": TOPIC, "idempotence": "marker", "jobId": "j"}
        spark.range(0, count, 1, 1).selectExpr(*columns).write.format("rsmq").options(**options).mode("append").save()

    append(10)
    with cluster.moving(stream):
        assert values() == [expected + [str(n) for n in range(200, 210)]] + [expected] * 2
        append(20)
    assert cluster.owner(stream).ask("XLEN", stream) == 220
    append(30)
    assert values() == [expected + [str(n) for n in range(200, 230)]] + [expected] * 2
