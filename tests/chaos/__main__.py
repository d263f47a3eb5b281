"""`python -m tests.chaos`: run the scenarios of the catalogue, print their results, write tests/chaos/README.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos.catalogue import KINDS, ONE, Scenario, load
from tests.chaos.result import Result, keep, read, write
from tests.chaos.runner import run_scenario
from tests.servers import Kind

OLD: Kind = "redis-7.0"  # type: ignore[assignment]
"""Debian's: no wheel has it. Used if SERVER_BINARY or an installed redis-server is one."""


def old_server() -> str | None:
    """The path of a redis-server outside the wheels."""
    return os.environ.get("SERVER_BINARY") or shutil.which("redis-server")


def plan(options: argparse.Namespace) -> list[tuple[Scenario, str, Mapping[str, Any], Kind]]:
    """The scenarios to run, in order."""
    kinds = options.server or [*KINDS, *([OLD] if old_server() else [])]
    found = []
    for kind in kinds:
        for one in load():
            is_wanted = options.all or kind in ONE or kind in one.servers or (kind == OLD and one.servers == KINDS)
            if is_wanted and (one.is_cheap or not options.cheap):
                found += [(one, title, given, kind) for title, given in one.titles()]
    wanted = [word.replace("_", " ") for word in options.only]
    return [each for each in found if not wanted or any(word in each[1] or word == each[0].number for word in wanted)]


def next_seed(title: str, kind: Kind) -> int:
    """One that a scenario has not had on a server, so that its result is added to those of the earlier ones."""
    return max((each.seed for each in read() if (each.title, each.server) == (title, kind)), default=0) + 1


async def run_all(options: argparse.Namespace, console: Console) -> list[Result]:
    """Run the scenarios one after the other and keep each result at once."""
    results: list[Result] = []
    todo = plan(options) * (options.pieces or options.times)
    columns = (TextColumn("{task.description:45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for one, title, given, kind in todo:
            progress.update(bar, description=f"{title} on {kind}"[:45])
            os.environ.pop("SERVER_BINARY", None)
            if kind == OLD and (path := options.old):
                os.environ["SERVER_BINARY"] = path
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                seed = next_seed(title, kind) if options.pieces else options.seed
                result = await run_scenario(
                    one, title, given, kind, seed, options.seconds, options.minutes, has_bank=options.bank
                )
            results.append(result)
            if result.booked or not options.bank:  # else the scenario has no place for the bank
                keep([result])
            progress.advance(bar)
            is_good = result.verdict in ("clean", "skipped")
            details = result.details if not is_good else result.details[:160]
            colour = "green" if is_good else "red"
            console.print(f"[{colour}]{result.verdict:8}[/] {title} on {kind} ({result.took:g} s)", highlight=False)
            console.print(f"         {details}", markup=False, highlight=False)
            if not is_good and options.verbose:
                console.print(printed.getvalue()[-options.verbose :], markup=False, highlight=False)
    return results


def main() -> int:
    """Parse the options, run, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names, or numbers, of scenarios; default: all")
    parser.add_argument("--server", action="append", choices=[*KINDS, OLD], help="only on this server; may be repeated")
    parser.add_argument("--cheap", action="store_true", help="only the scenarios that CI runs")
    parser.add_argument("--all", action="store_true", help="also on servers where the scenario shows nothing new")
    parser.add_argument("--seed", type=int, default=1, help="the seed of everything random")
    parser.add_argument("--times", type=int, default=1, help="how often to run all of it")
    parser.add_argument("--pieces", type=int, help="how often to run all of it, each time with another, new seed")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each phase without faults lasts")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the random mix lasts")
    parser.add_argument("--list", action="store_true", help="list the scenarios without running them")
    parser.add_argument(
        "--verbose",
        type=int,
        default=0,
        metavar="N",
        help="print so many characters of the log of runs that are not clean",
    )
    parser.add_argument("--bank", action="store_true", help="with handlers that book in a database, if possible")
    parser.add_argument("--base", help="the commit that the rolling upgrade starts from; default: the last other one")
    options = parser.parse_args()
    if options.base:
        os.environ["UPGRADE_BASE"] = options.base
    options.old = old_server()
    if options.server and OLD in options.server and not options.old:
        parser.error(f"{OLD} is not here: install Debian's redis-server, or set SERVER_BINARY to its path")
    if options.list:
        print("\n".join(f"{one.number:8} {title} on {kind}" for one, title, _, kind in plan(options)))
        return 0
    results = asyncio.run(run_all(options, Console()))
    write(load(), keep([]))
    return int(any(each.verdict in ("broken", "failed") for each in results))


if __name__ == "__main__":
    sys.exit(main())
