"""The line between a worker and its server is cut, or breaks."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Play

pytestmark = pytest.mark.chaos


async def test_black_hole(play: Play) -> None:
    """A worker that is cut off for three leases fences itself and is replaced; what arrives late is refused."""
    await play("black hole")


async def test_short_cut(play: Play) -> None:
    """All workers are cut off, again and again, for less than a lease: what was on its way arrives late, or twice."""
    await play("short cut")


async def test_reset_storm(play: Play) -> None:
    """Every connection of every worker is reset twenty times."""
    await play("reset storm")
