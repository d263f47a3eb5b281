"""Stream entries as Arrow columns: the schema of a read, and one Arrow batch for each reply of the server.

`key` and `value` are the bytes of the message. `includeHeaders` adds the message's `headers`, `id`, content `type`,
when it `expires` (ms since 1970) and `on_expiry`, the `unique` name that it was published under, the groups for which
it was `cancelled`, and its `band`, if the topic has bands. An entry that these columns cannot hold (malformed, meant
for one group, or compressed or encrypted) is packed whole into the header `rsmq.packed`, so that a written copy is the
same entry.

Arrow arrays are made from buffers here. `pa.array` and `pa.scalar` import pandas at their first call, where it is
installed: that costs half a CPU second in every Python worker of Spark.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema

from rsmq.errors import Malformed
from rsmq.model.clock import LATEST_MS
from rsmq.model.encoding import ENC
from rsmq.model.expiry import EXPIRES, ON_EXPIRY, expiry_of
from rsmq.model.expiry import FIELDS as EXPIRY_FIELDS
from rsmq.model.message import KNOWN_FIELDS, read_headers
from rsmq.model.packing import pack_fields

PACKED: Final = "rsmq.packed"
UNIQUE: Final = b"unique"
NOTHING: Final[Mapping[bytes, str]] = MappingProxyType({})
COLUMNS: Final = KNOWN_FIELDS - {ENC}
"""Fields that are no headers here. How a payload is encoded is shown as the header `enc`."""
MAX_BIGINT: Final = 2**63 - 1

HEADER: Final = T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
SCHEMA: Final = T.StructType(
    [
        T.StructField("key", T.BinaryType()),
        T.StructField("value", T.BinaryType()),
        T.StructField("topic", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("offset", T.StringType()),
        T.StructField("id_ms", T.LongType()),
        T.StructField("id_seq", T.LongType()),
        T.StructField("timestamp", T.TimestampType()),
    ]
)
WITH_HEADERS: Final = T.StructType(
    [
        *SCHEMA.fields,
        T.StructField("headers", T.ArrayType(HEADER)),
        T.StructField("id", T.StringType()),
        T.StructField("type", T.StringType()),
        T.StructField("expires", T.LongType()),
        T.StructField("on_expiry", T.StringType()),
        T.StructField("unique", T.StringType()),
        T.StructField("cancelled", T.StringType()),
        T.StructField("band", T.StringType()),
    ]
)
EXTRAS: Final = frozenset(WITH_HEADERS.names) - frozenset(SCHEMA.names)
PAYLOAD: Final = frozenset({"key", "value"})
IDS: Final = frozenset({"offset", "id_ms", "id_seq", "timestamp"})
ALL_GROUPS: Final = "*"
"""In column `cancelled`: cancelled for every group of the topic. Otherwise names of groups, with commas."""

StreamEntry = tuple[bytes, list[bytes]]
"""Stream id, and field names and values in turn."""
Header = tuple[str, bytes]


class Extras(NamedTuple):
    """What an entry has besides key and value. `expires` as it is stored: ms, or `+` and ms after its stream id."""

    headers: list[Header] | None = None
    id: bytes | None = None
    type: bytes | None = None
    expires: bytes | None = None
    on_expiry: bytes | None = None
    unique: bytes | None = None

    def __repr__(self) -> str:
        return f"<Extras of {self.id!r}>"


class SplitEntries(NamedTuple):
    """Entries by column, one value for each entry. None instead of a list: no entry has a value."""

    keys: Sequence[bytes | None] | None
    values: Sequence[bytes | None]
    headers: Sequence[list[Header] | None] | None = None
    ids: Sequence[bytes | None] | None = None
    types: Sequence[bytes | None] | None = None
    expires: Sequence[bytes | None] | None = None
    on_expiry: Sequence[bytes | None] | None = None
    unique: Sequence[bytes | None] | None = None

    def __repr__(self) -> str:
        return f"<SplitEntries of {len(self.values)} messages>"


class ColumnBuilder:
    """Turns the replies about one stream into batches with exactly the columns that were asked for, in their order.

    `cancelled`: stream id -> the groups for which that message was cancelled. `band`: that of the partition.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        columns: Sequence[str],
        cancelled: Mapping[bytes, str] = NOTHING,
        band: str | None = None,
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._cancelled = cancelled
        self._band = band
        fields = {field.name: field for field in WITH_HEADERS.fields}
        self._schema = to_arrow_schema(T.StructType([fields[name] for name in columns]), timezone="UTC")
        self._has_extras = not EXTRAS.isdisjoint(columns)
        self._has_ids = self._has_extras or not IDS.isdisjoint(columns)
        self._has_payload = self._has_extras or not PAYLOAD.isdisjoint(columns)

    def batch(self, entries: list[StreamEntry]) -> pa.RecordBatch:
        """One row for each entry, in order."""
        count = len(entries)
        made: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: text_column(self._topic, count),
            "partition": lambda: pa.repeat(int64_scalar(self._partition).cast(pa.int32()), count),
            "band": lambda: text_column(self._band, count),
        }
        if self._has_ids:
            entry_ids = [entry_id for entry_id, _ in entries]
            offsets = binary_array(entry_ids, pa.string())
            ms, seq = stream_id_numbers(offsets)
            made |= {
                "offset": lambda: offsets,
                "id_ms": lambda: ms,
                "id_seq": lambda: seq,
                "timestamp": lambda: timestamps(ms),
                "cancelled": lambda: self._cancelled_array(entry_ids),
            }
        if self._has_payload:
            split = split_entries([fields for _, fields in entries], with_extras=self._has_extras)
            made |= {
                "key": lambda: array_or_nulls(split.keys, count, pa.binary()),
                "value": lambda: binary_array(split.values, pa.binary()),
                "headers": lambda: headers_array(split.headers, count, self._schema.field("headers").type),
                "id": lambda: array_or_nulls(split.ids, count, pa.string()),
                "type": lambda: array_or_nulls(split.types, count, pa.string()),
                "expires": lambda: moments(split.expires, ms),
                "on_expiry": lambda: array_or_nulls(split.on_expiry, count, pa.string()),
                "unique": lambda: array_or_nulls(split.unique, count, pa.string()),
            }
        return pa.RecordBatch.from_arrays([made[name]() for name in self._schema.names], schema=self._schema)

    def _cancelled_array(self, entry_ids: Sequence[bytes]) -> pa.Array:
        groups = [self._cancelled.get(each) for each in entry_ids] if self._cancelled else None
        texts = None if groups is None else [None if each is None else each.encode() for each in groups]
        return array_or_nulls(texts, len(entry_ids), pa.string())


# -- entries by column ------------------------------------------------------------------------------------------------


def split_entries(rows: Sequence[list[bytes]], *, with_extras: bool) -> SplitEntries:
    """Split entries, given by their fields, into keys, values and, with `with_extras`, headers, ids and types."""
    return split_uniform(rows, with_extras=with_extras) or split_mixed(rows, with_extras=with_extras)


def split_uniform(rows: Sequence[list[bytes]], *, with_extras: bool) -> SplitEntries | None:
    """The fast way for entries that all have the layout of rsmq's producer: data, id and optionally key."""
    has_keys = len(rows[0]) == 6
    is_uniform = (
        {*map(len, rows)} == {6 if has_keys else 4}
        and {fields[0] for fields in rows} == {b"data"}
        and {fields[2] for fields in rows} == {b"id"}
        and (not has_keys or {fields[4] for fields in rows} == {b"key"})
    )
    if not is_uniform:
        return None
    values, keys = [fields[1] for fields in rows], [fields[5] for fields in rows] if has_keys else None
    if not with_extras:
        return SplitEntries(keys, values)
    ids = [fields[3] for fields in rows]
    return SplitEntries(keys, values, ids=ids) if b"".join(ids).isascii() else None


def split_mixed(rows: Sequence[list[bytes]], *, with_extras: bool) -> SplitEntries:
    """The general way, entry by entry."""
    keys, values, extras = list[bytes | None](), list[bytes | None](), list[Extras]()
    for fields in rows:
        size = len(fields)
        is_plain = size in (4, 6) and fields[0] == b"data" and fields[2] == b"id"
        if is_plain and (size == 4 or fields[4] == b"key"):
            values.append(fields[1])
            keys.append(fields[5] if size == 6 else None)
            if with_extras:
                extras.append(Extras(id=fields[3]) if fields[3].isascii() else read_extras(fields))
        else:
            by_name = dict(zip(fields[::2], fields[1::2], strict=True))
            values.append(by_name.get(b"data"))
            keys.append(by_name.get(b"key"))
            if with_extras:
                extras.append(read_extras(fields))
    return SplitEntries(keys, values, *zip(*extras, strict=True)) if with_extras else SplitEntries(keys, values)


def read_extras(fields: list[bytes]) -> Extras:
    """Everything in an entry besides key and value; packed whole where columns cannot hold it faithfully."""
    by_name = dict(zip(fields[::2], fields[1::2], strict=True))
    own: dict[bytes, bytes] = {name: by_name[name] for name in (b"id", b"type", UNIQUE) if name in by_name}
    if expiry_of(by_name, 0) is not None:  # in another form the two fields are headers
        own |= {name: by_name[name] for name in EXPIRY_FIELDS if name in by_name}
    try:
        for text in own.values():
            text.decode()
        headers = {} if b"h" not in by_name else read_headers(by_name[b"h"])
        others = {name.decode(): by_name[name] for name in sorted(by_name.keys() - COLUMNS - own.keys())}
    except (UnicodeDecodeError, Malformed):
        return Extras([(PACKED, pack_fields(fields))])
    listed = [(name, value.encode()) for name, value in headers.items()] + list(others.items())
    is_faithful = (
        b"data" in by_name
        and b"group" not in by_name
        and ENC not in by_name  # it is a field for every reader, and would be written as a header
        and len(by_name) * 2 == len(fields)
        and not headers.keys() & others.keys()
        and PACKED not in headers.keys() | others.keys()
    )
    if not is_faithful:
        listed.insert(0, (PACKED, pack_fields(fields)))
    return Extras(listed or None, *(own.get(name) for name in (b"id", b"type", EXPIRES, ON_EXPIRY, UNIQUE)))


# -- Arrow arrays -----------------------------------------------------------------------------------------------------


def array_or_nulls(values: Sequence[bytes | None] | None, count: int, kind: pa.DataType) -> pa.Array:
    """A column of bytes or text; all nulls if there are no values."""
    return pa.nulls(count, kind) if values is None else binary_array(values, kind)


def text_column(text: str | None, count: int) -> pa.Array:
    """A column with the same text, or null, in each row."""
    return (
        pa.nulls(count, pa.string())
        if text is None
        else pa.repeat(binary_array([text.encode()], pa.string())[0], count)
    )


def headers_array(rows: Sequence[list[Header] | None] | None, count: int, kind: pa.DataType) -> pa.Array:
    """An array of lists of (key, value), null where a message has no headers."""
    if rows is None or not any(rows):
        return pa.nulls(count, kind)
    flat = [header for row in rows if row for header in row]
    keys = binary_array([key.encode() for key, _ in flat], pa.string())
    values = binary_array([value for _, value in flat], pa.binary())
    structs = pa.StructArray.from_arrays([keys, values], fields=list(kind.value_type))
    buffers = [validity_buffer([row or None for row in rows]), offsets_buffer([row or () for row in rows])]
    return pa.Array.from_buffers(kind, len(rows), buffers, children=[structs])


def stream_id_numbers(offsets: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The two numbers of stream ids. A number above the largest bigint becomes the largest bigint."""
    parts = pc.split_pattern(offsets, "-")
    ms, seq = (pc.list_element(parts, int64_scalar(index)) for index in (0, 1))
    try:
        return ms.cast(pa.int64()), seq.cast(pa.int64())
    except pa.ArrowInvalid:
        ms, seq = (int64_array(min(int(text), MAX_BIGINT) for text in digits.to_pylist()) for digits in (ms, seq))
        return ms, seq


def timestamps(ms: pa.Array) -> pa.Array:
    """Milliseconds since 1970 as timestamps, at most the last moment that a `datetime` holds."""
    within = pc.min_element_wise(ms, int64_scalar(LATEST_MS))
    return pc.multiply(within, int64_scalar(1000)).cast(pa.timestamp("us", tz="UTC"))


def moments(values: Sequence[bytes | None] | None, stored: pa.Array) -> pa.Array:
    """When messages expire, in ms since 1970. `stored`: the ms of their stream ids."""
    if values is None or not any(values):
        return pa.nulls(len(stored), pa.int64())
    pairs = zip(values, stored.to_pylist(), strict=True)
    found = [None if each is None else expiry_of({EXPIRES: each}, ms) for each, ms in pairs]
    packed = pa.py_buffer(array("q", [min(each or 0, MAX_BIGINT) for each in found]))
    return pa.Array.from_buffers(pa.int64(), len(found), [validity_buffer(found), packed])


def binary_array(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """Bytes as a column of `kind`, binary or string; for a string they must be UTF-8."""
    validity, present = None, values
    if None in values:
        validity, present = validity_buffer(values), [value or b"" for value in values]
    data: Any = present
    buffers = [validity, offsets_buffer(data), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def int64_array(values: Iterable[int]) -> pa.Array:
    """Numbers as a column of bigint."""
    packed = array("q", values)
    return pa.Array.from_buffers(pa.int64(), len(packed), [None, pa.py_buffer(packed)])


def int64_scalar(value: int) -> pa.Scalar:
    """A number for a computation with columns."""
    return int64_array([value])[0]


def offsets_buffer(rows: Iterable[Sequence[Any]]) -> pa.Buffer:
    """Arrow's offsets: where each row begins, and where the last one ends."""
    return pa.py_buffer(array("i", accumulate(map(len, rows), initial=0)))


def validity_buffer(values: Iterable[object]) -> pa.Buffer:
    """Arrow's validity bitmap: one bit for each value, 0 for None."""
    flags = bytes(value is not None for value in values)
    return pa.Array.from_buffers(pa.int8(), len(flags), [None, pa.py_buffer(flags)]).cast(pa.bool_()).buffers()[1]
