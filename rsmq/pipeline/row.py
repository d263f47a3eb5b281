"""Rows of a DataFrame as messages: which columns a write understands, and the fields of the entry a row becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from rsmq.errors import ConfigError
from rsmq.message import KNOWN_FIELDS, unpack_fields, write_headers
from rsmq.pipeline.array import binaries
from rsmq.pipeline.column import PACKED
from rsmq.script import Value

DIGITS: Final = 20
DASH: Final = binaries([b"-"], pa.string())[0]
NUMBERS: Final = (ByteType, ShortType, IntegerType, LongType)
EXPECTED: Final[dict[str, tuple[type[DataType], ...]]] = {
    "device": (StringType,),
    "value": (BinaryType, StringType),
    "key": (BinaryType, StringType),
    "id": (StringType,),
    "type": (StringType,),
    "topic": (StringType,),
    "partition": NUMBERS,
    "id_ms": NUMBERS,
    "id_seq": NUMBERS,
}


def check_columns(schema: StructType, needed: Iterable[str], why: str) -> None:
    """Raise ConfigError when the columns are not what a write understands."""
    kinds = {field.name: field.dataType for field in schema.fields}
    for name in ("value", *needed):
        if name not in kinds:
            because = "" if name == "value" else f" ({why})"
            raise ConfigError(
                f"the DataFrame has no column {name!r}{because}, it has {', '.join(kinds) or 'none'}: select it, as in "
                f'.selectExpr("to_json(struct(*)) AS value")'
            )
    for name, allowed in EXPECTED.items():
        if name in kinds and not isinstance(kinds[name], allowed):
            raise ConfigError(
                f"column {name!r} is {kinds[name].simpleString()}: it must be "
                f"{' or '.join(kind.typeName() for kind in allowed[-2:])}, so cast it"
            )
    if "headers" in kinds and not is_headers(kinds["headers"]):
        raise ConfigError(
            f"column 'headers' is {kinds['headers'].simpleString()}: it must be array<struct<key:string,value:binary>> "
            f"or map<string,string>"
        )


def is_headers(kind: DataType) -> bool:
    """Whether a column can hold headers."""
    text = (StringType, BinaryType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, text)
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    inner = kind.elementType
    return (
        inner.fieldNames() == ["key", "value"]
        and isinstance(inner["key"].dataType, StringType)
        and isinstance(inner["value"].dataType, text)
    )


def parts(batch: pa.RecordBatch, column: str) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """The batch by the values of one column, rows in order. A column that is not there is null everywhere."""
    if column not in batch.schema.names:
        yield None, batch
        return
    array = batch.column(column)
    values = array.unique()
    if len(values) == 1:
        yield values[0].as_py(), batch
        return
    for value in values:  # scalars of Arrow, see `array`
        chosen = pc.equal(array, value) if value.is_valid else pc.is_null(array)
        yield value.as_py(), batch.filter(chosen)


def texts(batch: pa.RecordBatch, column: str) -> list[Any] | None:
    """A column of text or bytes, as bytes or None; None instead of it if there is none, or nothing in it."""
    if column not in batch.schema.names:
        return None
    array = batch.column(column)
    return None if array.null_count == len(array) else array.cast(pa.binary()).to_pylist()


def numbers(batch: pa.RecordBatch, column: str) -> list[int]:
    """A column of numbers. Raises ConfigError for a null."""
    found: list[int] = whole(batch, column).to_pylist()
    return found


def whole(batch: pa.RecordBatch, column: str) -> pa.Array:
    """A column. Raises ConfigError for a null: it says nothing about where the row comes from."""
    array = batch.column(column)
    if array.null_count:
        raise ConfigError(f"column {column!r} is null in a row: fill it, or filter such rows")
    return array


def positions(batch: pa.RecordBatch) -> pa.Array:
    """`id_ms` and `id_seq` of each row as text of fixed width, which compares as they do. Raises ConfigError."""
    numbers_of = (whole(batch, name).cast(pa.string()) for name in ("id_ms", "id_seq"))
    return pc.binary_join_element_wise(*(pc.utf8_lpad(each, DIGITS, "0") for each in numbers_of), DASH)


def entries_of(batch: pa.RecordBatch, keys: list[Any] | None, ids: list[Any] | None) -> list[Sequence[Value]]:
    """Each row as the fields of an entry, their number in front. Raises ConfigError for a row that is no message."""
    values, types, headers = texts(batch, "value"), texts(batch, "type"), headers_of(batch)
    is_plain = types is None and headers is None and values is not None
    if is_plain and not any(column and None in column for column in (values, keys, ids)):
        return plain_entries(values or [], keys, ids)
    nothing = [None] * batch.num_rows
    columns = (each or nothing for each in (values, ids, keys, types, headers))
    return [entry(*row) for row in zip(*columns, strict=True)]


def plain_entries(values: list[Any], keys: list[Any] | None, ids: list[Any] | None) -> list[Sequence[Value]]:
    """The same where a column is in every row or in none: one layout for all, by far the most frequent."""
    if ids is None and keys is None:
        return [(2, b"data", value) for value in values]
    if ids is None:
        return [(4, b"data", value, b"key", key) for value, key in zip(values, keys or (), strict=True)]
    if keys is None:
        return [(4, b"data", value, b"id", each) for value, each in zip(values, ids, strict=True)]
    return [(6, b"data", value, b"id", each, b"key", key) for value, each, key in zip(values, ids, keys, strict=True)]


def headers_of(batch: pa.RecordBatch) -> list[Any] | None:
    """The headers of each row; None if no row has any."""
    if "headers" not in batch.schema.names:
        return None
    array = batch.column("headers")
    return None if array.null_count == len(array) else array.to_pylist()


def entry(
    value: bytes | None,
    message_id: bytes | None,
    key: bytes | None,
    content_type: bytes | None,
    headers: Iterable[Any] | Mapping[str, Any] | None,
) -> Sequence[Value]:
    """One row as the fields of an entry, their number in front."""
    fields: list[Value] = [b"data", value or b""]
    if message_id is not None:
        fields += (b"id", message_id)
    if key is not None:
        fields += (b"key", key)
    if content_type is not None and content_type != b"application/json":
        fields += (b"type", content_type)
    packed = next((each for name, each in pairs(headers or ()) if name == PACKED), None)
    if packed is not None:
        return (len(fields := list(unpack_fields(packed))), *fields)
    fields += header_fields(headers or ())
    if value is None:
        raise ConfigError(f"the value of the row with key {key!r} is null: a message has a value, so filter such rows")
    return (len(fields), *fields)


def header_fields(headers: Iterable[Any] | Mapping[str, Any]) -> list[Value]:
    """Headers as fields: one JSON object, and a field each for what JSON cannot hold (it is shown as a header, too)."""
    text, own = dict[str, str](), dict[bytes, bytes]()
    for name, value in pairs(headers):
        if name in text or name.encode() in own:
            raise ConfigError(f"the header {name!r} occurs twice in a row: a message has each header once")
        try:
            text[name] = value.decode()
        except UnicodeDecodeError:
            if name.encode() in KNOWN_FIELDS:
                raise ConfigError(f"the header {name!r} is not UTF-8, and its name is that of a field") from None
            own[name.encode()] = value
    fields: list[Value] = [b"h", write_headers(text)] if text else []
    return fields + [part for pair in own.items() for part in pair]


def pairs(headers: Iterable[Any] | Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Headers as name and bytes, whatever kind of column they were in."""
    for each in headers:
        name, value = (each["key"], each["value"]) if isinstance(each, dict) else tuple(each)
        yield name or "", value.encode() if isinstance(value, str) else value or b""
