"""Whether a value comes back as it was published: a typed topic writes it, reads it and compares, before it is sent. No
I/O.

Types that cannot do so are refused when they are met (`round_trip.py`). This is for what only a value shows: a
validator that changes its own result, a subclass with more fields, text where a type has another form first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rsmq.errors import Malformed
from rsmq.handler.payload import decoder_for, formats_for
from rsmq.model.error_text import shown_path
from rsmq.model.formats import ENCODERS
from rsmq.model.message import BYTES_LIKE, encode_payload

Path = tuple[Any, ...]
Difference = tuple[Path, str]
"""Where two values differ, and in what."""

LISTS: Final = (list, tuple, deque)
UNTYPED: Final = (Any, object)
AS_THEY_ARE: Final[Mapping[Any, Any]] = {bytes: BYTES_LIKE, str: str}
"""What is stored as it is, and the types of it."""


def reader_back(annotation: Any) -> Callable[[Any], str] | None:
    """A function that says why a value does not come back as it is, empty if it does. None: any does, or none is
    promised to, as for Any."""
    if annotation in UNTYPED:
        return None
    if annotation in AS_THEY_ARE:
        return lambda value: "" if isinstance(value, AS_THEY_ARE[annotation]) else f"it {changed(value, annotation())}"
    decode, formats = decoder_for(annotation), formats_for(annotation)

    def problem_of(value: Any) -> str:
        data, kind = encode_payload(value)
        try:
            back = formats.get(kind, decode)(data)
        except Malformed as error:
            return str(error)
        found = difference(value, back)
        if found is None:
            return ""
        path, what = found
        return f"{shown_path(value, path) if path else 'it'} {what}"

    return problem_of


def difference(value: Any, back: Any, path: Path = ()) -> Difference | None:
    """The first difference between a value and what was read of it; None if they are equal."""
    if is_equal(value, back):
        return None
    if isinstance(value, float) and isinstance(back, float) and value != value and back != back:
        return None
    if isinstance(value, datetime) and isinstance(back, datetime) and is_one_moment(value, back):
        return None
    parts, others = parts_of(value, back), parts_of(back, value)
    if parts is None or others is None:
        return None if is_taken_as_equal(value, back) else (path, changed(value, back))
    for name in parts.keys() - others.keys():
        is_text = not isinstance(name, str) and isinstance(value, Mapping)
        lost = f"is a name of type {type(name).__name__}, and would be read as str" if is_text else LOST
        return (*path, name), lost
    for name in others.keys() - parts.keys():
        return (*path, name), "would be read, and was not published"
    found = (difference(each, others[name], (*path, name)) for name, each in parts.items())
    return next(filter(None, found), None)


def is_equal(value: Any, back: Any) -> bool:
    """Equality, also of values that cannot be compared."""
    try:
        return bool(value == back)
    except Exception:  # of an `__eq__` of the user
        return False


def is_one_moment(value: datetime, back: datetime) -> bool:
    """Two times of different zones are never equal in Python where one of them occurs twice."""
    return value.tzinfo is not None is not back.tzinfo and value.astimezone(UTC) == back.astimezone(UTC)


def parts_of(value: Any, other: Any) -> Mapping[Any, Any] | None:
    """The parts of a value by their names, if the other one is of the same class, or of one above or below it."""
    if not (isinstance(value, type(other)) or isinstance(other, type(value))):
        return None
    if isinstance(value, Mapping):
        return value
    if isinstance(value, LISTS):
        return dict(enumerate(value))
    struct_fields = getattr(type(value), "__struct_fields__", None)
    if struct_fields is not None:
        return {name: getattr(value, name) for name in struct_fields}
    model_fields = getattr(type(value), "__pydantic_fields__", None)
    if model_fields is not None or is_dataclass(value):
        names = model_fields if model_fields is not None else [each.name for each in fields(value)]
        extra = getattr(value, "__pydantic_extra__", None) or {}
        return {**{name: part for name in names if (part := getattr(value, name, MISSING)) is not MISSING}, **extra}
    return None


LOST: Final = "would be lost: the type that reads it has no such part"
MISSING: Final = object()
"""Of a field that has no value."""


def is_taken_as_equal(value: Any, back: Any) -> bool:
    """Of objects that `==` does not compare: any of one class. And what is written with the same bytes, such as NaN in
    Protobuf."""
    kind = type(value)
    if type(back) is not kind or isinstance(value, Iterator):
        return False
    is_compared = getattr(kind, "__eq__", None) is not getattr(object, "__eq__", None)
    return not is_compared or (kind in ENCODERS and encode_payload(value) == encode_payload(back))


def changed(value: Any, back: Any) -> str:
    """What becomes of a part. The text has no values, which may be secrets."""
    kind, other = type(value).__name__, type(back).__name__
    if kind == other:
        return f"would be read as another {kind}: a validator or a serializer of the type changes it"
    return f"is of type {kind}, and would be read as {other}"
