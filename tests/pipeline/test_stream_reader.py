"""Streaming reads: offsets that are exact and stable, admission, AvailableNow, restarts, and loss noticed."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows

from rsmq.errors import ConfigError
from rsmq.inspector.doctor.facts import gather
from rsmq.inspector.doctor.rules import check_served
from rsmq.inspector.retention_holds import retention_holds
from rsmq.model.settings import Settings
from rsmq.pipeline.format.offsets import DataLoss, Offsets
from rsmq.pipeline.spark.errors import spark_errors
from rsmq.redis.client.connector import Connector
from rsmq.redis.topics import Topics
from tests.pipeline.conftest import Store


def add(store: Store, topic: str, partition: int, *values: int) -> None:
    """Entries with these values."""
    for value in values:
        store.add(topic, partition, {"data": str(value)})


def test_a_stream_follows_its_topic(queries: Any, store: Store, topic: str) -> None:
    """From now on by default, each message in one batch; offsets stand still when nothing comes."""
    store.make(topic)
    add(store, topic, 0, 1, 2)
    query, whole = queries(subscribe=topic), queries(subscribe=topic, startingOffsets="earliest")
    assert query.latest() == query.offset
    assert whole.batch() == ["1", "2"]
    add(store, topic, 1, 3)
    assert query.batch() == ["3"]
    assert query.latest() == query.offset
    assert whole.batch() == ["3"]
    assert query.offset == whole.offset
    assert json.loads(query.offset)[topic] == {
        "0": {"added": 2, "id": store.entries(topic, 0)[-1][0]},
        "1": {"added": 1, "id": store.entries(topic, 1)[-1][0]},
        "epoch": 1,
    }


def test_a_stream_starts_at_its_starting_offsets(queries: Any, store: Store, topic: str) -> None:
    """At a stream id or at a time, counted so that the first batch is exact."""
    store.make(topic, 1)
    for number in range(10):
        store.add(topic, 0, {"data": str(number)}, f"{1000 + number}-0")
    by_id = queries(subscribe=topic, startingOffsets=f'{{"{topic}": {{"0": "1006-0"}}}}')
    by_time = queries(subscribe=topic, startingTimestamp="1007")
    assert json.loads(by_id.offset)[topic]["0"] == {"added": 7, "id": "1006-0"}
    assert by_id.batch() == by_time.batch() == ["7", "8", "9"]
    with pytest.raises(ConfigError, match="endingOffsets and endingTimestamp are for read"):
        queries(subscribe=topic, endingTimestamp="5")
    with pytest.raises(ConfigError, match="names topic 'other', which is not read"):
        queries(subscribe=topic, startingOffsets='{"other": {"0": "1-0"}}')


def test_max_offsets_per_trigger_limits_each_batch(queries: Any, store: Store, topic: str) -> None:
    """Exactly so many a batch, split by backlog, every message once and in order; no more than asked is read."""
    store.make(topic, 2)
    add(store, topic, 0, *range(90))
    add(store, topic, 1, *range(1000, 1010))
    query = queries(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    limit = query.reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)
    batches = [query.batch(limit) for _ in range(4)]
    assert [len(batch) for batch in batches] == [30, 30, 30, 10]
    assert sum(value >= "1000" for value in batches[0] if len(value) == 4) == 3
    found = [int(value) for batch in batches for value in batch]
    assert [n for n in found if n < 1000] == list(range(90))
    assert [n for n in found if n >= 1000] == list(range(1000, 1010))
    assert query.batch(limit) == []


def test_available_now_stops_at_the_entries_of_its_start(queries: Any, store: Store, topic: str) -> None:
    """All there was when it began, in as many batches as the limit makes, and nothing that came later."""
    store.make(topic, 1)
    add(store, topic, 0, *range(5))
    query = queries(subscribe=topic, startingOffsets="earliest")
    query.reader.prepareForTriggerAvailableNow()
    add(store, topic, 0, 5)
    assert query.batch(ReadMaxRows(3)) == ["0", "1", "2"]
    add(store, topic, 0, 6)
    assert query.batch(ReadMaxRows(3)) == ["3", "4"]
    assert query.latest(ReadMaxRows(3)) == query.offset
    query.reader.prepareForTriggerAvailableNow()
    assert query.batch() == ["5", "6"]


def test_available_now_stays_within_its_end_when_entries_are_lost(queries: Any, store: Store, topic: str) -> None:
    """A gap brings a limited batch further on, never beyond what there was when it began."""
    store.make(topic, 1)
    query = queries(subscribe=topic, failOnDataLoss="false")
    add(store, topic, 0, *range(100))
    query.reader.prepareForTriggerAvailableNow()
    add(store, topic, 0, *range(100, 200))
    store.client.xtrim(store.keys.stream(topic, 0), maxlen=150, approximate=False)
    assert query.batch(ReadMaxRows(60)) == [str(number) for number in range(50, 100)]
    assert query.latest(ReadMaxRows(60)) == query.offset


def test_min_partitions_of_a_stream(queries: Any, store: Store, topic: str) -> None:
    """The tasks of a batch are cut as those of a read are."""
    store.make(topic, 1)
    add(store, topic, 0, *range(50))
    query = queries(subscribe=topic, startingOffsets="earliest", minPartitions=4)
    assert [each.expected for each in query.ranges(query.offset, query.latest())] == [12, 12, 13, 13]
    assert query.batch() == [str(number) for number in range(50)]


def test_a_new_topic_of_a_pattern(queries: Any, store: Store, topic: str) -> None:
    """Is read from its beginning, exactly, though it had lost entries before it was seen."""
    store.make(f"{topic}a", 1)
    query = queries(subscribePattern=f"{topic}.*")
    store.make(f"{topic}b", 1)
    add(store, f"{topic}b", 0, *range(10))
    store.client.xtrim(store.keys.stream(f"{topic}b", 0), maxlen=6, approximate=False)
    start, end = query.offset, query.latest()
    assert [(each.topic, each.expected) for each in query.ranges(start, end)] == [(f"{topic}b", 6)]
    assert query.batch() == [str(number) for number in range(4, 10)]
    assert query.latest() == query.offset
    add(store, f"{topic}b", 0, 10)
    assert query.batch() == ["10"]


def test_a_deleted_topic_keeps_its_position_or_is_an_error(queries: Any, store: Store, topic: str) -> None:
    """Of a pattern: nothing more comes, its position is kept; by its name: an error."""
    for name in (f"{topic}a", f"{topic}b"):
        store.make(name, 1)
        add(store, name, 0, 1)
    query, named = queries(subscribePattern=f"{topic}.*"), queries(subscribe=f"{topic}a")
    store.client.delete(store.keys.topic(f"{topic}a"), store.keys.stream(f"{topic}a", 0))
    store.client.srem(store.keys.topics, f"{topic}a")
    assert query.latest() == query.offset
    with pytest.raises(ConfigError, match=f"there is no topic '{topic}a'. Did you mean {topic}b"):
        named.latest()


def test_entries_trimmed_between_two_batches_are_data_loss(queries: Any, store: Store, topic: str) -> None:
    """100 came, 50 are left: the batch says so; without failOnDataLoss it continues with what is left."""
    store.make(topic, 1)
    strict = queries(subscribe=topic)
    lenient = queries(subscribe=topic, failOnDataLoss="false")
    add(store, topic, 0, *range(100))
    store.client.xtrim(store.keys.stream(topic, 0), maxlen=50, approximate=False)
    with pytest.raises(DataLoss, match="expected 100, found 50: trimmed before read"):
        strict.batch()
    assert lenient.batch() == [str(number) for number in range(50, 100)]
    add(store, topic, 0, 100)
    assert lenient.batch() == ["100"]


def test_entries_trimmed_with_a_limit_count_as_lost(queries: Any, store: Store, topic: str) -> None:
    """What is lost counts in the batch that meets the gap, and only there."""
    store.make(topic, 1)
    query = queries(subscribe=topic, failOnDataLoss="false")
    add(store, topic, 0, *range(100))
    store.client.xtrim(store.keys.stream(topic, 0), maxlen=50, approximate=False)
    end = query.latest(ReadMaxRows(20))
    (gap,) = query.ranges(query.offset, end)
    assert gap.expected == 70
    assert query.batch(ReadMaxRows(20)) == [str(number) for number in range(50, 70)]
    (rest,) = query.ranges(query.offset, query.latest())
    assert rest.expected == 30


@pytest.mark.parametrize("created_ms", [1, 2])
def test_a_recreated_topic_is_an_error_or_read_from_its_start(
    queries: Any, store: Store, topic: str, created_ms: int
) -> None:
    """Deleted and created again, or only its streams: an error with both counts, or its beginning."""
    store.make(topic, 1)
    add(store, topic, 0, *range(40))
    strict = queries(subscribe=topic)
    lenient = queries(subscribe=topic, failOnDataLoss="false")
    store.client.delete(store.keys.topic(topic), store.keys.stream(topic, 0))
    store.make(topic, 1, created_ms)
    add(store, topic, 0, *range(7))
    with pytest.raises(DataLoss, match=f"{topic}.0 was deleted and created again: 40 entries .* the new one has had 7"):
        strict.batch()
    assert lenient.batch(ReadMaxRows(5)) == ["0", "1", "2", "3", "4"]
    assert lenient.batch() == ["5", "6"]


class Sink:
    """Where a real query puts its rows: the values of each batch, by the number of the batch."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int]]] = []

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.batches.append((number, sorted(json.loads(row.value)["n"] for row in frame.select("value").collect())))


def test_spark_streams_exactly(
    spark: SparkSession, connection: dict[str, str], store: Store, topic: str, tmp_path: Path
) -> None:
    """Limited batches over a restart, and over a lost commit: the batch that runs again is the same, nothing lacks.

    At last the topic is deleted and created again: the query says so, with both counts.
    """
    store.fill(topic, 100)
    checkpoint, sink = tmp_path / "checkpoint", Sink()

    def run() -> None:
        source = spark.readStream.format("rsmq").options(
            **connection, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="60"
        )
        writer = source.load().writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = writer.foreachBatch(sink).start()
        assert query.awaitTermination(100)

    run()
    assert [(number, len(values)) for number, values in sink.batches] == [(0, 60), (1, 40)]
    assert sorted(value for _, values in sink.batches for value in values) == list(range(100))
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    store.fill(topic, 10, start=100)
    run()
    assert sink.batches[2] == sink.batches[1]
    assert sink.batches[3:] == [(2, list(range(100, 110)))]
    had = len(store.entries(topic, 0))
    store.client.delete(store.keys.topic(topic), *(store.keys.stream(topic, number) for number in (0, 1)))
    store.make(topic, created_ms=2)
    add(store, topic, 0, *range(7))
    words = f"{topic}.0 was deleted and created again: {had} entries of the old topic were read, the new one has had 7"
    with pytest.raises(DataLoss, match=words), spark_errors():
        run()


def test_a_stream_starts_at_a_time_of_each_partition(queries: Any, store: Store, topic: str) -> None:
    """A partition that is not named starts at its beginning; with `error` there must be an entry from the time on."""
    store.make(topic)
    for number in range(10):
        store.add(topic, number % 2, {"data": str(number)}, f"{1000 + number}-0")
    times = {"startingOffsetsByTimestamp": json.dumps({topic: {"1": 1007}})}
    assert queries(subscribe=topic, **times).batch() == ["0", "2", "4", "6", "8", "7", "9"]
    late = {"startingOffsetsByTimestamp": json.dumps({topic: {"1": "2030-01-01T00:00:00Z"}})}
    assert queries(subscribe=topic, **late).batch() == ["0", "2", "4", "6", "8"]
    with pytest.raises(ConfigError, match=f"{topic}.1 has no entry at or after the starting time"):
        queries(subscribe=topic, startingOffsetsByTimestampStrategy="error", **late)
    queries(subscribe=topic, startingOffsetsByTimestampStrategy="error", **times)


def test_a_stream_continues_from_the_progress_of_another(queries: Any, store: Store, topic: str) -> None:
    """Offsets with counts are a start: what has gone since then is missing, and not forgotten."""
    store.make(topic)
    add(store, topic, 0, 1, 2, 3)
    first = queries(subscribe=topic, startingOffsets="earliest")
    first.batch()
    add(store, topic, 0, 4, 5)
    second = queries(subscribe=topic, startingOffsets=first.offset)
    assert second.batch() == ["4", "5"]
    store.client.xtrim(store.keys.stream(topic, 0), maxlen=1, approximate=False)
    with pytest.raises(DataLoss, match="expected 2, found 1"):
        queries(subscribe=topic, startingOffsets=first.offset).batch()


def test_a_stream_waits_for_enough_messages(queries: Any, store: Store, topic: str) -> None:
    """Not for the first batch, not for longer than the delay, and not when it has an end."""
    store.make(topic)
    add(store, topic, 0, 1)
    query = queries(subscribe=topic, startingOffsets="earliest", minOffsetsPerTrigger=3)
    hasty = queries(
        subscribe=topic, startingOffsets="earliest", minOffsetsPerTrigger=3, maxTriggerDelay="1ms",
        maxOffsetsPerTrigger=1,
    )  # fmt: skip
    assert query.batch() == hasty.batch(ReadMaxRows(1)) == ["1"]
    add(store, topic, 0, 2, 3)
    assert query.batch() == []
    assert hasty.batch(ReadMaxRows(1)) == ["2"]
    add(store, topic, 1, 4)
    assert query.batch() == ["2", "3", "4"]
    add(store, topic, 1, 5)
    query.reader.prepareForTriggerAvailableNow()
    assert query.batch() == ["5"]


def test_the_progress_of_a_stream_says_how_far_it_is_behind(queries: Any, store: Store, topic: str) -> None:
    """Messages and seconds, behind the newest, of the batch that is planned."""
    store.make(topic)
    for number in range(8):
        store.add(topic, 0, {"data": str(number)}, f"{10_000 + 1000 * number}-0")
    store.add(topic, 1, {"data": "x"}, "11000-0")
    query = queries(subscribe=topic, startingOffsets="earliest")
    assert "@behind" not in query.reader.reportLatestOffset()
    query.batch(ReadMaxRows(5))
    newest = query.reader.reportLatestOffset()
    lag = newest["@behind"]
    assert lag["messages"]["sum"] == 4
    assert lag["messages"]["max"] in (3, 4)
    assert lag["seconds"]["max"] == lag["messages"]["max"]
    assert Offsets.from_json(newest).positions[topic, 0].added == 8
    assert queries(subscribe=topic, startingOffsets=json.dumps(newest)).batch() == []


async def test_a_query_with_a_name_is_a_group_that_keeps_what_it_has_not_read(
    queries: Any, store: Store, topic: str, settings: Settings
) -> None:
    """It shows among the groups and in why-not-trimmed, moves with each commit, and is missed when it has ended."""
    store.make(topic)
    add(store, topic, 0, 1, 2)
    query = queries(subscribe=topic, startingOffsets="earliest", group="lake")
    query.batch()
    add(store, topic, 0, 3)

    async def state() -> tuple[Any, list[str], list[str]]:
        async with Connector(settings.url or "", settings).connected() as client:
            facts = await gather(client, store.keys, settings, timedelta(0))
            (group,) = facts.board.groups
            found = await Topics(client, store.keys, settings).find(topic)
            assert found is not None
            holds = await retention_holds(client, store.keys, found, 0)
            return group, [hold.holder for hold in holds], list(check_served(facts))

    group, holders, told = await state()
    assert (group.name, group.distribution, group.unread, holders) == ("lake", "query", 3, ["group lake"])
    assert [member.handler for member in group.members] == ["a query of Spark"]
    assert told == []
    query.reader.commit(json.loads(query.offset))
    group, holders, _ = await state()
    assert group.unread == 1
    query.reader.stop()
    _, _, (told,) = await state()
    assert "is a query of Spark that does not run, 1 message waits for it" in told
    assert f"rsmq group delete {topic} lake" in told
    store.client.hset(store.keys.group(topic, "billing"), "distribution", "hash")
    with pytest.raises(ConfigError, match="belongs to workers"):
        queries(subscribe=topic, startingOffsets="earliest", group="billing").batch()
    store.client.xgroup_create(store.keys.stream(topic, 1), "other", "0", mkstream=True)
    store.client.xgroup_createconsumer(store.keys.stream(topic, 1), "other", "c")
    with pytest.raises(ConfigError, match="belongs to other consumers"):
        queries(subscribe=topic, startingOffsets="earliest", group="other").batch()


def test_a_query_whose_group_was_deleted_makes_it_again(queries: Any, store: Store, topic: str) -> None:
    """It runs: giving it up is for a query that does not."""
    store.make(topic)
    add(store, topic, 0, 1, 2)
    query = queries(subscribe=topic, startingOffsets="earliest", group="lake")
    query.batch()
    store.client.xgroup_destroy(store.keys.stream(topic, 0), "lake")
    query.reader.commit(json.loads(query.offset))
    (group,) = store.client.xinfo_groups(store.keys.stream(topic, 0))
    assert group["last-delivered-id"].decode() == store.entries(topic, 0)[-1][0]


def test_a_query_with_a_name_leaves_a_deleted_topic_alone(queries: Any, store: Store, topic: str) -> None:
    """Its streams are not made again, and the other topics go on."""
    for name in (topic, f"{topic}x"):
        store.make(name, 1)
        add(store, name, 0, 1)
    query = queries(subscribePattern=f"{topic}x?", startingOffsets="earliest", group="lake")
    assert query.batch() == ["1", "1"]
    store.client.srem(store.keys.topics, topic)
    store.client.delete(store.keys.topic(topic), store.keys.stream(topic, 0), store.keys.group(topic, "lake"))
    query.reader.commit(json.loads(query.offset))
    add(store, f"{topic}x", 0, 2)
    assert query.batch() == ["2"]
    query.reader.commit(json.loads(query.offset))
    assert not store.client.exists(store.keys.stream(topic, 0), store.keys.group(topic, "lake"))
    (group,) = store.client.xinfo_groups(store.keys.stream(f"{topic}x", 0))
    assert group["lag"] == 0
