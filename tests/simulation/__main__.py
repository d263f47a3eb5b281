"""`python -m tests.simulation --seed 42`: play one seed or many, and shrink what fails."""

from __future__ import annotations

from tests.simulation import clock  # noqa: F401  first: the package keeps `time.monotonic` when it is imported

# isort: split
import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation.plan import Plan
from tests.simulation.seeds import Outcome, Task, outcomes, shrink

HASH_SEED = "PYTHONHASHSEED"


def options() -> argparse.Namespace:
    """What the user wants."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--minutes", type=float, default=0, help="virtual minutes of each seed; default: 20 seconds")
    parser.add_argument("--server", default="valkey-8.1", choices=["valkey-8.1", "redis-8.2"], help="on this server")
    parser.add_argument("--trace", type=Path, help="write everything that happened to this file")
    parser.add_argument("--until-failure", action="store_true", help="end with the first seed that fails, unshrunk")
    parser.add_argument("--no-shrink", action="store_true", help="leave a seed that fails as it is")
    return parser.parse_args()


def plan_of(chosen: argparse.Namespace) -> Plan:
    """The plan for the chosen span, with as many messages a second."""
    plan = Plan()
    factor = chosen.minutes * 60 / plan.seconds if chosen.minutes else 1
    return replace(plan, seconds=plan.seconds * factor, messages=int(plan.messages * factor))


def main() -> int:
    """Play the seeds; the exit code is 1 if one has failed."""
    if os.environ.get(HASH_SEED) != "0":  # the order of a set of strings must not differ between two runs
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED: "0"})
    chosen, console = options(), Console(highlight=False)
    trace = chosen.trace.absolute() if chosen.trace else None
    tasks = [
        Task(seed, plan_of(chosen), chosen.server, trace=trace)
        for seed in range(chosen.seed, chosen.seed + chosen.count)
    ]
    failed, virtual = list[Outcome](), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=len(tasks))
        for outcome in outcomes(tasks, chosen.jobs):
            progress.advance(bar)
            virtual += outcome.virtual
            failed += [outcome] if outcome.faults else []
            if outcome.faults or (chosen.count <= 20 and not chosen.until_failure):
                console.print(str(outcome), markup=False, soft_wrap=True)
            if outcome.faults and chosen.until_failure:
                return 1
        for outcome in [] if chosen.no_shrink else failed[:3]:
            task = next(task for task in tasks if task.seed == outcome.seed)
            progress.update(bar, description=f"shrinking seed {outcome.seed}")
            shrunk = shrink(task, outcome)
            story = "\n  ".join(("needs only", *shrunk.made))
            console.print(f"{shrunk}\n  {story}", markup=False, soft_wrap=True)
    console.print(f"{len(tasks) - len(failed)} of {len(tasks)} seeds are clean, {virtual:.0f} virtual seconds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
