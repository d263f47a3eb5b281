"""Runs one scenario and returns its result, also when the scenario fails or is skipped."""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import Scenario
from tests.chaos.result import WITH_BANK, Result
from tests.chaos.testbed import Testbed
from tests.servers import Kind

KEPT = Path(".chaos")
"""The ledger and the log of a run that was not clean are kept here."""


async def run_scenario(
    scenario: Scenario,
    title: str,
    given: Mapping[str, Any],
    kind: Kind,
    seed: int,
    seconds: float,
    minutes: float,
    *,
    has_bank: bool = False,
) -> Result:
    """Run a variant of a scenario on a server of this kind."""
    started = time.monotonic()
    verdict, details, found, run = "clean", "", None, None
    with tempfile.TemporaryDirectory(prefix="rsmq-chaos-") as path:
        try:
            async with Testbed(kind, seed, seconds, Path(path), minutes=minutes, has_bank=has_bank) as testbed:
                try:
                    found = await scenario.function(testbed, **given)
                finally:
                    run = testbed.run
            verdict, details = ("broken" if found.faults else "clean"), str(found)
        except pytest.skip.Exception as error:
            verdict, details = "skipped", str(error)
        except Exception as error:
            traceback.print_exc()
            verdict, details = "failed", f"{type(error).__name__}: {str(error)[:2000]}"
        if verdict in ("broken", "failed"):
            shutil.copytree(path, KEPT / f"{title} on {kind}", dirs_exist_ok=True)
    return Result(
        f"{title}{WITH_BANK}" if has_bank else title, kind, seed, verdict, details,
        handled=found.handled if found else 0,
        duplicates=len(found.repeats) if found else 0,
        restarted=found.starts if found else 0,
        unknown=len(run.history.unknown) if run else 0,
        lost=run.lost if run else 0,
        recovery=round(run.recovered, 2) if run else 0.0,
        took=round(time.monotonic() - started, 1),
        note=run.note if run else "",
        booked=run.booked if run else 0,
    )  # fmt: skip
