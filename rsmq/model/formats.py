"""Payload types that write themselves: msgspec structs, Protobuf messages, Avro records. Their packages are never
imported here: a program with such a type has loaded its package.

A type has one format. Its content type says what was written, so a topic may have messages of two formats, and a reader
chooses the decoder by each message's `type`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args, get_origin

from rsmq.errors import ConfigError, Malformed, NotJson
from rsmq.model.interrupt import is_from_signal
from rsmq.model.nonfinite import nonfinite_in

Encoder = Callable[[Any], tuple[bytes, str]]
Decoder = Callable[[bytes], Any]

JSON: Final = "application/json"
MSGPACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
PROTOBUF: Final = ("application/x-protobuf", "application/protobuf")
LONGEST: Final = 300


@dataclass(frozen=True, slots=True)
class Format:
    """How values of one type become bytes. `json` reads what is JSON, `by_type` what has another content type.

    `convert` makes a value of what is published as text or bytes, where its package can. `written`: the content type
    that `encode` writes. `schema`: its JSON schema, and the definitions that it refers to by a template such as
    `#/components/schemas/{name}`, if its package knows that.
    """

    encode: Encoder
    json: Decoder
    written: str
    by_type: Mapping[str, Decoder] = field(default_factory=dict)
    schema: Callable[[str], tuple[dict[str, Any], dict[str, Any]]] | None = None
    convert: Callable[[Any], Any] | None = None


_FORMATS: Final = dict[type, Format]()
ENCODERS: Final = dict[type, Encoder]()
"""Of the types whose format was looked up. A type that is not here is pydantic's."""


def register(kind: type, given: Format) -> None:
    """A type has this format from now on."""
    _FORMATS[kind] = given
    ENCODERS[kind] = given.encode


def format_of(kind: Any) -> Format | None:
    """The format of a type; None for what pydantic validates.

    Also of a type that is made of structs of msgspec, such as `Order | None`, `Box[int]` or `list[Order]`.
    """
    if not isinstance(kind, type):
        msgspec: Any = sys.modules.get("msgspec")
        return of_struct(kind, msgspec) if msgspec is not None and has_struct(kind, msgspec) else None
    found = _FORMATS.get(kind)
    if found is None and (made := made_for(kind)) is not None:
        register(kind, made)
        return made
    return found


def made_for(kind: type) -> Format | None:
    """A format for a class of msgspec or Protobuf."""
    msgspec: Any = sys.modules.get("msgspec")
    if msgspec is not None and issubclass(kind, msgspec.Struct):
        return of_struct(kind, msgspec)
    if hasattr(kind, "DESCRIPTOR") and hasattr(kind, "FromString") and hasattr(kind, "SerializeToString"):
        return of_protobuf(kind)
    return None


# -- msgspec -----------------------------------------------------------------------------------------------------------


def of_struct(kind: Any, msgspec: Any) -> Format:
    """JSON is written, and MessagePack is read, too. Raises ConfigError for a type that msgspec cannot read."""
    try:
        decode_json, decode_msgpack = msgspec.json.Decoder(kind).decode, msgspec.msgpack.Decoder(kind).decode
    except (TypeError, RuntimeError) as error:
        raise ConfigError(f"msgspec cannot read {name_of(kind)}: {' '.join(str(error).split())[:LONGEST]}") from None
    from_json = decoding(kind, decode_json, (msgspec.DecodeError, UnicodeDecodeError))
    from_msgpack = decoding(kind, decode_msgpack, (msgspec.DecodeError, UnicodeDecodeError))

    def encode(value: Any) -> tuple[bytes, str]:
        return written_by_msgspec(value, name_of(kind), msgspec)

    def convert(value: Any) -> Any:
        return msgspec.convert(value, kind, builtin_types=(bytes,))

    def schema(template: str) -> tuple[dict[str, Any], dict[str, Any]]:
        (found,), shared = msgspec.json.schema_components((kind,), ref_template=template)
        return found, shared

    from_value = decoding(kind, convert, (msgspec.ValidationError,))
    return Format(encode, from_json, JSON, dict.fromkeys(MSGPACK, from_msgpack), schema, from_value)


def written_by_msgspec(value: Any, title: str, msgspec: Any) -> tuple[bytes, str]:
    """A value as JSON. Raises NotJson."""
    try:
        data: bytes = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        cause = None if isinstance(error, UnicodeError) else error  # which has the whole text
        raise NotJson("", f"a payload of type {title} cannot be written ({error})") from cause
    if b"null" in data and (where := nonfinite_in(msgspec.to_builtins(value), value)) is not None:
        raise NotJson(where)
    return data, JSON


def written_with_structs(payload: Any) -> tuple[bytes, str] | None:
    """A list, dict or tuple with structs in it, which only msgspec writes, as JSON; None for anything else. Raises
    NotJson."""
    msgspec: Any = sys.modules.get("msgspec")
    try:
        if msgspec is None or not holds_struct(payload, msgspec.Struct):
            return None
    except RecursionError:  # a circle
        return None
    return written_by_msgspec(payload, type(payload).__name__, msgspec)


def holds_struct(value: Any, struct: type) -> bool:
    """Whether a value is a struct, or a container has one."""
    if isinstance(value, Mapping):
        return any(holds_struct(each, struct) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(holds_struct(each, struct) for each in value)
    return isinstance(value, struct)


def has_struct(annotation: Any, msgspec: Any) -> bool:
    """Whether a struct is in an annotation."""
    parts = (get_origin(annotation), annotation, *get_args(annotation))
    return any(
        issubclass(part, msgspec.Struct)
        if isinstance(part, type)
        else part is not annotation and has_struct(part, msgspec)
        for part in parts
    )


def without_value(error: BaseException) -> str:
    """An error of msgspec without what it shows of the payload: the value of an enum or a tag, the name of a field, and
    what a `__post_init__` of the user says."""
    text, cause = str(error), error.__cause__
    if cause is not None:
        return f"{type(cause).__name__} in its own code{text.removeprefix(str(cause))}"
    return SHOWN.sub(r"\1\2", " ".join(text.split()))


SHOWN: Final = re.compile(
    r"^(Invalid (?:enum )?value|Object contains unknown field) .*?((?: - at (?:`\w+` in )?`\$[^`']*`)?)$", re.DOTALL
)


# -- Protobuf ----------------------------------------------------------------------------------------------------------


def of_protobuf(kind: Any) -> Format:
    """The binary form is written: the same message has the same bytes. The JSON form is read, too; unknown fields of a
    newer publisher are ignored, as in the binary form."""
    message: Any = sys.modules["google.protobuf.message"]
    errors = (message.DecodeError, ValueError, RecursionError)

    def encode(value: Any) -> tuple[bytes, str]:
        try:
            return value.SerializeToString(deterministic=True), PROTOBUF[0]
        except (message.EncodeError, ValueError) as error:
            problem = f"a payload of type {kind.__name__} cannot be written ({error})"
            raise NotJson("", problem, "set what its .proto file asks for") from None

    def parse(data: bytes) -> Any:
        from google.protobuf import json_format

        try:
            return json_format.Parse(data, kind(), ignore_unknown_fields=True, max_recursion_depth=100)
        except json_format.Error as error:
            where = ".".join(fields_of(str(error)))
            raise ValueError(f"its JSON cannot be read{where and f' at {where}'}") from None

    binary = decoding(kind, kind.FromString, errors)
    return Format(encode, decoding(kind, parse, errors), PROTOBUF[0], dict.fromkeys(PROTOBUF, binary))


def fields_of(text: str) -> list[str]:
    """The way to a field, at the beginning of an error of json_format. What follows shows the value."""
    ahead = re.match(r"(?:Failed to parse \w+ field: )*", text)
    return [] if ahead is None else re.findall(r"parse (\w+) field", ahead[0])


# -- all ---------------------------------------------------------------------------------------------------------------


def name_of(kind: Any) -> str:
    """A type, for an error."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def decoding(kind: Any, decode: Decoder, errors: tuple[type[BaseException], ...]) -> Decoder:
    """A decoder that raises Malformed for what its package refuses. The text names the type, and no value."""

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except errors as error:
            raise Malformed(f"the payload does not fit {name_of(kind)}: {without_value(error)[:LONGEST]}") from None
        except BaseException as error:  # of a `__post_init__` of the user
            if is_from_signal(error):
                raise
            raise Malformed(
                f"the payload does not fit {name_of(kind)}: {type(error).__name__} in its own code"
            ) from None

    return read
