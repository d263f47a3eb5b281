"""Plays one scenario and says what came of it, whatever happens."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import Scenario
from tests.chaos.result import Result
from tests.chaos.stage import Stage, scratch
from tests.servers import Kind

KEPT = Path(".chaos")
"""Where the ledger and the workers' log of a run that was not clean are kept."""


async def play(
    one: Scenario, title: str, given: Mapping[str, Any], kind: Kind, seed: int, seconds: float, minutes: float
) -> Result:
    """Play a variant of a scenario on a server of this kind."""
    started = time.monotonic()
    verdict, said, found, scene = "clean", "", None, None
    with scratch() as path:
        try:
            async with Stage(kind, seed, seconds, Path(path), minutes=minutes) as stage:
                try:
                    found = await one.play(stage, **given)
                finally:
                    scene = stage.scene
            verdict, said = ("broken" if found.faults else "clean"), str(found)
        except pytest.skip.Exception as error:
            verdict, said = "skipped", str(error)
        except Exception as error:
            traceback.print_exc()
            verdict, said = "failed", f"{type(error).__name__}: {str(error)[:2000]}"
        if verdict in ("broken", "failed"):
            shutil.copytree(path, KEPT / f"{title} on {kind}", dirs_exist_ok=True)
    return Result(
        title, kind, seed, verdict, said,
        handled=found.handled if found else 0,
        duplicates=len(found.repeats) if found else 0,
        restarted=found.starts if found else 0,
        unknown=len(scene.story.unknown) if scene else 0,
        lost=scene.lost if scene else 0,
        recovery=round(scene.recovered, 2) if scene else 0.0,
        took=round(time.monotonic() - started, 1),
    )  # fmt: skip
