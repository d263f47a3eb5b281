"""The ledger: what the phones received, written down outside the server that is under test.

One append-only file for each gateway process, a line in one write before a letter is acknowledged: a killed process
loses none of the lines it has written.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

CONNECTED, LEFT, NEW, AGAIN = "+", "-", "n", "a"


class Entry(NamedTuple):
    """One event of a phone: it connected, it left, or a letter came, NEW or (marked as redelivered) AGAIN."""

    at_ms: float
    event: str
    phone: str
    seq: int = 0
    flight: int = 0
    published_ms: float = 0

    @classmethod
    def parse(cls, line: str) -> Self:
        """A line as `Ledger` writes it."""
        at, event, phone, seq, flight, published = line.split(" ")
        return cls(float(at), event, phone, int(seq), int(flight), float(published))


class Ledger:
    """Where one gateway process writes."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / f"{os.getpid()}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, phone: str, seq: int = 0, flight: int = 0, published_ms: float = 0) -> None:
        """Append a line."""
        line = f"{time.time() * 1000:.3f} {event} {phone} {seq} {flight} {published_ms:.0f}\n"
        os.write(self._file, line.encode())


class Reader:
    """Follows all ledgers of a directory while they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[Path, int] = {}
        self.entries: list[Entry] = []

    def read(self) -> list[Entry]:
        """What has been written since the last call."""
        new = [entry for path in sorted(self._directory.glob("*.ledger")) for entry in self._read_file(path)]
        self.entries += new
        return new

    def _read_file(self, path: Path) -> Iterator[Entry]:
        with path.open("rb") as file:
            file.seek(self._places.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._places[path] = self._places.get(path, 0) + len(whole)
        return map(Entry.parse, whole.decode().splitlines())
