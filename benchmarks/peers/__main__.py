"""`python -m benchmarks.peers [--only a,b] [--quick]`: rsmq beside its peers, in one run.

Each system lives in a virtual environment of its own under .bench/, made from PyPI when first needed. A system that
cannot be installed or run here is reported with the reason. A full run writes its report into
benchmarks/results, and a section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers import report, results
from benchmarks.peers.catalogue import CATALOGUE, Entry
from benchmarks.peers.environment import ROOT, Unavailable
from benchmarks.peers.run import FULL, QUICK, Plan, Run


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the page, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help="systems: " + ", ".join(entry.name for entry in CATALOGUE))
    parser.add_argument(
        "--quick", action="store_true", help="one round, a fifth of the messages, some recoveries of at most 30 s"
    )
    parser.add_argument("--rounds", type=int, help="how often each system is measured")
    parser.add_argument("--scale", type=float, help="share of the messages, such as 0.5")
    parser.add_argument("--limit", type=float, help="seconds after which a recovery is not waited for")
    parser.add_argument("--output", type=Path, help="the report, with .json and .svg beside it")
    parser.add_argument("--page", action="store_true", help="measure nothing, write report and section again")
    options = parser.parse_args(arguments)
    whole = not (options.only or options.quick)
    output = options.output or (report.KEPT if whole or options.page else ROOT / ".bench" / "benchmarks.md")
    if not options.page:
        plan = QUICK if options.quick else FULL
        changes = {
            name: getattr(options, name) for name in ("rounds", "scale", "limit") if getattr(options, name) is not None
        }
        measure(chosen(options.only, parser), Plan(**vars(plan) | changes), output)
    report.write(output)
    report.show(output, Console(width=160))


def chosen(only: str | None, parser: argparse.ArgumentParser) -> list[Entry]:
    """The systems of `--only`, and the bare loop, which all are compared with."""
    names = only.split(",") if only else [entry.name for entry in CATALOGUE]
    if unknown := set(names) - {entry.name for entry in CATALOGUE}:
        parser.error(f"no such system: {', '.join(sorted(unknown))}; --help lists them")
    return [entry for entry in CATALOGUE if entry.name in {"bare", *names}]


def measure(entries: list[Entry], plan: Plan, output: Path) -> None:
    """Run, and keep the results even of a run that was interrupted."""
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    began = time.time()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        run = Run(entries, plan, progress)
        try:
            run.go()
        finally:
            results.save(output, run.results, vars(plan), run.server_name, time.time() - began)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no server and no worker behind
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has started it in the background
    try:
        main()
    except Unavailable as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
