"""The result of a message that its publisher wants to have: a field of its entry, and the value that is kept. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from rsmq.errors import ConfigError, Malformed
from rsmq.model.clock import to_ms
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.words import duration

KEEP_RESULT: Final = b"keep_result"
"""For how long the result of each group is kept, in ms."""
MOST_DIGITS: Final = 12


def result_fields(keep_result: Duration | None) -> tuple[str, ...]:
    """The fields of an entry for `keep_result` of a publish. Raises ConfigError."""
    if keep_result is None:
        return ()
    span = checked_duration("keep_result", keep_result)
    if not timedelta(milliseconds=1) <= span <= LONGEST_DELAY:
        raise ConfigError(
            f"keep_result={duration(span)} is not possible: use at least 1 ms and at most {duration(LONGEST_DELAY)}"
        )
    return (KEEP_RESULT.decode(), str(to_ms(span)))


def kept_ms(fields: Mapping[bytes, bytes]) -> int | None:
    """For how long the result of the message of these fields is kept, in ms. None: it is not. A field that has another
    form is a header of its publisher."""
    raw = fields.get(KEEP_RESULT, b"")
    is_number = raw.isdigit() and raw.isascii() and len(raw) <= MOST_DIGITS and raw[:1] != b"0"
    return int(raw) if is_number else None


@dataclass(frozen=True, slots=True)
class KeptResult:
    """A result as it is kept: `type` and `enc` of its data, or the `reason` and the `error` of a failure."""

    data: bytes = field(default=b"", repr=False)
    type: str = ""
    enc: str = ""
    reason: str = ""
    error: str = ""

    def write(self) -> bytes:
        """As one value: a line of JSON, and the data."""
        about = {"reason": self.reason, "error": self.error} if self.reason else {"type": self.type, "enc": self.enc}
        return json.dumps({name: each for name, each in about.items() if each}).encode() + b"\n" + self.data

    @classmethod
    def read(cls, raw: bytes) -> KeptResult:
        """The inverse. Raises Malformed for what another client has written."""
        head, _, data = raw.partition(b"\n")
        try:
            about = json.loads(head.decode(errors="backslashreplace"))
        except ValueError:
            about = None
        if not isinstance(about, dict) or not all(isinstance(each, str) for each in about.values()):
            raise Malformed("a kept result cannot be read: another client has written into its key")
        return cls(data, *[about.get(name, "") for name in ("type", "enc", "reason", "error")])


def result_binding(group: str, message_id: str) -> str:
    """What an encrypted result is bound to, in the place of a message id: it has a subkey of its own."""
    return f"result:{group}:{message_id}"


def step_binding(group: str, message_id: str, name: str) -> str:
    """The same of a step. `message_id`: empty for a message without an id of its own, whose replay has another one."""
    return f"step:{group}:{message_id}:{name}"
