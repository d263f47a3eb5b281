"""The ledger: what was published and what handlers did, in one append-only file outside the server under test."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

What = Literal["start", "commit", "ready", "bye"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `at` is the machine's monotonic clock in seconds, the same in every process; `pid` says who."""

    what: str
    pid: int
    at: float
    key: str = ""
    n: int = 0
    attempt: int = 0

    def line(self) -> bytes:
        """The event as it is stored."""
        return f"{self.what} {self.pid} {self.at:.6f} {self.key or '-'} {self.n} {self.attempt}\n".encode()

    @classmethod
    def read(cls, line: str) -> Self:
        """The inverse of `line`."""
        what, pid, at, key, n, attempt = line.split()
        return cls(what, int(pid), float(at), "" if key == "-" else key, int(n), int(attempt))


class Pen:
    """Writes a ledger. One write a line with O_APPEND: lines of several processes never mix, their order is real."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def note(self, what: What, key: str = "", n: int = 0, attempt: int = 0) -> None:
        """Add an event of this process."""
        os.write(self._file, Event(what, os.getpid(), time.monotonic(), key, n, attempt).line())


class Ledger:
    """Reads a ledger while others write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        self._events: list[Event] = []
        self._position = 0

    def events(self) -> list[Event]:
        """Everything so far, in the order in which it was written."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        if newline:
            self._position += len(whole) + 1
            self._events += [Event.read(line) for line in whole.decode().split("\n")]
        return self._events

    def commits(self) -> set[tuple[str, int]]:
        """The messages that some handler has finished."""
        return {(event.key, event.n) for event in self.events() if event.what == "commit"}

    def pids(self, what: What) -> set[int]:
        """The processes that noted something."""
        return {event.pid for event in self.events() if event.what == what}
