"""`python -m tests.simulation --seed 42`: play one seed or many, and shrink what fails."""

from __future__ import annotations

from tests.simulation import clock  # first: the package keeps `time.monotonic` when it is imported

# isort: split
import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation.plan import Plan
from tests.simulation.seeds import Outcome, Task, outcomes, shrink

SERVER: Final = "valkey-8.1"
FAILED: Final = Path(__file__).with_name("failed_seeds.txt")
"""A seed a line, and the bug that it has found."""
HASH_SEED: Final = "PYTHONHASHSEED"


def options() -> argparse.Namespace:
    """What the user wants."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="the first seed, or all of them")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--failed", action="store_true", help=f"play the seeds of {FAILED.name} instead")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--minutes", type=float, default=0, help="virtual minutes of each seed; default: 12 seconds")
    parser.add_argument("--server", default=SERVER, choices=["valkey-8.1", "redis-8.2"], help="on this server")
    parser.add_argument("--encoded", action="store_true", help="messages are encrypted, or lie in a store")
    parser.add_argument("--resized", action="store_true", help="the topic grows while all goes on")
    parser.add_argument("--mqtt", action="store_true", help="gateways read the letters of MQTT clients")
    parser.add_argument("--unwatched", action="store_true", help="all members that watch a large group go at once")
    parser.add_argument("--trace", type=Path, help="write everything that happened to this file")
    parser.add_argument("--until-failure", action="store_true", help="end with the first seed that fails, unshrunk")
    parser.add_argument("--only", action="append", help="let only this fault or delay happen; may be repeated")
    parser.add_argument("--measure", action="store_true", help="how fast it is: 20 seeds of 60 virtual seconds")
    parser.add_argument("--large", action="store_true", help="in every seed few members watch all others")
    parser.add_argument("--noted", action="store_true", help="handlers have steps and results, where that can be")
    parser.add_argument("--batched", action="store_true", help="all messages are members of a batch, where that can be")
    parser.add_argument("--no-shrink", action="store_true", help="leave a seed that fails as it is")
    return parser.parse_args()


def plan_of(chosen: argparse.Namespace) -> Plan:
    """The plan for the chosen span, with as many messages a second."""
    plan = Plan(encodes=float(chosen.encoded), resizes=float(chosen.resized), unwatches=float(chosen.unwatched))
    plan = replace(plan, mqtt=float(chosen.mqtt))
    factor = chosen.minutes * 60 / plan.seconds if chosen.minutes else 1
    plan = replace(plan, noted=1.0 if chosen.noted else plan.noted)
    plan = replace(plan, large=1.0 if chosen.large else plan.large, batched=1.0 if chosen.batched else plan.batched)
    return replace(plan, seconds=plan.seconds * factor, messages=int(plan.messages * factor))


def main() -> int:
    """Play the seeds; the exit code is 1 if one has failed."""
    if os.environ.get(HASH_SEED) != "0":  # the order of a set of strings must not differ between two runs
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED: "0"})
    chosen, console = options(), Console(highlight=False)
    if chosen.measure:
        chosen.minutes, chosen.count, chosen.jobs, chosen.no_shrink = 1, 20, 2, True
    started = clock.real_clock()
    trace = chosen.trace.absolute() if chosen.trace else None
    only = None if chosen.only is None else frozenset(chosen.only)
    seeds = chosen.seed if len(chosen.seed) > 1 else range(chosen.seed[0], chosen.seed[0] + chosen.count)
    if chosen.failed:
        seeds = sorted({int(line.split()[0]) for line in FAILED.read_text().splitlines()})
    tasks = [Task(seed, plan_of(chosen), chosen.server, only=only, trace=trace) for seed in seeds]
    failed, virtual, cpu, done = list[Outcome](), 0.0, 0.0, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=len(tasks))
        for outcome in outcomes(tasks, chosen.jobs):
            progress.advance(bar)
            done, virtual, cpu = done + 1, virtual + outcome.virtual, cpu + outcome.cpu
            failed += [outcome] if outcome.faults else []
            if outcome.faults or (len(tasks) <= 20 and not chosen.until_failure):
                console.print(str(outcome), markup=False, soft_wrap=True)
            if outcome.faults and chosen.until_failure:
                break
        for outcome in [] if chosen.no_shrink or chosen.until_failure else failed[:3]:
            task = next(task for task in tasks if task.seed == outcome.seed)
            progress.update(bar, description=f"shrinking seed {outcome.seed}")
            shrunk = shrink(task, outcome)
            story = "\n  ".join(("needs only", *shrunk.made, "play it again", replay_command(chosen, shrunk)))
            console.print(f"{shrunk}\n  {story}", markup=False, soft_wrap=True)
    console.print(
        f"{done - len(failed)} of {done} seeds are clean, {virtual:.0f} virtual seconds in {cpu:.1f} seconds of CPU"
    )
    if chosen.measure:
        took = clock.real_clock() - started
        console.print(
            f"{virtual / cpu:.1f} virtual seconds a second of CPU; {virtual / took:.1f} a second, and "
            f"{done * 3600 / took:.0f} seeds an hour, with {chosen.jobs} jobs on this machine as busy as it is"
        )
    return 1 if failed else 0


def replay_command(chosen: argparse.Namespace, outcome: Outcome) -> str:
    """Plays just what is left of a seed."""
    words = ["python", "-m", "tests.simulation", "--seed", str(outcome.seed), "--trace", f"/tmp/{outcome.seed}"]
    words += ["--minutes", f"{chosen.minutes:g}"] if chosen.minutes else []
    words += ["--large"] if chosen.large else []
    words += ["--batched"] if chosen.batched else []
    words += ["--noted"] if chosen.noted else []
    words += ["--encoded"] if chosen.encoded else []
    words += ["--resized"] if chosen.resized else []
    words += ["--unwatched"] if chosen.unwatched else []
    words += ["--mqtt"] if chosen.mqtt else []
    words += ["--server", chosen.server] if chosen.server != SERVER else []
    return shlex.join([*words, *(word for name in outcome.made or [""] for word in ("--only", name))])


if __name__ == "__main__":
    sys.exit(main())
