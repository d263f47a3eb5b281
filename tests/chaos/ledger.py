"""The events of the chaos suite in a ledger of `rsmq.testing`, with an index that stays cheap over a long run."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rsmq.testing.ledger import Ledger, LedgerWriter

What = Literal["start", "commit", "fail", "settle", "ready", "bye", "try", "ok", "refused"]
"""`try`, `ok`, `refused`: a publisher's. `fail`: a handler raised. `settle`: the server accepted it."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `at` is the machine's monotonic clock in seconds, the same in every process; `pid`: the writer."""

    what: str
    pid: int
    at: float
    key: str = ""
    n: int = 0
    attempt: int = 0


class EventWriter(LedgerWriter):
    """Writes the events of this process."""

    def note(self, what: What, key: str = "", n: int = 0, attempt: int = 0) -> None:
        """Add one event."""
        self.note_all(what, [(key, n)], attempt)

    def note_all(self, what: What, names: Iterable[tuple[str, int]], attempt: int = 0) -> None:
        """Add one event for each of several messages, in one write."""
        pid, at = os.getpid(), time.monotonic()
        self.write(*(Event(what, pid, at, key, n, attempt) for key, n in names))


class EventLedger(Ledger[Event]):
    """Reads the events and keeps an index of them.

    A half line of a killed process counts for nothing: the process had not yet started what it was about to record, or
    had not reported it as done. Only the last line of a process can be torn. When the same process writes on, the file
    is damaged, and reading it raises ValueError.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, Event)
        self._commits: set[tuple[str, int]] = set()
        self._open: dict[tuple[str, int], int] = {}
        self._pids: dict[str, set[int]] = defaultdict(set)
        self._torn_pids: set[int] = set()

    def read(self) -> list[Event]:
        """The events since the last call."""
        new = super().read()
        for event in new:
            self._pids[event.what].add(event.pid)
            name = (event.key, event.n)
            if event.what == "start":
                self._open[name] = event.pid
            elif event.what == "commit":
                self._commits.add(name)
                self._open.pop(name, None)
        return new

    def _parse(self, line: bytes) -> Event | None:
        event = super()._parse(line)
        if event is None:
            self._torn_pids |= set(map(int, re.findall(rb'"pid":(\d+),', line)))
        elif event.pid in self._torn_pids:
            raise ValueError(f"the ledger is damaged: {self.torn} are torn, but process {event.pid} has written on")
        return event

    def commits(self) -> set[tuple[str, int]]:
        """The messages that some handler has finished. Do not change it."""
        self.read()
        return self._commits

    def open_starts(self) -> dict[tuple[str, int], int]:
        """The messages that were started and not finished, and by which process. Do not change it."""
        self.read()
        return self._open

    def pids(self, what: What) -> set[int]:
        """The processes that wrote events of a kind."""
        self.read()
        return set(self._pids[what])
