"""Decodes the bytes of a message into the type that its handler's annotation names. Decoders are built once.

For any bytes a decoder returns a value or raises `Malformed`, in time linear in their length: the JSON parser refuses
deep nesting, endless numbers, NaN and broken UTF-8. Error texts name fields, never values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from rsmq.errors import ConfigError, Malformed
from rsmq.model.interrupt import is_from_signal
from rsmq.model.json import decode_json

Decoder = Callable[[bytes], Any]

MOST_ERRORS: Final = 3
LONGEST_PART: Final = 60


def decoder_for(annotation: Any) -> Decoder:
    """The decoder for a payload with this annotation.

    bytes: the data; str: the data as UTF-8, of any content type; Any, dict, list (also of Any or of a type variable):
    plain JSON; everything else: JSON validated by pydantic. Raises ConfigError for a type that it cannot validate.
    """
    if annotation is bytes:
        return decode_bytes
    if annotation is str:
        return decode_text
    if annotation in (Any, object):
        return decode_json
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)[-1:]
    if kind in (dict, list) and all(part in (Any, object) or isinstance(part, TypeVar) for part in inner):
        if kind is list:
            return decode_list
        if get_args(annotation)[:1] in ((), (str,)):
            return decode_dict
    return _validated(annotation)


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


def _validated(annotation: Any) -> Decoder:
    """A decoder through pydantic. An incomplete model is refused here, not at its first message."""
    try:
        validate = TypeAdapter(annotation).validator.validate_json
    except Exception as error:  # pydantic raises its own errors, NameError, TypeError and ValueError here
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"a payload cannot become {annotation!r} ({first_line}): annotate it with a pydantic model, a dataclass, "
            f"a TypedDict, dict, str or bytes, defined before the handler"
        ) from None

    def decode(data: bytes) -> Any:
        try:
            try:
                return validate(data)
            except ValidationError as error:
                raise Malformed(explain(error)) from None
        except Malformed:
            raise
        except BaseException as error:  # a validator of the user raised: this message fails, not the worker
            if is_from_signal(error):
                raise
            raise Malformed(f"{type(error).__name__} in a validator") from error

    return decode


def explain(error: ValidationError) -> str:
    """A validation error as one line: fields and what they must be, without their values."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    shown = []
    for detail in details[:MOST_ERRORS]:
        where = ".".join(str(part)[:LONGEST_PART] for part in detail["loc"])
        text = " ".join(detail["msg"].split())[: 2 * LONGEST_PART]
        shown.append(f"{where}: {text}" if where else text)
    more = f" (and {len(details) - MOST_ERRORS} more)" if len(details) > MOST_ERRORS else ""
    return f"the payload does not fit {error.title}: {'; '.join(shown)}{more}"
