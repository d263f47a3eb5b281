"""The attempts of a message that failed and were followed by a retry, as the server keeps them. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rsmq.model.clock import LATEST_MS, epoch_ms, from_epoch_ms

PAST: Final = b"|past"
"""Behind a stream id: the field with the notes that came before the newest one."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed. One that did not count (`Retry(counts=False)`) has the number of the attempt before."""

    attempt: int
    at: datetime
    error: str

    @property
    def text(self) -> str:
        """For people."""
        return f"attempt {self.attempt} failed at {self.at}: {self.error}"


def failed_attempts(note: bytes | None, past: bytes | None) -> tuple[FailedAttempt, ...]:
    """From the two fields of the hash `errors`, oldest first. What cannot be read is left out."""
    notes = [*loaded(past), note.decode(errors="backslashreplace") if note else ""]
    return tuple(each for each in map(read_note, notes) if each is not None)


def read_note(note: object) -> FailedAttempt | None:
    """`attempts at_ms error`, as `park_message.lua` writes it."""
    attempt, _, rest = note.partition(" ") if isinstance(note, str) else ("", "", "")
    at_ms, _, error = rest.partition(" ")
    if not (is_number(attempt) and is_number(at_ms)):
        return None
    return FailedAttempt(int(attempt), from_epoch_ms(min(int(at_ms), LATEST_MS)), error)


def is_number(text: str) -> bool:
    """Whether it is a whole number of a sensible length."""
    return text.isascii() and text.isdecimal() and len(text) < 20


def to_field(attempts: Iterable[FailedAttempt]) -> str:
    """The field `dlq.history` of a dead letter."""
    return json.dumps([{"attempt": each.attempt, "at_ms": epoch_ms(each.at), "error": each.error} for each in attempts])


def from_field(raw: bytes | None) -> tuple[FailedAttempt, ...]:
    """The attempts in `dlq.history`. What cannot be read is left out: another client may have written it."""
    found = []
    for each in loaded(raw):
        if isinstance(each, dict):
            found.append(read_note(f"{each.get('attempt')} {each.get('at_ms')} {each.get('error', '')}"))
    return tuple(each for each in found if each is not None)


def loaded(raw: bytes | None) -> Sequence[Any]:
    """A list as JSON; empty for anything else."""
    try:
        found = json.loads((raw or b"[]").decode(errors="replace"))
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []
