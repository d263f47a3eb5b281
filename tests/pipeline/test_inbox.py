"""Writes to device inboxes: rows become letters, in order per device, and a task that runs again stores none twice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import rsmq.pipeline.inbox
from rsmq.connect import Client
from rsmq.errors import ConfigError, TooLarge
from rsmq.keys import Keys
from rsmq.persistence import Devices, Letter
from rsmq.pipeline.option import write_options
from rsmq.pipeline.sink import Written
from rsmq.pipeline.writer import write_rows

Rows = dict[str, Any]
Write = Callable[..., Written]
MARKED = {"idempotence": "marker", "jobId": "spring"}


@pytest.fixture
def write(place: dict[str, str]) -> Write:
    """`write({"device": [...], "value": [...]}, ...)`: one task, without Spark; each dict of columns is a batch."""

    def task(*batches: Rows, **options: object) -> Written:
        given = {**place, "target": "inbox", **{name: str(value) for name, value in options.items()}}
        return write_rows(write_options(given), (pa.RecordBatch.from_pydict(each) for each in batches))

    return task


@pytest.fixture
def inbox(client: Client, keys: Keys) -> Callable[[str], Any]:
    """`await inbox("device")`: its letters."""

    async def peek(device: str) -> list[Letter]:
        return await Devices(client, keys).peek(device, count=1000)

    return peek


async def test_a_row_becomes_a_letter(write: Write, inbox: Callable[[str], Any]) -> None:
    """All that a row says reaches the device, whatever its id; `expiry` counts from `timestamp`."""
    moment = datetime.now(UTC).replace(microsecond=0)
    done = write(
        {
            "device": ["d{1}", "ü"], "value": [b'{"n": 1}', b"\xff"], "topic": ["offers", None],
            "type": [None, "application/octet-stream"], "headers": [[{"key": "a", "value": b"b"}], None],
            "timestamp": [moment, None],
        },
        expiry="PT1H",
    )  # fmt: skip
    assert (done.stored, done.skipped) == (2, 0)
    (first,), (second,) = await inbox("d{1}"), await inbox("ü")
    assert (first.payload, first.topic, first.headers) == ({"n": 1}, "offers", {"a": "b"})
    assert first.timestamp == moment
    assert (first.expires_at - first.timestamp).total_seconds() == 3600
    assert (second.payload, second.topic, second.headers) == (b"\xff", "", {})


async def test_letters_stay_in_order(
    write: Write, inbox: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the calls are cut, within a batch and over batches; the option `topic` says what all are about."""
    monkeypatch.setattr(rsmq.pipeline.inbox, "MOST_LETTERS", 3)
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


@pytest.mark.parametrize(
    "rows",
    [
        {"device": ["b", "a"], "value": ["1", "2"], "id_ms": [1, 1], "id_seq": [0, 0]},
        {"device": ["a", "a"], "value": ["1", "2"], "id_ms": [2, 1], "id_seq": [0, 0]},
        {"device": ["a", "a"], "value": ["1", "2"], "id_ms": [1, 1], "id_seq": [0, 0]},
    ],
    ids=["devices", "positions", "twice"],
)
def test_marker_refuses_rows_out_of_order(write: Write, rows: Rows) -> None:
    """A mark would hide those that come late."""
    with pytest.raises(ConfigError, match="needs the rows of a device in one task and in order"):
        write(rows, **MARKED)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"device": ["a", None], "value": ["1", "2"]}, "column 'device' is null in a row"),
        ({"device": ["a"], "value": pa.array([None], pa.string())}, "the value of a row is null"),
        ({"device": ["x" * 300], "value": ["1"]}, "has 300 bytes: use at most 256"),
        ({"device": ["a"], "value": ["1"], "headers": [[{"key": "a", "value": b"\xff"}]]}, "is not UTF-8"),
    ],
)
def test_rows_that_are_no_letters(write: Write, rows: Rows, words: str) -> None:
    """An error that names the column."""
    with pytest.raises(ConfigError, match=words):
        write(rows)
    with pytest.raises(TooLarge):
        write({"device": ["a"], "value": [b"x" * 300_000]})


async def test_spark_sends_a_campaign(spark: SparkSession, place: dict[str, str], inbox: Callable[[str], Any]) -> None:
    """One letter for each of many devices, with real Spark; run twice, it is there once."""
    audience = spark.range(300).selectExpr(
        "concat('phone-', id) AS device", "to_json(struct(id AS n)) AS value", "1 AS id_ms", "0 AS id_seq"
    )
    for _ in range(2):
        ordered = audience.repartition(2, "device").sortWithinPartitions("device")
        options = {**place, "target": "inbox", "topic": "spring", "idempotence": "marker", "jobId": "spring"}
        ordered.write.format("rsmq").options(**options).mode("append").save()
    for number in (0, 7, 299):
        assert [letter.payload for letter in await inbox(f"phone-{number}")] == [{"n": number}]
