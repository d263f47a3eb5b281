"""From the bytes of a message to what its handler's annotation asks for: one decoder a type, built once.

Whatever the bytes hold, a decoder returns a value or raises `Malformed`, in time linear in their length: the JSON
parser refuses deep nesting, endless numbers, NaN and broken UTF-8 by itself. Error texts name fields, never values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from rsmq.errors import ConfigError, Malformed
from rsmq.message import Message

Decoder = Callable[[Message], Any]

MOST_ERRORS: Final = 3
LONGEST_PART: Final = 60


def decoder_for(annotation: Any) -> Decoder:
    """The decoder for a payload annotated so.

    bytes: the data; str: the data as UTF-8, whatever its content type; dict, list (also of Any), Any: plain JSON;
    everything else: JSON validated by pydantic. Raises ConfigError for a type that JSON cannot become.
    """
    if annotation is bytes:
        return decode_bytes
    if annotation is str:
        return decode_text
    if annotation in (Any, object):
        return decode_json
    kind = get_origin(annotation) or annotation
    if kind in (dict, list) and all(_says_nothing(part) for part in get_args(annotation)[-1:]):
        if kind is list:
            return decode_list
        if get_args(annotation)[:1] in ((), (str,)):
            return decode_dict
    return _validated(annotation)


def decode_nothing(_message: Message) -> None:
    """For a handler that wants the message only."""


def decode_bytes(message: Message) -> bytes:
    """The data as it is."""
    return message.data


def decode_text(message: Message) -> str:
    """The data as UTF-8."""
    try:
        return message.data.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"the payload is not UTF-8 (byte {error.start})") from None


def decode_json(message: Message) -> Any:
    """Any JSON value."""
    try:
        return from_json(message.data, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the payload is not JSON: {error}") from None


def decode_dict(message: Message) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = from_json(message.data, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the payload is not JSON: {error}") from None
    if type(value) is not dict:
        raise Malformed(f"the payload is a JSON {type(value).__name__}, not an object")
    return value


def decode_list(message: Message) -> list[Any]:
    """A JSON array."""
    value = decode_json(message)
    if type(value) is not list:
        raise Malformed(f"the payload is a JSON {type(value).__name__}, not an array")
    return value


def _says_nothing(annotation: Any) -> bool:
    """Whether it allows every value (a bare type variable does, too)."""
    return annotation in (Any, object) or isinstance(annotation, TypeVar)


def _validated(annotation: Any) -> Decoder:
    """A decoder through pydantic. An incomplete model shows here, not at its first message."""
    try:
        validate = TypeAdapter(annotation).validator.validate_json
    except Exception as error:  # pydantic raises its own errors, NameError, TypeError and ValueError here
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"a payload cannot become {annotation!r} ({first_line}): annotate it with a pydantic model, a dataclass, "
            f"a TypedDict, dict, str or bytes, defined before the handler"
        ) from None

    def decode(message: Message) -> Any:
        try:
            return validate(message.data)
        except ValidationError as error:
            raise Malformed(explain(error)) from None
        except Exception as error:  # a validator of the user's own failed: one message at fault, not the worker
            raise Malformed(f"{type(error).__name__} in a validator") from None

    return decode


def explain(error: ValidationError) -> str:
    """A validation error as one line: fields and what they should be, without their values."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    shown = []
    for detail in details[:MOST_ERRORS]:
        where = ".".join(str(part)[:LONGEST_PART] for part in detail["loc"])
        text = " ".join(detail["msg"].split())[: 2 * LONGEST_PART]
        shown.append(f"{where}: {text}" if where else text)
    more = f" (and {len(details) - MOST_ERRORS} more)" if len(details) > MOST_ERRORS else ""
    return f"the payload does not fit {error.title}: {'; '.join(shown)}{more}"
