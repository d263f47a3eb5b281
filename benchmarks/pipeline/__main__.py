"""`python -m benchmarks.pipeline [--count N] [--only WORD] [--json]`: measure, show, write the section of the page."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.pipeline.figure import SECTION, WARM, Figure, measure, show, told
from benchmarks.pipeline.work import Work
from benchmarks.server import server
from rsmq.pipeline.spark.session import open_session

PLAIN: Final = "read: pyarrow without Spark → Parquet"
COUNTED: Final = "count: redis-py in a loop"
SUMMED: Final = "sum: redis-py in a loop, json"
EMPTY: Final = "nothing: of a topic without messages"
PIPED: Final = "write: redis-py pipeline"

BASES: Final = (EMPTY, COUNTED, SUMMED, PLAIN, PIPED)

Measurement = tuple[str, Callable[[int], object], str, int]
"""Title, what to do with a number of messages, the title to compare with, the goal."""


def measurements(work: Work, count: int) -> list[Measurement]:
    """All measurements in order. Reads come first, because writes empty the server."""
    topic = {count // WARM: "warm", count: "full"}
    return [
        (EMPTY, lambda _: work.nothing("none"), "", 0),
        ("nothing: of all, by a filter that is pushed down", lambda n: work.nothing(topic[n]), EMPTY, 0),
        (COUNTED, lambda n: work.count_by_hand(topic[n], n), "", 0),
        ("count: Spark", lambda n: work.count(topic[n], n), COUNTED, 0),
        (SUMMED, lambda n: work.sum_by_hand(topic[n], n), "", 0),
        ("sum: Spark", lambda n: work.sum(topic[n], n), SUMMED, 0),
        (PLAIN, lambda n: work.plain(topic[n]), "", 0),
        ("read: rows → Parquet", lambda n: work.parquet("rsmq_rows", topic[n]), PLAIN, 0),
        ("read: Arrow → Parquet", lambda n: work.parquet("rsmq", topic[n]), PLAIN, 100_000),
        ("read: Arrow, discarded", lambda n: work.discard(topic[n]), PLAIN, 0),
        ("read: archive", lambda n: work.archive(topic[n], n), PLAIN, 0),
        ("read: archive without Spark", lambda n: work.archive_by_arrow(topic[n], n), PLAIN, 0),
        (PIPED, work.pipelined, "", 0),
        ("write: redis-py pipeline in foreachPartition", work.by_hand, PIPED, 0),
        ("write: none", lambda n: work.sink(n, "none"), PIPED, 0),
        ("write: id", lambda n: work.sink(n, "id"), PIPED, 0),
        ("write: marker", lambda n: work.sink(n, "marker"), PIPED, 170_000),
        ("write: dedupe", lambda n: work.sink(n, "dedupe"), PIPED, 0),
        ("write: inbox", work.inbox, PIPED, 90_000),
        ("write: replay of the archive", lambda n: work.replay(topic[n], n), PIPED, 0),
    ]


def run(url: str, folder: Path, count: int, only: str) -> list[Figure]:
    """Measure everything whose title contains `only`, and the bases of comparison."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting Spark", total=None)
        work = Work(url, open_session("local[2]"), folder)
        chosen = [each for each in measurements(work, count) if only in each[0] or each[0] in BASES]
        progress.update(bar, total=len(chosen), description="filling")
        work.fill("warm", count // WARM)
        work.fill("full", count)
        work.make("none")
        figures = []
        for title, act, base, goal in chosen:
            progress.update(bar, description=title)
            figures.append(measure(title, act, count, base, goal))
            progress.advance(bar)
        work.spark.stop()
        return figures


def main() -> None:
    """Measure, print the table, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500_000, help="messages, a multiple of 1000")
    parser.add_argument("--only", default="", metavar="WORD", help="only lines with this word; writes no page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rsmq-bench-"))
    try:
        with server() as url:
            figures = run(url, folder, options.count, options.only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
    else:
        show(figures, options.count)
    if not options.only:
        SECTION.keep(told(figures, options.count))


if __name__ == "__main__":
    main()
