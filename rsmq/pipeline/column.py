"""Entries of a stream as columns: the schema that a reader shows, and one Arrow batch for one reply of the server.

`key` and `value` are the bytes of the message. With `includeHeaders` also the message's `headers`, its `id` and its
content `type`. Whatever else an entry holds (it is malformed, or meant for one group) travels whole in the header
`rsmq.packed`, so that a written copy is the same entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rsmq.errors import Malformed
from rsmq.message import KNOWN_FIELDS, pack_fields, read_headers
from rsmq.pipeline.array import binaries, lists, long, longs, repeated

PACKED: Final = "rsmq.packed"
LARGEST: Final = 2**63 - 1
FIRST_PART, SECOND_PART, THOUSAND = map(long, (0, 1, 1000))
LAST_MOMENT: Final = long(253_402_300_799_999)
"""The end of the year 9999, in ms: what comes after it no `datetime` holds."""

HEADER: Final = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
SCHEMA: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", StringType()),
        StructField("id_ms", LongType()),
        StructField("id_seq", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
WITH_HEADERS: Final = StructType(
    [
        *SCHEMA.fields,
        StructField("headers", ArrayType(HEADER)),
        StructField("id", StringType()),
        StructField("type", StringType()),
    ]
)

Entry = tuple[bytes, list[bytes]]
Header = tuple[str, bytes]


Rest = tuple[list[Header] | None, bytes | None, bytes | None]
"""Headers, message id and content type."""


class Split(NamedTuple):
    """Entries by part, a value an entry; None where no entry has any."""

    keys: Sequence[bytes | None] | None
    values: Sequence[bytes | None]
    headers: Sequence[list[Header] | None] | None = None
    ids: Sequence[bytes | None] | None = None
    types: Sequence[bytes | None] | None = None


class Columns:
    """Turns replies about one stream into batches, with the schema that Spark expects, type by type."""

    def __init__(self, topic: str, partition: int, *, include_headers: bool) -> None:
        self._topic, self._partition, self._include_headers = topic, partition, include_headers
        self._schema = to_arrow_schema(WITH_HEADERS if include_headers else SCHEMA, timezone="UTC")

    def batch(self, entries: list[Entry]) -> pa.RecordBatch:
        """One row an entry, in order."""
        count = len(entries)
        found = split_entries([fields for _, fields in entries], with_rest=self._include_headers)
        offsets = binaries([entry_id for entry_id, _ in entries], pa.string())
        ms, seq = numbers(offsets)
        columns = [
            present(found.keys, count, pa.binary()),
            binaries(found.values, pa.binary()),
            repeated(self._topic, count, pa.string()),
            repeated(self._partition, count, pa.int32()),
            offsets,
            ms,
            seq,
            moments(ms),
        ]
        if self._include_headers:
            columns += [
                headers_array(found.headers, count, self._schema.field("headers").type),
                present(found.ids, count, pa.string()),
                present(found.types, count, pa.string()),
            ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def split_entries(rows: Sequence[list[bytes]], *, with_rest: bool) -> Split:
    """Key, value and (if wanted) the rest of entries, given by their fields."""
    return split_plain(rows, with_rest=with_rest) or split_any(rows, with_rest=with_rest)


def split_plain(rows: Sequence[list[bytes]], *, with_rest: bool) -> Split | None:
    """The same by slices, where all entries have one layout of our own publisher's: data, id and perhaps key."""
    has_keys = len(rows[0]) == 6
    is_plain = (
        {*map(len, rows)} == {6 if has_keys else 4}
        and {fields[0] for fields in rows} == {b"data"}
        and {fields[2] for fields in rows} == {b"id"}
        and (not has_keys or {fields[4] for fields in rows} == {b"key"})
    )
    if not is_plain:
        return None
    values, keys = [fields[1] for fields in rows], [fields[5] for fields in rows] if has_keys else None
    if not with_rest:
        return Split(keys, values)
    ids = [fields[3] for fields in rows]
    return Split(keys, values, ids=ids) if b"".join(ids).isascii() else None


def split_any(rows: Sequence[list[bytes]], *, with_rest: bool) -> Split:
    """The same entry by entry, for whatever else a stream holds."""
    keys, values, rest = list[bytes | None](), list[bytes | None](), list[Rest]()
    for fields in rows:
        size = len(fields)
        is_plain = size in (4, 6) and fields[0] == b"data" and fields[2] == b"id"
        if is_plain and (size == 4 or fields[4] == b"key"):
            values.append(fields[1])
            keys.append(fields[5] if size == 6 else None)
            if with_rest:
                rest.append((None, fields[3], None) if fields[3].isascii() else read_rest(fields))
        else:
            found = dict(zip(fields[::2], fields[1::2], strict=True))
            values.append(found.get(b"data"))
            keys.append(found.get(b"key"))
            if with_rest:
                rest.append(read_rest(fields))
    return Split(keys, values, *zip(*rest, strict=True)) if with_rest else Split(keys, values)


def read_rest(fields: list[bytes]) -> Rest:
    """What is left of an entry besides key and value. Packed whole where columns cannot hold it faithfully."""
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    names = found.keys() - KNOWN_FIELDS
    try:
        message_id, content_type = text_of(found, b"id"), text_of(found, b"type")
        headers = {} if b"h" not in found else read_headers(found[b"h"])
        extra = {name.decode(): found[name] for name in sorted(names)}
    except (UnicodeDecodeError, Malformed):
        return [(PACKED, pack_fields(fields))], None, None
    listed = [(name, value.encode()) for name, value in headers.items()] + list(extra.items())
    is_faithful = (
        b"data" in found
        and b"group" not in found
        and len(found) * 2 == len(fields)
        and not headers.keys() & extra.keys()
        and PACKED not in headers.keys() | extra.keys()
    )
    if not is_faithful:
        listed.insert(0, (PACKED, pack_fields(fields)))
    return listed or None, message_id, content_type


def text_of(found: dict[bytes, bytes], name: bytes) -> bytes | None:
    """A field that is text, None if it is not there. Raises UnicodeDecodeError for one that is no text."""
    text = found.get(name)
    if text is not None:
        text.decode()
    return text


def present(values: Sequence[bytes | None] | None, count: int, kind: pa.DataType) -> pa.Array:
    """A column of bytes or text, or of as many nulls."""
    return pa.nulls(count, kind) if values is None else binaries(values, kind)


def headers_array(rows: Sequence[list[Header] | None] | None, count: int, kind: pa.DataType) -> pa.Array:
    """An array of lists of (key, value), null where a message has none."""
    if rows is None or not any(rows):
        return pa.nulls(count, kind)
    flat = [header for row in rows if row for header in row]
    struct = pa.StructArray.from_arrays(
        [binaries([key.encode() for key, _ in flat], pa.string()), binaries([value for _, value in flat], pa.binary())],
        fields=list(kind.value_type),
    )
    return lists([row or None for row in rows], struct, kind)


def numbers(offsets: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The two numbers of stream ids. A number that no bigint holds is cut off at the largest one."""
    parts = pc.split_pattern(offsets, "-")
    ms, seq = (pc.list_element(parts, index) for index in (FIRST_PART, SECOND_PART))
    try:
        return ms.cast(pa.int64()), seq.cast(pa.int64())
    except pa.ArrowInvalid:
        return cut_off(ms), cut_off(seq)


def cut_off(digits: pa.Array) -> pa.Array:
    """Text as bigint, at most the largest one."""
    return longs(min(int(text), LARGEST) for text in digits.to_pylist())


def moments(ms: pa.Array) -> pa.Array:
    """Milliseconds since 1970 as timestamps; what no timestamp holds becomes the last one."""
    return pc.multiply(pc.min_element_wise(ms, LAST_MOMENT), THOUSAND).cast(pa.timestamp("us", tz="UTC"))
