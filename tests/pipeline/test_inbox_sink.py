"""Writes to device inboxes: rows become letters, in order per device, and a task that runs again stores none twice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import rsmq.pipeline.format.inbox_sink
from rsmq.errors import ConfigError, TooLarge
from rsmq.model.keys import Keys
from rsmq.persistence import Devices, Letter
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.topic_sink import TaskResult
from rsmq.pipeline.format.writer import check_results, write_rows
from rsmq.redis.client.connector import Client

Rows = dict[str, Any]
Write = Callable[..., TaskResult]
MARKED = {"idempotence": "marker", "jobId": "spring"}


@pytest.fixture
def write(connection: dict[str, str]) -> Write:
    """`write({"device": [...], "value": [...]}, ...)`: one task, without Spark; each dict of columns is a batch."""

    def task(*batches: Rows, **options: object) -> TaskResult:
        given = {**connection, "target": "inbox", **{name: str(value) for name, value in options.items()}}
        return write_rows(write_options(given), (pa.RecordBatch.from_pydict(each) for each in batches))

    return task


@pytest.fixture
def inbox(client: Client, keys: Keys) -> Callable[[str], Any]:
    """`await inbox("device")`: its letters."""

    async def peek(device: str) -> list[Letter]:
        return await Devices(client, keys).peek(device, count=1000)

    return peek


async def test_a_row_becomes_a_letter(write: Write, inbox: Callable[[str], Any]) -> None:
    """Each column of a row reaches the device, with any device id; `expires` counts from `timestamp`."""
    moment = datetime.now(UTC).replace(microsecond=0)
    done = write(
        {
            "device": ["d{1}", "ü"], "value": [b'{"n": 1}', b"\xff"], "topic": ["offers", None],
            "type": [None, "application/octet-stream"], "headers": [[{"key": "a", "value": b"b"}], None],
            "timestamp": [moment, None],
        },
        expires="PT1H",
    )  # fmt: skip
    assert (done.stored, done.skipped) == (2, 0)
    (first,), (second,) = await inbox("d{1}"), await inbox("ü")
    assert (first.payload, first.topic, first.headers) == ({"n": 1}, "offers", {"a": "b"})
    assert first.timestamp == moment
    assert (first.expires - first.timestamp).total_seconds() == 3600
    assert (second.payload, second.topic, second.headers) == (b"\xff", "", {})


async def test_letters_stay_in_order(
    write: Write, inbox: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the calls are cut, within a batch and over batches; the option `topic` says what all are about."""
    monkeypatch.setattr(rsmq.pipeline.format.inbox_sink, "MAX_LETTERS", 3)
    rows: Rows = {"device": [f"d{number % 2}" for number in range(20)], "value": [str(number) for number in range(20)]}
    write(rows, {"device": ["d0", "d0"], "value": ["20", "22"]}, topic="a topic")
    letters = await inbox("d0")
    assert [letter.payload for letter in letters] == list(range(0, 23, 2))
    assert {letter.topic for letter in letters} == {"a topic"}


async def test_marker_stores_each_letter_once(write: Write, inbox: Callable[[str], Any]) -> None:
    """The same job again, as a whole or from its middle; another job is another matter."""
    rows = {"device": ["a", "a", "b"], "value": ["1", "2", "3"], "id_ms": [1, 2, 1], "id_seq": [0, 0, 0]}
    assert write(rows, **MARKED).stored == 3
    again = write(rows, {"device": ["b"], "value": ["4"], "id_ms": [2], "id_seq": [0]}, **MARKED)
    assert (again.stored, again.skipped) == (1, 3)
    assert [letter.payload for letter in await inbox("b")] == [3, 4]
    write(rows, **{**MARKED, "jobId": "summer"})
    assert [letter.payload for letter in await inbox("a")] == [1, 2, 1, 2]


async def test_marker_takes_devices_in_any_order(write: Write, inbox: Callable[[str], Any]) -> None:
    """Only the rows of one device have an order; with one row for each, all may have the same position."""
    devices = ["b", "a", "c", "\U0001f600", "d"]
    rows = {"device": devices, "value": [f'"{each}"' for each in devices], "id_ms": [1] * 5, "id_seq": [0] * 5}
    assert (write(rows, **MARKED).stored, write(rows, **MARKED).skipped) == (5, 5)
    mixed = {"device": ["b", "a", "b"], "value": ["1", "2", "3"], "id_ms": [2, 9, 3], "id_seq": [0, 0, 0]}
    assert write(mixed, {"device": ["a"], "value": ["4"], "id_ms": [9], "id_seq": [1]}, **MARKED).stored == 4
    assert [letter.payload for letter in await inbox("b")] == ["b", 1, 3]
    assert [letter.payload for letter in await inbox("a")] == ["a", 2, 4]


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([2, 1], "the rows of device 'a' are not in order .*sortWithinPartitions"),
        ([1, 1], "device 'a' has two rows with the same position .id_ms=1, id_seq=0.*row_number"),
        ([-2, -1], "column 'id_ms' is negative in a row"),
    ],
    ids=["falling", "twice", "negative"],
)
def test_marker_refuses_positions_that_do_not_rise(write: Write, positions: list[int], words: str) -> None:
    """A mark would hide the second row: the error names the device and says what to do, also over batches."""
    rows = {"device": ["a", "b", "a"], "value": ["1", "2", "3"], "id_ms": [positions[0], 5, positions[1]]}
    with pytest.raises(ConfigError, match=words):
        write(rows | {"id_seq": [0, 0, 0]}, **MARKED)
    first, second = ({"device": ["a"], "value": ["1"], "id_ms": [each], "id_seq": [0]} for each in positions)
    with pytest.raises(ConfigError, match=words):
        write(first, second, **{**MARKED, "jobId": "batches"})


def test_marker_refuses_a_device_in_two_tasks(write: Write) -> None:
    """Seen at the commit: the mark of one task may have hidden letters of the other."""
    tasks = [
        write({"device": names, "value": ["1", "2"], "id_ms": [ms] * 2, "id_seq": [0] * 2}, **MARKED)
        for ms, names in ((1, ["a", "b"]), (2, ["c", "d"]), (3, ["e", "b"]))
    ]
    check_results([*tasks[:2], None])
    with pytest.raises(ConfigError, match="all rows of a device in one task, but 1 came through several"):
        check_results(tasks)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"device": ["a", None], "value": ["1", "2"]}, "column 'device' is null in a row"),
        ({"device": ["a"], "value": pa.array([None], pa.string())}, "the value of a row is null"),
        ({"device": ["x" * 300], "value": ["1"]}, "has 300 bytes: use at most 256"),
        ({"device": ["a"], "value": ["1"], "headers": [[{"key": "a", "value": b"\xff"}]]}, "is not UTF-8"),
    ],
)
def test_rows_that_are_not_letters_are_refused(write: Write, rows: Rows, words: str) -> None:
    """An error that names the column."""
    with pytest.raises(ConfigError, match=words):
        write(rows)
    with pytest.raises(TooLarge):
        write({"device": ["a"], "value": [b"x" * 300_000]})


async def test_spark_sends_a_campaign(
    spark: SparkSession, connection: dict[str, str], inbox: Callable[[str], Any]
) -> None:
    """One letter for each of many devices, with real Spark; run twice, it is there once. Its Python workers have keys,
    so letters are encrypted."""
    audience = spark.range(300).selectExpr(
        "concat('phone-', id) AS device", "to_json(struct(id AS n)) AS value", "1 AS id_ms", "0 AS id_seq"
    )
    for _ in range(2):
        options = {**connection, "target": "inbox", "topic": "spring", "idempotence": "marker", "jobId": "spring"}
        audience.repartition(2, "device").write.format("rsmq").options(**options).mode("append").save()
    for number in (0, 7, 299):
        [letter] = await inbox(f"phone-{number}")
        assert letter.sealed == "encrypted (k1)"
