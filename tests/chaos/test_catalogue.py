"""The catalogue is complete, and what no other test plays is played here: the rest with `CHAOS=long`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import ELSEWHERE, load
from tests.chaos.conftest import Play
from tests.chaos.scene import IS_LONG

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMED = {name for path in HERE.glob("test_*.py") for name in re.findall(r'play\(f?"([^"{]+)', path.read_text())}
SHORT = {"sigterm with an endless handler hash", "malformed", "publisher is killed", "out of memory"}
"""What the default run plays beside what is named: a few seconds each."""
DESIGN = {*range(1, 22), *range(23, 28), 29, 30, 32, 33, 34, 36, 37, 39, 40, 41, 42, 43, 45, 46, 49, 50, 51, 52}
"""The numbers of the design's catalogue that are played here; 47 and 48 (Sentinel) have a folder of their own."""
REST = [
    (one.name, given, title)
    for one in load()
    for title, given in one.titles()
    if not any(one.name.startswith(name) for name in NAMED) and (IS_LONG or title in SHORT)
]


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "given"), [each[:2] for each in REST], ids=[each[2] for each in REST])
async def test_scenario(play: Play, name: str, given: dict[str, Any]) -> None:
    """A scenario of the catalogue ends with a clean verdict."""
    await play(name, **given)


@pytest.mark.chaos
@pytest.mark.skipif(not IS_LONG, reason="ten minutes of faults at random: with CHAOS=long")
@pytest.mark.timeout(float(os.environ.get("CHAOS_MINUTES", "10")) * 60 + 300)
async def test_mix(play: Play) -> None:
    """Faults of every kind at random, a quarter of the time quiet, CHAOS_MINUTES (10) long: it ends clean."""
    await play("mix", minutes=float(os.environ.get("CHAOS_MINUTES", "10")))


def test_every_fault_of_the_design_is_played() -> None:
    """No number of the design's catalogue is left out, and at least ten are our own."""
    numbers = [number for one in [*load(), *ELSEWHERE] for number in one.number.split(", ")]
    assert {int(number) for number in numbers if number.isdigit()} >= DESIGN
    assert len({number for number in numbers if number.startswith("A")}) >= 10


def test_what_others_play_exists() -> None:
    """A renamed test must not leave a hole in the catalogue."""
    for place in [place for one in ELSEWHERE for place in one.tests]:
        path, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists(), place
