"""What a person sees while Spark works: one bar on stderr. None where stderr is no terminal, and none with --json."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LOOK_SECONDS: Final = 0.25


class Bar:
    """One line: a title, a bar, how far, for how long."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, note="")

    def show(self, done: float, total: float | None = None, note: str = "") -> None:
        """Move it. Without a total it only shows that something happens."""
        self._progress.update(self._task, completed=done, total=total, note=note)


@contextmanager
def bar(title: str, is_quiet: bool = False) -> Iterator[Bar]:
    """A bar for the length of the block."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=is_quiet or not sys.stderr.isatty()) as progress:
        yield Bar(progress, title)


@contextmanager
def watched(spark: SparkSession, title: str, is_quiet: bool = False) -> Iterator[Bar]:
    """A bar that follows the tasks of whatever Spark runs in the block."""
    with bar(title, is_quiet) as shown:
        if is_quiet or not sys.stderr.isatty():
            yield shown
            return
        is_over = threading.Event()
        watcher = threading.Thread(target=follow, args=(spark, shown, is_over), name="rsmq-bar", daemon=True)
        watcher.start()
        try:
            yield shown
        finally:
            is_over.set()
            watcher.join()


def follow(spark: SparkSession, shown: Bar, is_over: threading.Event) -> None:
    """Show the tasks of the stages that run, until told to end."""
    tracker = spark.sparkContext.statusTracker()
    while not is_over.wait(LOOK_SECONDS):
        stages = [info for number in tracker.getActiveStageIds() if (info := tracker.getStageInfo(number)) is not None]
        total, done = (sum(getattr(each, name) for each in stages) for name in ("numTasks", "numCompletedTasks"))
        if total:
            shown.show(done, total, f"{done} of {total} tasks")
