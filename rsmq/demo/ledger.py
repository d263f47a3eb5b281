"""The ledger: what was handled, written down outside the server that is under test.

One append-only file per process, one line per handled message, in one `write` before the handler returns: a killed
process loses none of the lines it has written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

VARIABLE: Final = "DEMO_LEDGER"
NO_CHANNEL: Final = "-"


@dataclass(frozen=True, slots=True)
class Entry:
    """One handled message. `at_ns` is the machine's monotonic clock, the same for all its processes."""

    at_ns: int
    group: str
    number: int
    aircraft: str
    turn: int
    attempt: int
    channel: str = NO_CHANNEL

    def line(self) -> str:
        """As it stands in the file."""
        return (
            f"{self.at_ns}\t{self.group}\t{self.number}\t{self.aircraft}\t{self.turn}\t{self.attempt}\t{self.channel}\n"
        )

    @classmethod
    def parse(cls, line: str) -> Entry:
        """The inverse of `line`."""
        at_ns, group, number, aircraft, turn, attempt, channel = line.rstrip("\n").split("\t")
        return cls(int(at_ns), group, int(number), aircraft, int(turn), int(attempt), channel)


class Ledger:
    """Where one worker process writes."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / f"{os.getpid()}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, entries: Iterable[Entry]) -> None:
        """Append, in one call to the system."""
        os.write(self._file, "".join(entry.line() for entry in entries).encode())


def now_ns() -> int:
    """The time for an entry."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclass
class Reader:
    """Follows all ledgers of a directory while they grow."""

    directory: Path
    entries: list[Entry] = field(default_factory=list)
    _places: dict[Path, int] = field(default_factory=dict)

    def read(self) -> list[Entry]:
        """What has been written since the last call."""
        new = [entry for path in sorted(self.directory.glob("*.ledger")) for entry in self._read_file(path)]
        self.entries += new
        return new

    def _read_file(self, path: Path) -> Iterator[Entry]:
        with path.open("rb") as file:
            file.seek(self._places.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._places[path] = self._places.get(path, 0) + len(whole)
        return (Entry.parse(line) for line in whole.decode().splitlines())
