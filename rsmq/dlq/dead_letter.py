"""A dead letter: the original fields of a message, and why it was buried."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from rsmq.errors import ConfigError, Malformed, MessageError
from rsmq.model.body import check_ref, is_outside
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.encoding import ENC, Encoding, binding_of, why_sealed
from rsmq.model.failed_attempt import FailedAttempt, from_field
from rsmq.model.message import read_headers
from rsmq.model.packing import readable_fields

PREFIX = b"dlq."
PACKED = b"dlq.packed"
LETTER_ID = re.compile(r"(\d+)/(\d+(?:-\d+)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter, as far as it can be read: an unreadable message becomes one, too.

    `id` is `partition/stream id`, unique within a group; `fields` are the original ones, in order, duplicates included.
    `traceback` has the last calls of the handler before its error, and is empty if there were none. `history` has the
    failed attempts before the last one, oldest first, at most ten. `sealed`: why `data` is still as it is stored, such
    as `encrypted (k7)`; empty where it is what was published.
    """

    id: str
    topic: str
    partition: int
    group: str
    reason: str
    error: str
    attempts: int
    origin: str
    at: datetime
    member: str
    data: bytes | None = field(repr=False)
    key: str | None
    message_id: str
    headers: dict[str, str] = field(repr=False)
    fields: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    traceback: str = ""
    history: tuple[FailedAttempt, ...] = ()
    sealed: str = ""


def opened(letter: DeadLetter, encoding: Encoding, body: bytes | None = None) -> DeadLetter:
    """The dead letter with the payload that was published, if that can be undone. `body`: what its store has."""
    named = dict(reversed(letter.fields))
    enc = named.get(ENC)
    if enc is None or letter.data is None:
        return letter
    try:
        if body is None and encoding.may_block and is_outside(enc):
            body = encoding.read(check_ref(named.get(b"ref"), letter.topic))
        return replace(letter, data=encoding.undo(letter.data, binding_of(named, body)))
    except MessageError as error:
        return replace(letter, sealed=why_sealed(error, enc.decode(errors="backslashreplace")))


async def opened_with_body(letter: DeadLetter, encoding: Encoding) -> DeadLetter:
    """A dead letter that was `opened`, also with a body that lies in the store of the encoding."""
    named = dict(reversed(letter.fields))
    enc = named.get(ENC, b"")
    if not letter.sealed or not is_outside(enc):
        return letter
    try:
        body = await encoding.fetch(check_ref(named.get(b"ref"), letter.topic))
    except MessageError as error:
        return replace(letter, sealed=why_sealed(error, enc.decode(errors="backslashreplace")))
    return opened(replace(letter, sealed=""), encoding, body)


def read_dead_letter(topic: str, partition: int, group: str, stream_id: bytes, entry: Sequence[bytes]) -> DeadLetter:
    """A dead letter from an entry of the dead-letter stream. Never fails: missing fields stay empty."""
    pairs = list(zip(entry[::2], entry[1::2], strict=False))
    notes = {name: value for name, value in pairs if name.startswith(PREFIX)}
    if PACKED in notes:
        flat = readable_fields(notes[PACKED])
        original = tuple(zip(flat[::2], flat[1::2], strict=False))
    else:
        original = tuple((name, value) for name, value in pairs if not name.startswith(PREFIX))
    first = dict(reversed(original))
    origin = notes.get(b"dlq.origin", b"")
    return DeadLetter(
        id=letter_id(partition, stream_id),
        topic=topic,
        partition=partition,
        group=group,
        reason=text(notes.get(b"dlq.reason")) or "",
        error=text(notes.get(b"dlq.error")) or "",
        attempts=number(notes.get(b"dlq.attempts"), 0),
        origin=text(origin) or "",
        at=from_epoch_ms(moment(notes.get(b"dlq.at_ms"), stream_id)),
        member=text(notes.get(b"dlq.member")) or "",
        data=first.get(b"data"),
        key=text(first.get(b"key")),
        message_id=text(first.get(b"id", origin)) or "",
        headers=headers(first.get(b"h")),
        fields=original,
        traceback=text(notes.get(b"dlq.traceback")) or "",
        history=from_field(notes.get(b"dlq.history")),
    )


def letter_id(partition: int, stream_id: bytes) -> str:
    """The id that users see: a stream id alone is unique only in its partition."""
    return f"{partition}/{stream_id.decode()}"


def split_id(letter: str) -> tuple[int, str]:
    """The inverse of `letter_id`. Raises ConfigError for anything else."""
    match = LETTER_ID.fullmatch(letter)
    if match is None:
        raise ConfigError(f"{letter!r} is not the id of a dead letter: write it as 3/1718000000000-0")
    return int(match[1]), match[2]


def text(raw: bytes | None) -> str | None:
    """Bytes as readable text; what is not UTF-8 is escaped."""
    return None if raw is None else raw.decode(errors="backslashreplace")


def number(raw: bytes | None, default: int) -> int:
    """A whole number, or the default for anything else."""
    return int(raw) if raw is not None and raw.isdigit() and len(raw) < 16 else default


def moment(raw: bytes | None, stream_id: bytes) -> int:
    """Milliseconds since 1970, at most the year 9999: as recorded, else from the stream id."""
    return min(number(raw, number(stream_id.partition(b"-")[0], 0)), LATEST_MS)


def headers(raw: bytes | None) -> dict[str, str]:
    """The headers if they can be read, otherwise none."""
    try:
        return {} if raw is None else read_headers(raw)
    except Malformed:
        return {}
