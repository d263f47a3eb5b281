"""The CPU of each test, in a report of pytest: that of its process and of all that this process has started.

`tests/conftest.py` adds it to runs with `--junit-xml`; `tests/shares.py` reads it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PROPERTY: Final = "cpu_s"
"""The property of a test in the report: seconds of CPU, of user and system."""

START: Final = "start_cpu_s"
"""That of the first test of each process: seconds of CPU until it had collected the tests."""

TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Seconds of CPU of this process and its descendants: those that have ended, and those that run."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(running_s(pid) for pid in descendants(os.getpid()))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime + running


def descendants(pid: int) -> Iterator[int]:
    """The processes that this one has started, and those that they have; those that run."""
    for child in first_lines(Path(f"/proc/{pid}/task").glob("*/children")):
        for each in map(int, child.split()):
            yield each
            yield from descendants(each)


def running_s(pid: int) -> float:
    """Seconds of CPU of a process and of those that it has waited for; 0 when it has just ended."""
    for line in first_lines([Path(f"/proc/{pid}/stat")]):
        return sum(map(int, line.rpartition(")")[2].split()[11:15])) / TICKS
    return 0.0


def first_lines(paths: Iterator[Path] | list[Path]) -> Iterator[str]:
    """Of files of /proc, which are gone when their process is."""
    for path in paths:
        try:
            yield path.read_text()
        except OSError:
            continue


class CpuRecorder:
    """A plugin: each test has the CPU since the test before it. What a module starts counts for its first test, and
    its end for its last one."""

    def __init__(self) -> None:
        self._before = self._start = 0.0

    def pytest_collection_finish(self) -> None:
        """The tests begin here: what was spent until now is of no area."""
        self._before = self._start = cpu_s()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """The report of the teardown is the last of a test, and the one whose properties are written."""
        if call.when == "teardown":
            now = cpu_s()
            item.user_properties.append((PROPERTY, f"{max(now - self._before, 0.0):.3f}"))
            self._before = now
            if self._start:
                item.user_properties.append((START, f"{self._start:.3f}"))
                self._start = 0.0
