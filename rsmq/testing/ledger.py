"""The ledger of a run: what every process did, in one append-only file outside the server under test."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic_core import from_json, to_json

What = Literal["ready", "start", "commit", "bye"]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Event:
    """One handler call. `commit`: it has returned; `at`: the machine's monotonic clock; `pid`: its process."""

    what: What
    pid: int
    at: float
    topic: str = ""
    group: str = ""
    message_id: str = ""
    attempt: int = 0

    @classmethod
    def now(cls, what: What, **fields: Any) -> Self:
        """An event of this process, at this moment."""
        return cls(what, os.getpid(), time.monotonic(), **fields)


class LedgerWriter:
    """Appends records, which are dataclasses, to a ledger: one line of JSON each.

    A call is one write with O_APPEND, so the lines of several processes do not mix and their order is the real one. A
    process that is killed while it writes may leave half a line; the newline in front separates it from the next one.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def write(self, *records: object) -> None:
        """Append in one write. Raises OSError when the disk is full."""
        lines = b"".join([b"\n", *(to_json(record) + b"\n" for record in records)])
        if os.write(self._file, lines) != len(lines):
            raise OSError(f"only a part of {len(records)} records was written to the ledger: the disk is full")


class Ledger(Generic[R]):
    """Reads a ledger while other processes write it. `torn` has the half lines of processes that were killed."""

    def __init__(self, path: Path, record: type[R]) -> None:
        self.path = path
        self.path.touch()
        self.torn: list[bytes] = []
        self._record = record
        self._events: list[R] = []
        self._position = 0

    def read(self) -> list[R]:
        """The entries since the last call, in the order in which it was written."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        new = [record for line in lines if line and (record := self._parse(line)) is not None]
        self._events += new
        return new

    def _parse(self, line: bytes) -> R | None:
        """The record of a line; None for half a line."""
        try:
            return self._record(**from_json(line))
        except ValueError:
            self.torn.append(line)
            return None

    def events(self) -> list[R]:
        """Everything so far, in the order in which it was written. Do not change it."""
        self.read()
        return self._events
