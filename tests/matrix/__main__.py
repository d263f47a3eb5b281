"""`python -m tests.matrix [--server NAME] [--way NAME] [-- pytest arguments]`: the contract over servers × ways.

Writes docs/compatibility.md (with `--server` or `--way` only those cells are replaced). Exit code 1 if a test failed.
Redis 7.0 is Debian's `redis-server` or the path in REDIS_7_0; the other servers come from wheels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.matrix.cell import DEBIAN, FAULTS, KINDS, Result, executable, run, version
from tests.matrix.page import PAGE, last_version, remember, write
from tests.matrix.way import WAYS

SERVERS = [DEBIAN, *KINDS]
ROWS = [*WAYS, *FAULTS]


def main() -> int:
    """Run the cells one after the other, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", choices=SERVERS)
    parser.add_argument("--way", action="append", choices=ROWS)
    options, arguments = parser.parse_known_args()
    cells = [(server, way) for way in options.way or ROWS for server in options.server or SERVERS]
    results = measure(cells, [each for each in arguments if each != "--"])
    Console().print(f"written: {PAGE}")
    return int(any(each.failed or each.trouble for each in results))


def measure(cells: Sequence[tuple[str, str]], arguments: list[str]) -> list[Result]:
    """Run every cell with a progress bar and print its result."""
    results: list[Result] = []
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(cells))
        for server, way in cells:
            progress.update(task, description=f"{server}, {way}")
            result = run(server, way, arguments)
            results.append(result)
            note(result)
            progress.console.print(f"{server:<12}{way:<28}{result}  {result.seconds:.0f} s")
            for name in result.failed:
                progress.console.print(f"    failed: {name}")
            progress.advance(task)
    return results


def note(result: Result) -> None:
    """Write the page after every cell, so that an interrupted run keeps its results."""
    found = {server: executable(server) for server in SERVERS}
    versions = {server: version(path) if path else last_version(server) for server, path in found.items()}
    order = {(server, way): at for at, (way, server) in enumerate((way, server) for way in ROWS for server in SERVERS)}
    write(sorted(remember(result, versions), key=lambda each: order[each.server, each.way]), versions)


if __name__ == "__main__":
    sys.exit(main())
