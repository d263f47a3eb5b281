"""Decodes payloads through pydantic. It is loaded for the first handler whose payload has a type: importing pydantic
takes a quarter of the time of importing redis-py, and a process that publishes, or takes plain JSON, has no use for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rsmq.errors import ConfigError, Malformed
from rsmq.handler.failure import without_text
from rsmq.model.error_text import explain
from rsmq.model.interrupt import is_from_signal


def decoder_for(annotation: Any, prepare: Callable[[bytes], Any] | None = None) -> Callable[[bytes], Any]:
    """A decoder for what pydantic can validate. An incomplete model is refused here, not at its first message.
    `prepare` makes a value of the data, which is JSON without it."""
    try:
        adapter = TypeAdapter(annotation)
        validator = adapter.validator
        validate: Callable[[bytes], Any] = validator.validate_json
    except Exception as error:  # pydantic raises its own errors, NameError, TypeError and ValueError here
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"a payload cannot become {annotation!r} ({first_line}): annotate it with a pydantic model, a dataclass, "
            f"a TypedDict, dict, str or bytes, defined before the handler"
        ) from None

    if prepare is not None:

        def validate(data: bytes) -> Any:
            return validator.validate_python(prepare(data))

    def decode(data: bytes) -> Any:
        try:
            try:
                return validate(data)
            except ValidationError as error:
                raise Malformed(explain(error, lambda: adapter.core_schema)) from None
        except Malformed:
            raise
        except BaseException as error:  # a validator of the user raised: this message fails, not the worker
            if is_from_signal(error):
                raise
            raise Malformed(f"{type(error).__name__} in a validator") from without_text(error)

    return decode
