"""What of the catalogue no other test plays: some of it in every run, the rest with `CHAOS=long`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.catalogue import load
from tests.chaos.conftest import MINUTES, Play
from tests.chaos.scene import IS_LONG

HERE = Path(__file__).parent
PLAYED = re.compile(r'play\(f?"([^"]+)')
NAMED = {re.sub(r"{.*}", ".*", name) for path in HERE.glob("test_*.py") for name in PLAYED.findall(path.read_text())}
SHORT = {"sigterm with an endless handler hash", "malformed", "out of memory"}
"""What the default run plays beside what is named: a few seconds each."""
REST = [
    (one.name, given, title)
    for one in load()
    for title, given in one.titles()
    if not any(re.fullmatch(name, one.name) for name in NAMED) and (IS_LONG or title in SHORT)
]


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "given"), [each[:2] for each in REST], ids=[each[2] for each in REST])
async def test_scenario(play: Play, name: str, given: dict[str, Any]) -> None:
    """A scenario of the catalogue ends with a clean verdict."""
    await play(name, **given)


@pytest.mark.chaos
@pytest.mark.skipif(not IS_LONG, reason="ten minutes of faults at random: with CHAOS=long")
@pytest.mark.timeout(MINUTES * 60 + 300)
async def test_mix(play: Play) -> None:
    """Faults of every kind at random, a quarter of the time quiet, CHAOS_MINUTES (10) long: it ends clean."""
    await play("mix")
