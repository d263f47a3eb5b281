"""Entries to columns and rows to entries: the copy of any entry is the same. No Spark is started."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json
from pyspark.sql.types import StructType

from rsmq.errors import ConfigError
from rsmq.model.message import Message, MessageOrigin, entry_fields
from rsmq.pipeline.format.columns import PACKED, WITH_HEADERS, ColumnBuilder, StreamEntry
from rsmq.pipeline.format.rows import bytes_column, check_columns, entries_from, group_by_column, header_fields

ORIGIN = MessageOrigin("orders", 3, "g")
NAMES = st.sampled_from([b"data", b"key", b"id", b"type", b"h", b"group", b"enc", b"x", b"\xff", b"rsmq.packed", b""])
FIELDS = st.lists(st.tuples(NAMES, st.binary(max_size=8)), min_size=1, max_size=5)
HEADERS = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)


def batch(*fields: list[bytes], ids: list[bytes] | None = None) -> pa.RecordBatch:
    """The columns, headers too, of entries with these fields."""
    entries: list[StreamEntry] = [
        (b"1718000000000-%d" % n if ids is None else ids[n], each) for n, each in enumerate(fields)
    ]
    return ColumnBuilder("orders", 3, WITH_HEADERS.names).batch(entries)


def copied(fields: list[bytes]) -> list[bytes]:
    """The fields of the entry that a copy of this one would be."""
    rows = batch(fields)
    (entry,) = entries_from(rows, bytes_column(rows, "key"), bytes_column(rows, "id"))
    count, *rest = entry
    assert count == len(rest)
    return [each.encode() if isinstance(each, str) else bytes(each) for each in rest]  # type: ignore[arg-type]


def seen(fields: list[bytes]) -> tuple[Any, ...]:
    """What a handler sees of an entry, or that it is malformed."""
    try:
        message = Message(ORIGIN, b"5-1", fields)
    except Exception as error:
        return type(error), str(error)
    about = message.data, message.routing_key, message.id, message.type, message.headers, message.addressee
    return (*about, None if message.is_plain else message.encoding)


def test_the_columns_of_an_entry() -> None:
    """Names and types as documented; `timestamp` is when the server stored it."""
    rows = batch(
        [b"data", b"\x00\xff", b"id", b"m1", b"key", "ключ".encode(), b"type", b"text/plain", b"h", b'{"a":"\xc3\xbc"}']
    )
    (row,) = rows.to_pylist()
    assert row | {"timestamp": str(row["timestamp"])} == {
        "key": "ключ".encode(), "value": b"\x00\xff", "topic": "orders", "partition": 3, "offset": "1718000000000-0",
        "id_ms": 1718000000000, "id_seq": 0, "timestamp": "2024-06-10 06:13:20+00:00",
        "headers": [{"key": "a", "value": "ü".encode()}], "id": "m1", "type": "text/plain",
        "expires": None, "on_expiry": None, "unique": None, "cancelled": None, "band": None,
    }  # fmt: skip


def test_missing_fields_are_null() -> None:
    """No key, no id, no type, no headers; an entry without data has no value."""
    rows = batch([b"data", b""], [b"x", b"y"]).to_pylist()
    assert [(row["key"], row["id"], row["type"], row["headers"]) for row in rows[:1]] == [(None, None, None, None)]
    assert [row["value"] for row in rows] == [b"", None]


PLAIN = [b"data", b"1", b"id", b"m1"]
KEYED = [*PLAIN, b"key", b"k"]


@pytest.mark.parametrize(
    "fields",
    [
        [PLAIN, PLAIN],
        [KEYED, KEYED],
        [PLAIN, KEYED],
        [KEYED, PLAIN],
        [PLAIN, [b"data", b"1", b"id", b"\xff"]],
        [PLAIN, [b"data", b"1", b"id", "ü".encode()]],
        [PLAIN, [b"x", b"1", b"id", b"m1"]],
        [PLAIN, [b"data", b"1", b"x", b"m1"]],
        [KEYED, [*PLAIN, b"x", b"k"]],
        [PLAIN, [b"data", b"1"]],
    ],
)
def test_a_batch_of_one_layout_is_as_its_entries(fields: list[list[bytes]]) -> None:
    """ColumnBuilder made by slices and columns made entry by entry are the same."""
    assert batch(*fields).to_pylist() == [
        batch(each, ids=[b"1718000000000-%d" % n]).to_pylist()[0] for n, each in enumerate(fields)
    ]


def test_ids_beyond_a_bigint_are_cut_off() -> None:
    """One absurd id does not spoil the others; the text stays exact."""
    rows = batch([b"data", b""], [b"data", b""], ids=[b"5-1", b"18446744073709551615-18446744073709551615"]).to_pylist()
    assert [row["offset"] for row in rows] == ["5-1", "18446744073709551615-18446744073709551615"]
    assert [(row["id_ms"], row["id_seq"]) for row in rows] == [(5, 1), (2**63 - 1, 2**63 - 1)]


@given(st.lists(st.tuples(st.binary(), st.text(min_size=1), st.one_of(st.none(), st.text()), HEADERS), min_size=1))
def test_messages_survive_the_round_trip(messages: list[tuple[bytes, str, str | None, dict[str, str]]]) -> None:
    """All bytes of data, key, id, type and headers of anything that rsmq publishes, in one batch."""
    raw = [
        [
            each if isinstance(each, bytes) else each.encode()
            for each in entry_fields(data, message_id, key, "a/b", headers)
        ]
        for data, message_id, key, headers in messages
    ]
    rows = batch(*raw)
    copies = entries_from(rows, bytes_column(rows, "key"), bytes_column(rows, "id"))
    for fields, copy in zip(raw, copies, strict=True):
        assert seen(list(copy)[1:]) == seen(fields)  # type: ignore[arg-type]


@given(FIELDS)
def test_any_entry_survives_the_round_trip(pairs: list[tuple[bytes, bytes]]) -> None:
    """Malformed, for one group only, twice the same field: a handler sees the same of the copy."""
    fields = [part for pair in pairs for part in pair]
    assert seen(copied(fields)) == seen(fields)


def test_what_columns_cannot_hold_is_packed() -> None:
    """Only then: packing doubles the size."""
    assert [header["key"] for header in batch([b"data", b"", b"group", b"g"]).to_pylist()[0]["headers"]] == [PACKED]
    assert [header["key"] for header in batch([b"data", b"", b"x", b"1"]).to_pylist()[0]["headers"]] == ["x"]


def test_a_copy_of_an_encrypted_entry_is_encrypted_in_the_same_way() -> None:
    """Its `enc` is the header of a row, and the field of the copy: without it the copy would be noise."""
    fields = [b"data", b"\x01" * 40, b"id", b"m1", b"key", b"k", b"enc", b"zstd;a256gcm=k1"]
    (row,) = batch(fields).to_pylist()
    assert {"key": "enc", "value": b"zstd;a256gcm=k1"} in row["headers"]
    assert copied(fields) == fields


def test_headers_that_are_no_text_are_fields_of_their_own() -> None:
    """JSON holds no bytes; readers show such a field as a header."""
    headers = [{"key": "a", "value": b"1"}, {"key": "b", "value": b"\xff"}]
    assert header_fields(headers) == [b"h", b'{"a":"1"}', b"b", b"\xff"]
    assert header_fields({"a": "1"}.items()) == [b"h", to_json({"a": "1"})]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([("a", b"1"), ("a", b"2")], "the header 'a' occurs twice"),
        ([("key", b"\xff")], "is not UTF-8, and its name is that of a field"),
    ],
)
def test_headers_that_no_message_can_have(headers: list[tuple[str, bytes]], words: str) -> None:
    """An error instead of a message that says something else."""
    with pytest.raises(ConfigError, match=words):
        header_fields(headers)


def test_a_null_value_is_no_message() -> None:
    """There are no tombstones here."""
    rows = pa.RecordBatch.from_pydict({"value": pa.array(["x", None]), "key": pa.array(["a", "b"])})
    with pytest.raises(ConfigError, match="the value of the row with key b'b' is null"):
        entries_from(rows, bytes_column(rows, "key"), None)


def test_a_batch_is_parted_in_order() -> None:
    """By the values of a column, null among them."""
    rows = pa.RecordBatch.from_pydict({"topic": ["b", "a", None, "b"], "n": [1, 2, 3, 4]})
    assert [(name, part["n"].to_pylist()) for name, part in group_by_column(rows, "topic")] == [
        ("b", [1, 4]),
        ("a", [2]),
        (None, [3]),
    ]
    assert [name for name, _ in group_by_column(rows, "other")] == [None]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("key string", "has no column 'value', it has key: select it"),
        ("value int", "column 'value' is int: it must be binary or string, so cast it"),
        ("value string, key int", "column 'key' is int"),
        ("value string, headers array<string>", "column 'headers' is array<string>: it must be"),
        ("value string, id_ms string", "column 'id_ms' is string: it must be integer or long"),
        ("value string", r"has no column 'id' \(idempotence=dedupe\)"),
    ],
)
def test_columns_that_cannot_be_written(columns: str, words: str) -> None:
    """Said by the driver, before a task starts."""
    names = dict(pair.split(" ", 1) for pair in columns.split(", "))
    kinds = {
        "string": "string",
        "int": "integer",
        "array<string>": {"type": "array", "elementType": "string", "containsNull": True},
    }
    schema = StructType.fromJson(
        {"fields": [{"name": n, "type": kinds[k], "nullable": True, "metadata": {}} for n, k in names.items()]}
    )
    with pytest.raises(ConfigError, match=words):
        check_columns(schema, ["id"] if columns == "value string" else [], "idempotence=dedupe")


def test_reading_does_not_load_pandas() -> None:
    """Where pandas is installed, a worker of Spark that only reads topics does not load it."""
    pytest.importorskip("pandas", reason="pandas is not installed: nothing can load it")
    code = (
        "import sys; from rsmq.pipeline.format.columns import WITH_HEADERS, ColumnBuilder; "
        "entry = [b'data', b'1', b'h', b'{\"a\": \"b\"}', b'key', b'k', b'trace', b'x']; "
        "entries = [(b'1-1', entry), (b'99999999999999999999-1', [b'x', b'y'])]; "
        "batch = ColumnBuilder('t', 0, WITH_HEADERS.names).batch(entries); "
        "print(batch.num_rows, 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "2 False\n"
