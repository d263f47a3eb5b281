"""The ledger: what was published and what handlers did, in one append-only file outside the server under test."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

What = Literal["start", "commit", "fail", "settle", "ready", "bye", "try", "ok", "refused"]
"""`try`, `ok`, `refused`: a publisher's. `fail`: a handler raised, or was cancelled. `settle`: the server took it."""


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
    """Writes a ledger. One write a call with O_APPEND: lines of several processes never mix, their order is real."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def note(self, what: What, key: str = "", n: int = 0, attempt: int = 0) -> None:
        """Add an event of this process."""
        self.note_all(what, [(key, n)], attempt)

    def note_all(self, what: What, names: Iterable[tuple[str, int]], attempt: int = 0) -> None:
        """Add one event for each of several messages, in one write."""
        pid, at = os.getpid(), time.monotonic()
        lines = b"".join(Event(what, pid, at, key, n, attempt).line() for key, n in names)
        # the line end in front sets it apart from what a process that was killed in its write has left
        if lines and os.write(self._file, b"\n" + lines) != len(lines) + 1:
            raise OSError("the ledger takes no more: the disk is full")


class Ledger:
    """Reads a ledger while others write it; what was asked often is kept, so that a long run stays cheap to watch.

    A process that was killed in its write leaves half a line: it had not begun what it wanted to note, or had not told
    anybody that it was done, so the line counts for nothing. Only the last line of a process can be one: when the same
    process goes on, the file is damaged, and reading it raises ValueError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        self._events: list[Event] = []
        self._commits: set[tuple[str, int]] = set()
        self._open: dict[tuple[str, int], int] = {}
        self._pids: dict[str, set[int]] = defaultdict(set)
        self._position = 0
        self.torn: list[str] = []

    def events(self) -> list[Event]:
        """Everything so far, in the order in which it was written."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        if newline:
            self._position += len(whole) + 1
            for line in whole.decode().split("\n"):
                if line:
                    self._read(line)
        return self._events

    def _read(self, line: str) -> None:
        try:
            event = Event.read(line)
        except ValueError:
            self.torn.append(line)
            return
        if any(each.split()[1:2] == [str(event.pid)] for each in self.torn):
            raise ValueError(f"the ledger is damaged: {self.torn} are torn, but process {event.pid} has gone on")
        self._add(event)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._pids[event.what].add(event.pid)
        name = (event.key, event.n)
        if event.what == "start":
            self._open[name] = event.pid
        elif event.what == "commit":
            self._commits.add(name)
            self._open.pop(name, None)

    def commits(self) -> set[tuple[str, int]]:
        """The messages that some handler has finished. Do not change it."""
        self.events()
        return self._commits

    def open_starts(self) -> dict[tuple[str, int], int]:
        """What was started and not finished: the message and by whom. Do not change it."""
        self.events()
        return self._open

    def pids(self, what: What) -> set[int]:
        """The processes that noted something."""
        self.events()
        return set(self._pids[what])
