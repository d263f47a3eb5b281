"""Arrow arrays made from buffers.

`pa.array` and `pa.scalar` look for pandas when they are first called, and import it where it is installed: half a CPU
second in every Python worker of Spark, for nothing. These do not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa


def binaries(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """Bytes as a column of `kind`, binary or string; for a string they must be UTF-8."""
    if None in values:
        found = [value or b"" for value in values]
        return pa.Array.from_buffers(
            kind, len(values), [validity(values), starts(found), pa.py_buffer(b"".join(found))]
        )
    present: Any = values
    return pa.Array.from_buffers(kind, len(values), [None, starts(present), pa.py_buffer(b"".join(present))])


def longs(values: Iterable[int]) -> pa.Array:
    """Numbers as a column of bigint."""
    found = array("q", values)
    return pa.Array.from_buffers(pa.int64(), len(found), [None, pa.py_buffer(found)])


def lists(rows: Sequence[Sequence[Any] | None], items: pa.Array, kind: pa.DataType) -> pa.Array:
    """Items as lists, as many in a row as it has there; a row of none is null."""
    buffers = [validity(rows), starts([row or () for row in rows])]
    return pa.Array.from_buffers(kind, len(rows), buffers, children=[items])


def repeated(value: str | int, count: int, kind: pa.DataType) -> pa.Array:
    """One value in every row."""
    return pa.repeat(long(value).cast(kind) if isinstance(value, int) else binaries([value.encode()], kind)[0], count)


def long(value: int) -> pa.Scalar:
    """A number for a computation with columns."""
    return longs([value])[0]


def starts(rows: Iterable[Sequence[Any]]) -> pa.Buffer:
    """Where each row starts, and where the last one ends."""
    return pa.py_buffer(array("i", accumulate(map(len, rows), initial=0)))


def validity(values: Iterable[object]) -> pa.Buffer:
    """A bit for each value that is there, None or not."""
    flags = bytes(value is not None for value in values)
    return pa.Array.from_buffers(pa.int8(), len(flags), [None, pa.py_buffer(flags)]).cast(pa.bool_()).buffers()[1]
