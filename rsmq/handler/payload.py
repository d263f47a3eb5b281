"""Decodes the bytes of a message into the type that its handler's annotation names. Decoders are built once.

For any bytes a decoder returns a value or raises `Malformed`, in time linear in their length: the JSON parser refuses
deep nesting, endless numbers, NaN and broken UTF-8. Error texts name fields, never values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic_core import from_json

from rsmq.errors import Malformed
from rsmq.model.formats import format_of
from rsmq.model.json import decode_json
from rsmq.model.message import BYTES, TEXT

Decoder = Callable[[bytes], Any]


def decoder_for(annotation: Any) -> Decoder:
    """The decoder for a payload with this annotation.

    bytes: the data; str: the data as UTF-8, of any content type; Any, dict, list (also of Any or of a type variable):
    plain JSON; a type with a format of its own (msgspec, Protobuf, Avro): its JSON; everything else: JSON validated by
    pydantic. Raises ConfigError for a type that it cannot validate. `formats_for` has the decoders of other content
    types.
    """
    if annotation is bytes:
        return decode_bytes
    if annotation is str:
        return decode_text
    if annotation in (Any, object):
        return decode_json
    if (own := format_of(annotation)) is not None:
        return own.json
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)[-1:]
    if kind in (dict, list) and all(part in (Any, object) or isinstance(part, TypeVar) for part in inner):
        if kind is list:
            return decode_list
        if get_args(annotation)[:1] in ((), (str,)):
            return decode_dict
    validated: Callable[[Any], Decoder] = import_module("rsmq.handler.validated").decoder_for
    return validated(annotation)


def formats_for(annotation: Any) -> Mapping[str, Decoder]:
    """The decoders for other content types than JSON; none for a type that is always read as JSON.

    What is published as text or bytes is no JSON: so a type such as `str | None` has decoders for these, too.
    """
    own = format_of(annotation)
    kinds = [] if annotation in (str, bytes, Any, object) else [*members(annotation)]
    found = dict[str, Decoder]() if own is None else dict(own.by_type)
    for kind, content_type, prepare in ((str, TEXT, decode_text), (bytes, BYTES, decode_bytes)):
        if not any(isinstance(each, type) and issubclass(each, kind) for each in kinds):
            continue
        if own is None:
            validated: Callable[..., Decoder] = import_module("rsmq.handler.validated").decoder_for
            found[content_type] = validated(annotation, prepare)
        elif own.convert is not None:
            found[content_type] = composed(own.convert, prepare)
    return found


def composed(convert: Callable[[Any], Any], prepare: Decoder) -> Decoder:
    """A decoder in two steps."""
    return lambda data: convert(prepare(data))


def members(annotation: Any) -> Iterator[Any]:
    """The types of which a payload of this type may be: those of a union, and of the values of a Literal."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from members(inner[0])
    elif origin in (Union, UnionType):
        for each in inner:
            yield from members(each)
    elif origin is Literal:
        yield from map(type, inner)
    else:
        yield annotation


def refusal_of(annotation: Any) -> str:
    """Why values of this type would not come back as they were published, with what to do; empty if they do."""
    kind = get_origin(annotation) or annotation
    if kind in (bytes, str, Any, object, int, float, bool, dict, list) and not get_args(annotation):
        return ""
    if format_of(annotation) is not None:
        return ""
    explained: Callable[[Any], str] = import_module("rsmq.handler.round_trip").explain_one_way
    return explained(annotation)


def decode_nothing(_data: bytes) -> None:
    """For a handler that takes only the message."""


def decode_bytes(data: bytes) -> bytes:
    """The data as it is."""
    return data


def decode_text(data: bytes) -> str:
    """The data as UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"the payload is not UTF-8 (byte {error.start})") from None


def decode_dict(data: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the payload is not JSON: {error}") from None
    if type(value) is not dict:
        raise Malformed(f"the payload is a JSON {type(value).__name__}, not an object")
    return value


def decode_list(data: bytes) -> list[Any]:
    """A JSON array."""
    value = decode_json(data)
    if type(value) is not list:
        raise Malformed(f"the payload is a JSON {type(value).__name__}, not an array")
    return value
