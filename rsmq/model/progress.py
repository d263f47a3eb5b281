"""How far the handler of a message has come, as it has said itself. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import datetime

from pydantic_core import PydanticSerializationError, to_json

from rsmq.errors import ConfigError
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.record import whole

LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class MessageProgress:
    """`done`: a part of 1; `text`: what the handler does; `at`: when it said so, by the clock of its machine. `batch`:
    the id of the batch of the message, or empty."""

    done: float
    text: str = field(repr=False)
    at: datetime
    batch: str = ""

    def __str__(self) -> str:
        return f"{self.done:.0%} done{f', {self.text}' if self.text else ''}"


def write_progress(done: float, text: str, at_ms: int, batch: str) -> bytes:
    """The value of its record. Raises ConfigError."""
    if isinstance(done, bool) or not isinstance(done, int | float) or not 0 <= done <= 1:
        raise ConfigError(f"message.progress({done!r}) is not possible: give a part of 1, such as 0.4")
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise ConfigError(f"the text of message.progress is no text of at most {LONGEST_TEXT} characters: shorten it")
    about = {"done": done, "text": text, "at_ms": at_ms}
    try:
        return to_json(about | {"batch": batch} if batch else about)
    except PydanticSerializationError:
        raise ConfigError("the text of message.progress is not valid Unicode: it has a lone surrogate") from None


def read_progress(raw: bytes | None) -> MessageProgress | None:
    """The inverse. None for what no handler has written."""
    try:
        about = json.loads((raw or b"").decode(errors="backslashreplace"))
        done, text, batch = float(about["done"]), str(about["text"]), str(about.get("batch", ""))
        at_ms = whole(str(about["at_ms"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    if at_ms is None or not math.isfinite(done) or not 0 <= done <= 1:
        return None
    return MessageProgress(done, text[:LONGEST_TEXT], from_epoch_ms(min(at_ms, LATEST_MS)), batch[:LONGEST_TEXT])
