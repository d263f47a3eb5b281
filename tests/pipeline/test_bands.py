"""Topics with bands: a query, an archive, a replay and a report have each message of each band, also of one that is
opened while they run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from rsmq.errors import ConfigError
from rsmq.model.layout import Layout
from rsmq.model.settings import Settings
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.writer import write_rows
from rsmq.pipeline.report.report import ReportOptions, collect
from rsmq.redis.client.connector import Connector
from rsmq.redis.streams import join_group, trim
from rsmq.redis.topics import Topics
from tests.pipeline.conftest import Store
from tests.pipeline.vault import Vault

BANDS = ("urgent", "normal", "bulk")
KEYS = 3


class Banded:
    """A topic whose bands are changed as the command changes them. `numbered` messages rise over all bands."""

    def __init__(self, store: Store, settings: Settings, topic: str, partitions: int = 1) -> None:
        self._store, self._settings, self._topic = store, settings, topic
        self._sent = 0
        self.of_band = dict[str, list[int]]()
        store.make(topic, partitions)

    def set_bands(self, *bands: str) -> Layout:
        """`rsmq topic set --bands`: the layout afterwards."""

        async def change() -> Layout:
            async with Connector(self._settings.url or "", self._settings).connected() as client:
                topics = Topics(client, self._store.keys, self._settings)
                return (await topics.set_bands(self._topic, bands)).layout

        return anyio.run(change)

    def resize(self, partitions: int) -> Layout:
        """`rsmq topic resize`: the layout afterwards."""

        async def change() -> Layout:
            async with Connector(self._settings.url or "", self._settings).connected() as client:
                topics = Topics(client, self._store.keys, self._settings)
                return (await topics.resize(self._topic, partitions)).layout

        return anyio.run(change)

    def open_bands(self) -> list[str]:
        """What a worker does each second while a band waits: the members that do not know it yet."""

        async def look() -> list[str]:
            async with Connector(self._settings.url or "", self._settings).connected() as client:
                return await Topics(client, self._store.keys, self._settings).open_bands(self._topic)

        return anyio.run(look)

    @property
    def layout(self) -> Layout:
        """As it is stored."""

        async def read() -> Layout:
            async with Connector(self._settings.url or "", self._settings).connected() as client:
                return (await Topics(client, self._store.keys, self._settings).existing(self._topic)).layout

        return anyio.run(read)

    def send(self, count: int, *bands: str) -> None:
        """Messages in turn to each of these bands, keys in turn: those that are not open are stored in `normal`."""
        layout = self.layout
        for number in range(self._sent, self._sent + count):
            band = bands[number % len(bands)]
            block, key = layout.block_of(band), f"k{number % KEYS}"
            if block is None or block.state != "open":
                block, band = layout.current, "normal"
            self.of_band.setdefault(band, []).append(number)
            self._store.add(self._topic, block.partition_for(key), {"data": f'{{"n": {number}}}', "key": key})
        self._sent += count


@pytest.fixture
def banded(store: Store, settings: Settings, topic: str) -> Banded:
    return Banded(store, settings, topic)


def numbers(values: Sequence[str]) -> list[int]:
    """The numbers of messages, in the order in which they were read."""
    return [json.loads(value)["n"] for value in values]


def test_a_query_reads_a_band_that_is_opened_while_it_runs(queries: Any, banded: Banded, topic: str) -> None:
    """From its beginning, each message once; also where the query had started at the newest messages."""
    query, late = queries(subscribe=topic, startingOffsets="earliest"), queries(subscribe=topic)
    banded.send(4, "normal")
    assert sorted(numbers(query.batch())) == [0, 1, 2, 3]
    late.batch()
    assert banded.set_bands(*BANDS).block_of("urgent") is not None
    banded.send(12, *BANDS)
    assert sorted(numbers(query.batch())) == sorted(numbers(late.batch())) == list(range(4, 16))
    banded.send(6, *BANDS)
    assert sorted(numbers(query.batch())) == list(range(16, 22))


@pytest.mark.parametrize("trims", [False, True])
def test_a_query_reads_each_message_once_over_a_resize(
    queries: Any, banded: Banded, store: Store, topic: str, settings: Settings, trims: bool
) -> None:
    """What was published before and after it, also where retention has emptied the sealed partitions meanwhile."""
    query = queries(subscribe=topic, startingOffsets="earliest")
    banded.send(4, "normal")
    assert sorted(numbers(query.batch())) == [0, 1, 2, 3]
    if not trims:
        banded.send(4, "normal")
    before = banded.layout
    layout = banded.resize(2 * before.current.count)
    assert layout.is_resized

    async def empty() -> None:
        async with Connector(settings.url or "", settings).connected() as client:
            for number in before.numbers if trims else ():
                await client.execute_command("XTRIM", store.keys.stream(topic, number), "MAXLEN", 0)

    anyio.run(empty)
    banded.send(8, "normal")
    assert sorted(numbers(query.batch())) == list(range(4, 12 if trims else 16))
    assert query.latest() == query.offset
    banded.send(2, "normal")
    assert len(query.batch()) == 2


def test_a_query_with_a_name_misses_no_message_of_a_band(
    queries: Any, banded: Banded, store: Store, topic: str, settings: Settings
) -> None:
    """It keeps no band closed, retention keeps there what it has not read, and it may start again."""
    query = queries(subscribe=topic, startingOffsets="earliest", group="lake")
    banded.send(2, "normal")
    query.batch()
    urgent = banded.set_bands(*BANDS).block_of("urgent")
    assert urgent is not None
    assert urgent.state == "open"
    banded.send(400, "urgent")

    async def trimmed() -> int:
        async with Connector(settings.url or "", settings).connected() as client:
            found = await trim(client, store.keys, topic, urgent.first, keep_age_ms=0, keep_length=0, exact=True)
            return found.removed

    assert anyio.run(trimmed) == 0
    assert len(numbers(query.batch())) == 400
    query.reader.commit(json.loads(query.offset))
    assert anyio.run(trimmed) == 400
    query.reader.stop()
    again = queries(subscribe=topic, startingOffsets=query.offset, group="lake")
    banded.send(3, *BANDS)
    assert sorted(numbers(again.batch())) == [402, 403, 404]


def test_workers_and_queries_refuse_each_others_groups_of_a_topic_with_bands(
    queries: Any, banded: Banded, store: Store, topic: str, settings: Settings
) -> None:
    """As in a topic without."""
    banded.set_bands(*BANDS)

    async def join(group: str) -> None:
        async with Connector(settings.url or "", settings).connected() as client:
            found = await Topics(client, store.keys, settings).existing(topic)
            await join_group(client, store.keys, found, group, "hash")

    anyio.run(join, "workers")
    with pytest.raises(ConfigError, match="belongs to workers"):
        queries(subscribe=topic, startingOffsets="earliest", group="workers").batch()
    queries(subscribe=topic, startingOffsets="earliest", group="lake").batch()
    with pytest.raises(ConfigError, match="has distribution 'query', not 'hash'"):
        anyio.run(join, "lake")


@pytest.mark.parametrize("idempotence", ["marker", "dedupe"])
def test_an_exact_write_waits_for_its_band(
    banded: Banded, store: Store, connection: dict[str, str], topic: str, idempotence: str
) -> None:
    """A row that was stored in `normal` would be stored again in the band: so nothing is stored before it is open."""
    subscriber = store.client.pubsub()
    subscriber.subscribe(store.keys.presence("old"))
    assert subscriber.get_message(timeout=10)
    member = '{"member": "old", "layout": 0}'
    store.client.sadd(store.keys.members(topic, "g"), "old")
    store.client.set(store.keys.alive(topic, "g", "old"), member)
    store.client.xgroup_create(store.keys.stream(topic, 0), "g", "0", mkstream=True)
    banded.set_bands(*BANDS)
    options = {**connection, "topic": topic, "band": "urgent", "idempotence": idempotence}
    options |= {"jobId": "j"} if idempotence == "marker" else {}
    columns: dict[str, Any] = {"value": [b"1", b"2"], "id": ["a", "b"], "id_ms": [1, 2], "id_seq": [0, 0]}

    def write() -> tuple[int, int]:
        rows: Iterator[pa.RecordBatch] = iter([pa.RecordBatch.from_pydict(columns)])
        result = write_rows(write_options(options), rows)
        return result.stored, result.skipped

    with pytest.raises(ConfigError, match=r"band 'urgent' is not open yet: .* `rsmq topic show"):
        write()
    subscriber.close()
    store.client.delete(store.keys.alive(topic, "g", "old"))
    assert banded.open_bands() == []
    assert [write(), write()] == [(2, 0), (0, 2)]


def test_spark_archives_replays_and_reports_a_topic_with_bands(
    vault: Vault, store: Store, settings: Settings, topic: str
) -> None:
    """Bands are added between two runs, one of each engine: each message is archived once, and published again in the
    order of its key, into a band of the target."""
    banded = Banded(store, settings, topic)
    banded.send(30, "normal")
    assert vault.archive_by_arrow(topic).messages == 30
    banded.set_bands(*BANDS)
    banded.send(90, *BANDS)
    assert vault.archive(topic).messages == 90
    assert vault.archived(topic) == list(range(120))
    copy = Banded(store, settings, f"{topic}copy", 2)
    copy.set_bands(*BANDS)
    assert vault.replay(topic, f"{topic}copy", band="bulk").messages == 120
    bulk = copy.layout.block_of("bulk")
    assert bulk is not None
    rows = [
        json.loads(fields[b"data"])["n"] for part in bulk.numbers for _, fields in store.entries(f"{topic}copy", part)
    ]
    assert sorted(rows) == list(range(120))
    for key in range(KEYS):
        of_key = [number for number in rows if number % KEYS == key]
        assert of_key == sorted(of_key)
    same = Banded(store, settings, f"{topic}same", 2)
    job = vault.arrow_job(topic, f"{topic}same")
    with pytest.raises(ConfigError, match=r"rows are for band '\w+', and the bands of .* are normal: .* --band normal"):
        job.run(job.plan())
    same.set_bands(*BANDS)
    job.run(job.plan())
    for band in BANDS:
        block = same.layout.block_of(band)
        assert block is not None
        entries = [fields for part in block.numbers for _, fields in store.entries(f"{topic}same", part)]
        assert sorted(json.loads(fields[b"data"])["n"] for fields in entries) == banded.of_band[band]
    report = collect(None, ReportOptions((topic,), vault.connection))
    assert report.history.messages == 120
    (spread,) = report.history.spreads
    assert sum(spread.messages) == 120


def test_spark_streams_a_band_that_is_opened_while_the_query_runs(
    spark: SparkSession, connection: dict[str, str], banded: Banded, topic: str, tmp_path: Path
) -> None:
    """One query that runs on: each message once, in order per key within a band, over the opening."""
    found: list[tuple[int, int]] = []

    def sink(frame: DataFrame, batch: int) -> None:
        rows = frame.select("partition", "value").collect()
        found.extend((row.partition, json.loads(row.value)["n"]) for row in rows)

    banded.send(10, "normal")
    source = spark.readStream.format("rsmq").options(
        **connection, subscribe=topic, startingOffsets="earliest", group="lake", maxOffsetsPerTrigger="25"
    )
    query = source.load().writeStream.option("checkpointLocation", str(tmp_path / "c")).foreachBatch(sink).start()
    try:
        query.processAllAvailable()
        assert not banded.set_bands(*BANDS).waits
        banded.send(60, *BANDS)
        query.processAllAvailable()
    finally:
        query.stop()
    assert sorted(number for _, number in found) == list(range(70))
    layout = banded.layout
    for band, sent in banded.of_band.items():
        read = [number for partition, number in found if layout.band_of(partition) == band]
        assert sorted(read) == sent
        assert all(
            [number for number in read if number % KEYS == key] == [each for each in sent if each % KEYS == key]
            for key in range(KEYS)
        )
