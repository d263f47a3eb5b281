"""Rows of a DataFrame as messages: checks the columns of a write, and turns each row into the fields of an entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T  # noqa: N812

from rsmq.errors import ConfigError
from rsmq.model.expiry import EXPIRES, ON_EXPIRY
from rsmq.model.message import KNOWN_FIELDS, LARGEST_HEADERS, write_headers
from rsmq.model.packing import unpack_fields
from rsmq.pipeline.format.columns import PACKED, UNIQUE, binary_array
from rsmq.redis.scripts import Value

DIGITS: Final = 20
DASH: Final = binary_array([b"-"], pa.string())[0]
NUMBERS: Final = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
HEADER_TYPES: Final = {
    kind.format(value)
    for kind in ("array<struct<key:string,value:{}>>", "map<string,{}>")
    for value in ("string", "binary")
}
EXPECTED: Final[dict[str, tuple[type[T.DataType], ...]]] = {
    "device": (T.StringType,),
    "value": (T.BinaryType, T.StringType),
    "key": (T.BinaryType, T.StringType),
    "id": (T.StringType,),
    "type": (T.StringType,),
    "expires": (*NUMBERS, T.TimestampType),
    "on_expiry": (T.StringType,),
    "band": (T.StringType,),
    "unique": (T.StringType,),
    "topic": (T.StringType,),
    "partition": NUMBERS,
    "id_ms": NUMBERS,
    "id_seq": NUMBERS,
}


def check_columns(schema: T.StructType, needed: Iterable[str], why: str) -> None:
    """Raise ConfigError if a needed column is missing or a column has the wrong type."""
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
    if "headers" in kinds and kinds["headers"].simpleString() not in HEADER_TYPES:
        raise ConfigError(
            f"column 'headers' is {kinds['headers'].simpleString()}: it must be array<struct<key:string,value:binary>> "
            f"or map<string,string>"
        )


def group_by_column(batch: pa.RecordBatch, column: str) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Split a batch by the values of one column, rows in order. A missing column counts as null everywhere."""
    if column not in batch.schema.names:
        yield None, batch
        return
    array = batch.column(column)
    values = array.unique()
    if len(values) == 1:
        yield values[0].as_py(), batch
        return
    for value in values:  # scalars of Arrow: converting one to Arrow again would load pandas
        chosen = pc.equal(array, value) if value.is_valid else pc.is_null(array)
        yield value.as_py(), batch.filter(chosen)


def bytes_column(batch: pa.RecordBatch, column: str) -> list[Any] | None:
    """A column of text or bytes as a list of bytes or None. None if the column is missing or all null."""
    if column not in batch.schema.names:
        return None
    array = batch.column(column)
    return None if array.null_count == len(array) else array.cast(pa.binary()).to_pylist()


def required_column(batch: pa.RecordBatch, column: str) -> pa.Array:
    """A column without nulls. Raises ConfigError for a null: such a row has no source position."""
    array = batch.column(column)
    if array.null_count:
        raise ConfigError(f"column {column!r} is null in a row: fill it, or filter such rows")
    return array


def source_positions(batch: pa.RecordBatch) -> pa.Array:
    """`id_ms` and `id_seq` of each row as text of fixed width, which sorts like the numbers. Raises ConfigError."""
    numbers = [required_column(batch, name) for name in ("id_ms", "id_seq")]
    for name, column in zip(("id_ms", "id_seq"), numbers, strict=True):
        if len(column) and pc.min(column).as_py() < 0:
            raise ConfigError(f"column {name!r} is negative in a row: source positions are numbers from 0 on")
    digits = (column.cast(pa.string()) for column in numbers)
    return pc.binary_join_element_wise(*(pc.utf8_lpad(each, DIGITS, "0") for each in digits), DASH)


def entries_from(batch: pa.RecordBatch, keys: list[Any] | None, ids: list[Any] | None) -> list[Sequence[Value]]:
    """Each row as the number of its fields and the fields. Raises ConfigError for a row that is not a message."""
    values, types, headers = bytes_column(batch, "value"), bytes_column(batch, "type"), headers_column(batch)
    expiries, deaths, names = expires_column(batch), bytes_column(batch, "on_expiry"), bytes_column(batch, "unique")
    others = (types, headers, expiries, deaths, names)
    is_uniform = values is not None and all(each is None for each in others)
    if is_uniform and not any(column and None in column for column in (values, keys, ids)):
        return uniform_entries(values or [], keys, ids)
    nothing = [None] * batch.num_rows
    columns = (nothing if each is None else each for each in (values, ids, keys, *others))
    return [entry_fields(*row) for row in zip(*columns, strict=True)]


def expires_column(batch: pa.RecordBatch) -> list[Any] | None:
    """When each row expires, in ms since 1970; None if no row does. Raises ConfigError for a time before 1970."""
    if "expires" not in batch.schema.names or batch.column("expires").null_count == batch.num_rows:
        return None
    column = batch.column("expires")
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz="UTC"), safe=False)
    found: list[int | None] = column.cast(pa.int64()).to_pylist()
    if any(each is not None and each < 0 for each in found):
        raise ConfigError("column 'expires' is negative in a row: it is a time, or milliseconds since 1970")
    return found


def uniform_entries(values: list[Any], keys: list[Any] | None, ids: list[Any] | None) -> list[Sequence[Value]]:
    """The fast way where each column is in every row or in none."""
    if ids is None and keys is None:
        return [(2, b"data", value) for value in values]
    if ids is None:
        return [(4, b"data", value, b"key", key) for value, key in zip(values, keys or (), strict=True)]
    if keys is None:
        return [(4, b"data", value, b"id", each) for value, each in zip(values, ids, strict=True)]
    return [(6, b"data", value, b"id", each, b"key", key) for value, each, key in zip(values, ids, keys, strict=True)]


def headers_column(batch: pa.RecordBatch) -> list[Any] | None:
    """The headers of each row; None if no row has any."""
    if "headers" not in batch.schema.names:
        return None
    array = batch.column("headers")
    return None if array.null_count == len(array) else array.to_pylist()


def entry_fields(
    value: bytes | None,
    message_id: bytes | None,
    key: bytes | None,
    content_type: bytes | None,
    headers: Iterable[Any] | Mapping[str, Any] | None,
    expires: int | None = None,
    on_expiry: bytes | None = None,
    unique: bytes | None = None,
) -> Sequence[Value]:
    """The number of fields of one row, and the fields."""
    fields: list[Value] = [] if unique is None else [UNIQUE, unique]
    fields += (b"data", value or b"")
    if message_id is not None:
        fields += (b"id", message_id)
    if key is not None:
        fields += (b"key", key)
    if content_type is not None and content_type != b"application/json":
        fields += (b"type", content_type)
    packed = next((each for name, each in header_pairs(headers or ()) if name == PACKED), None)
    if packed is not None:
        original = list(unpack_fields(packed))
        if expires is not None and EXPIRES in original[::2]:
            original[original[::2].index(EXPIRES) * 2 + 1] = str(expires).encode()
        return (len(original), *original)
    fields += header_fields(headers or ())
    if expires is not None:
        fields += (EXPIRES, str(expires))
    if on_expiry is not None:
        fields += (ON_EXPIRY, on_expiry)
    if value is None:
        raise ConfigError(f"the value of the row with key {key!r} is null: a message has a value, so filter such rows")
    return (len(fields), *fields)


def header_fields(headers: Iterable[Any] | Mapping[str, Any]) -> list[Value]:
    """Headers as fields: text headers in one JSON object, each binary header as a field of its own."""
    text, binary = dict[str, str](), dict[bytes, bytes]()
    for name, value in header_pairs(headers):
        if name in text or name.encode() in binary:
            raise ConfigError(f"the header {name!r} occurs twice in a row: a message has each header once")
        try:
            text[name] = value.decode()
        except UnicodeDecodeError:
            if name.encode() in KNOWN_FIELDS:
                raise ConfigError(f"the header {name!r} is not UTF-8, and its name is that of a field") from None
            binary[name.encode()] = value
    fields: list[Value] = [b"h", write_headers(text, LARGEST_HEADERS)] if text else []
    return fields + [part for pair in binary.items() for part in pair]


def header_pairs(headers: Iterable[Any] | Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Headers as name and bytes, from a column of structs or of maps."""
    for each in headers:
        name, value = (each["key"], each["value"]) if isinstance(each, dict) else tuple(each)
        yield name or "", value.encode() if isinstance(value, str) else value or b""
