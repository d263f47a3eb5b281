"""The ledger of a chaos run: which handler began and ended what, in a file outside the server under test."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

What = Literal["ready", "start", "commit", "bye"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `commit`: the handler has returned; `at` is the machine's monotonic clock; `pid` says who."""

    what: What
    pid: int
    at: float
    topic: str = ""
    group: str = ""
    message_id: str = ""
    attempt: int = 0


class Pen:
    """Writes a ledger. One write a line with O_APPEND: lines of several processes never mix, their order is real.

    A process that is killed in its write may leave half a line: the newline in front keeps that to itself.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def note(self, what: What, topic: str = "", group: str = "", message_id: str = "", attempt: int = 0) -> None:
        """Add an event of this process."""
        event = Event(what, os.getpid(), time.monotonic(), topic, group, message_id, attempt)
        os.write(self._file, b"\n" + json.dumps(asdict(event)).encode() + b"\n")


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
            self._events += [event for line in whole.split(b"\n") if (event := read_event(line)) is not None]
        return self._events

    def commits(self) -> int:
        """How many runs of handlers have ended well."""
        return sum(1 for event in self.events() if event.what == "commit")

    def pids(self, what: What) -> set[int]:
        """The processes that noted something."""
        return {event.pid for event in self.events() if event.what == what}


def read_event(line: bytes) -> Event | None:
    """The event of a line; None for an empty one, or half of one: its writer was killed before it had said it."""
    if not line.endswith(b"}"):
        return None
    event: Event = Event(**json.loads(line))
    return event
