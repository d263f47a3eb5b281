"""`python -m tests.interleavings`: every order of the Lua scripts in small scenarios, on a real server.

`--weakened` weakens the scripts, and the code that adds bands or resizes, one at a time instead, and tells how each is
found.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tests.interleavings.bands import BAND_EDITS, BAND_SCENARIOS
from tests.interleavings.batch_counts import BATCH_SCENARIOS, BATCH_WEAKENINGS
from tests.interleavings.digests import DIGEST_SCENARIOS, DIGEST_WEAKENINGS
from tests.interleavings.families import FAMILY_EDITS, FAMILY_SCENARIOS
from tests.interleavings.notes import NOTE_SCENARIOS, NOTE_WEAKENINGS
from tests.interleavings.permits import PERMIT_SCENARIOS, PERMIT_WEAKENINGS
from tests.interleavings.pushes import PUSH_SCENARIOS, PUSH_WEAKENINGS
from tests.interleavings.resizing import RESIZE_EDITS, RESIZE_SCENARIOS
from tests.interleavings.scenarios import SCENARIOS, WEAKENINGS, Scenario
from tests.interleavings.seams import SEAM_EDITS, SEAM_SCENARIOS
from tests.interleavings.search import Result, Search
from tests.interleavings.store import store

console = Console(highlight=False, soft_wrap=True)


def search(scenario: Scenario) -> tuple[Result, int]:
    """What the search of a scenario has found, and how many different calls the server has executed for it."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with store("m1", "m2") as server, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(scenario.name)

        def show(result: Result) -> None:
            counts = f"{result.states} states, {result.steps} steps, depth {result.depth}"
            progress.update(bar, description=f"{scenario.name}: {counts}")

        return Search(scenario.moves(server), progress=show).run(), server.calls


def tell(result: Result) -> None:
    """A broken promise as a story; nothing if none is broken."""
    for number, step in enumerate(result.story, 1):
        console.print(f"  {number:2} {step}", markup=False)
    if result.broken:
        console.print(f"     {result.broken}", markup=False, style="bold")


def search_all(only: list[str]) -> bool:
    """Search the scenarios. True when every promise is kept."""
    is_good = True
    for scenario in SCENARIOS:
        if only and not any(part in scenario.name for part in only):
            continue
        result, calls = search(scenario)
        is_good &= not result.broken
        console.print(
            f"{scenario.name}: {result.states} states, {result.steps} steps, {calls} calls, depth {result.depth}, "
            f"{result.seconds:.0f} s: {'BROKEN' if result.broken else 'complete'}"
        )
        if result.broken:
            tell(result)
    for bands in (*BAND_SCENARIOS, *RESIZE_SCENARIOS, *SEAM_SCENARIOS, *FAMILY_SCENARIOS):
        if not only or any(part in bands.name for part in only):
            result = bands.search()
            is_good &= not result.broken
            console.print(
                f"{bands.name}: {result.states} states, {result.steps} steps, depth {result.depth}: "
                f"{'BROKEN' if result.broken else 'complete'}"
            )
            tell(result)
    for digests in DIGEST_SCENARIOS:
        if not only or any(part in digests.name for part in only):
            result = digests.search()
            is_good &= not result.broken
            console.print(f"{digests.name}: {result.states} states: {'BROKEN' if result.broken else 'complete'}")
            tell(result)
    for permits in PERMIT_SCENARIOS:
        if not only or any(part in permits.name for part in only):
            result = permits.search()
            is_good &= not result.broken
            console.print(f"{permits.name}: {result.states} states: {'BROKEN' if result.broken else 'complete'}")
            tell(result)
    for pushes in PUSH_SCENARIOS:
        if not only or any(part in pushes.name for part in only):
            result = pushes.search()
            is_good &= not result.broken
            console.print(f"{pushes.name}: {result.states} states: {'BROKEN' if result.broken else 'complete'}")
            tell(result)
    for batch in BATCH_SCENARIOS:
        if not only or any(part in batch.name for part in only):
            result = batch.search()
            is_good &= not result.broken
            console.print(f"{batch.name}: {result.states} states: {'BROKEN' if result.broken else 'complete'}")
            tell(result)
    for notes in NOTE_SCENARIOS:
        if not only or any(part in notes.name for part in only):
            result = notes.search()
            is_good &= not result.broken
            console.print(f"{notes.name}: {result.states} states: {'BROKEN' if result.broken else 'complete'}")
            tell(result)
    return is_good


def search_weakened(only: list[str]) -> bool:
    """Search with each script weakened. True when each is found."""
    is_good = True
    for weakening in WEAKENINGS:
        name = weakening.name
        if only and not any(part in name for part in only):
            continue
        with weakening.applied():
            result, _ = search(weakening.scenario)
        is_good &= bool(result.broken)
        verdict = "found" if result.broken else "NOT FOUND"
        console.print(f"{name}: {verdict} ({weakening.scenario.name}; {result.states} states, {result.seconds:.0f} s)")
        if result.broken:
            tell(result)
    for edit in (*BAND_EDITS, *RESIZE_EDITS, *SEAM_EDITS, *FAMILY_EDITS):
        if not only or any(part in f"bands: {edit.what}" for part in only):
            result = edit.scenario.search(edit)
            is_good &= bool(result.broken)
            found = f"found ({edit.scenario.name}; {result.states} states)" if result.broken else "NOT FOUND"
            console.print(f"bands: {edit.what}: {found}")
            tell(result)
    for weak in DIGEST_WEAKENINGS:
        if not only or any(part in f"digests: {weak.what}" for part in only):
            result = weak.search()
            is_good &= bool(result.broken)
            console.print(f"digests: {weak.what}: {'found' if result.broken else 'NOT FOUND'} ({result.states} states)")
    for permits in PERMIT_WEAKENINGS:
        if not only or any(part in f"take_permits {permits.what}" for part in only):
            result = permits.scenario.search(permits.script)
            is_good &= bool(result.broken)
            console.print(f"take_permits {permits.what}: {'found' if result.broken else 'NOT FOUND'}")
    for pushes in PUSH_WEAKENINGS:
        if not only or any(part in f"pushes: {pushes.what}" for part in only):
            result = pushes.search()
            is_good &= bool(result.broken)
            console.print(
                f"pushes: {pushes.what}: {'found' if result.broken else 'NOT FOUND'} ({result.states} states)"
            )
    for batch in BATCH_WEAKENINGS:
        if not only or any(part in f"batch: {batch.what}" for part in only):
            result = batch.search()
            is_good &= bool(result.broken)
            console.print(f"batch: {batch.what}: {'found' if result.broken else 'NOT FOUND'} ({result.states} states)")
            tell(result)
    for kept in NOTE_WEAKENINGS:
        if not only or any(part in f"steps: {kept.what}" for part in only):
            result = kept.search()
            is_good &= bool(result.broken)
            console.print(f"steps: {kept.what}: {'found' if result.broken else 'NOT FOUND'} ({result.states} states)")
            tell(result)
    return is_good


def main() -> int:
    """The exit code is 1 if a promise is broken, or with `--weakened` if one is kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names; default: all")
    parser.add_argument("--weakened", action="store_true", help="weaken the scripts, one at a time")
    chosen = parser.parse_args()
    return 0 if (search_weakened if chosen.weakened else search_all)(chosen.only) else 1


if __name__ == "__main__":
    sys.exit(main())
