"""CPU time of this process and its descendants: the driver, its JVM and Python workers, without the server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

TICK: Final = os.sysconf("SC_CLK_TCK")
POLL_SECONDS: Final = 0.1


class Meter(threading.Thread):
    """CPU time within a block.

    It polls several times a second and keeps the last value of processes that have ended: Spark does not report the
    time of its Python workers.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._first = dict[int, int]()
        self._last = dict[int, int]()
        self._names = dict[int, str]()
        self._own = 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds of all processes, without the meter's own."""
        return self._spent(self._last) - self._own

    @property
    def jvm_seconds(self) -> float:
        """CPU seconds of the JVM."""
        return self._spent(number for number in self._last if self._names[number] == "java")

    def _spent(self, numbers: Iterable[int]) -> float:
        return sum(self._last[number] - self._first.get(number, 0) for number in numbers) / TICK

    def run(self) -> None:
        """Poll until the end of the block."""
        start = time.thread_time()
        while not self._ended.wait(POLL_SECONDS):
            self._poll()
        self._poll()
        self._own = time.thread_time() - start

    def _poll(self) -> None:
        for number, (name, ticks) in processes().items():
            self._names[number], self._last[number] = name, ticks

    def __enter__(self) -> Self:
        self._first = {number: ticks for number, (_, ticks) in processes().items()}
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def processes() -> dict[int, tuple[str, int]]:
    """Name and CPU ticks of this process and its descendants, without the server."""
    parents, found = dict[int, int](), dict[int, tuple[str, int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue  # ended at this moment
        fields, number, name = rest.split(), int(path.parent.name), head.partition("(")[2]
        parents[number] = int(fields[1])
        if "-server" not in name:
            found[number] = name, int(fields[11]) + int(fields[12])

    def is_ours(number: int) -> bool:
        while number > 1 and number != os.getpid():
            number = parents.get(number, 0)
        return number == os.getpid()

    return {number: usage for number, usage in found.items() if is_ours(number)}
